"""`solodg train`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from solodg.cli.console import err, out
from solodg.cli.options import Accelerator, CacheDir, DataDir, Download
from solodg.errors import UserError


def train(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A name from [bold]solodg datasets[/bold], a folder domain/class/image, or a "
            "CSV manifest with columns path, label, domain (and group, split)."
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(help="Domain to leave out; repeat for several. Training never sees it."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Domain that is neither trained on nor scored; repeat for several."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder.  [dim]default: runs/DATASET-TARGET-ALGORITHM-SEED[/dim]"
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="solo_plus, solo (the paper's method), erm, or another of the README's table.  "
            "[dim]default: solo_plus; solo with its presets and variants[/dim]"
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Of solo_plus: no-frame, no-film, no-swap, no-domain-supervision. Of solo: "
            "invariant, no-hierarchy, no-prior-supervision, no-meta-learning, literal."
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="literal: the paper's recipe at its word, 10,000 steps.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Argument of the algorithm, NAME=VALUE; repeat for several."),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Any timm model, alexnet, or small_cnn.  [dim]default: resnet18[/dim]"),
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Fetch the backbone's published weights.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="Backbone weights from a safetensors file.")
    ] = None,
    freeze_backbone: Annotated[
        bool,
        typer.Option(
            "--freeze-backbone", help="Compute features once (no augmentation), train the rest."
        ),
    ] = False,
    train_stages: Annotated[
        int | None,
        typer.Option(help="Fine-tune only the last N stages of the backbone.  [dim]all[/dim]"),
    ] = None,
    freeze_norm: Annotated[
        bool | None,
        typer.Option(
            "--freeze-norm/--train-norm",
            help="BatchNorm statistics.  [dim]default: frozen when weights are given[/dim]",
        ),
    ] = None,
    image_norm: Annotated[
        str | None,
        typer.Option(
            help="Mix the image's own statistics into every BatchNorm; the source's count as this "
            "many pixels, e.g. 300; 0: do not. Several, e.g. 0,3000,300, are as many readings of "
            "an image, whose features are averaged.  [dim]default: as the algorithm wants it[/dim]",
        ),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels a side.")] = None,
    channels: Annotated[int | None, typer.Option(help="1 (grey) or 3 (colour).")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps.  [dim]default: 2000; 600 with a frozen backbone[/dim]"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Queries of the meta-target a step.  [dim]default: 32[/dim]")
    ] = None,
    context_images: Annotated[
        int | None,
        typer.Option(help="Context images per class and domain a step.  [dim]default: 4[/dim]"),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of all but the backbone.")] = None,
    backbone_learning_rate: Annotated[float | None, typer.Option(help="Of the backbone.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[dim]default: 0.0005[/dim]")] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option(help="0: none.  [dim]default: 0.1 from random weights[/dim]"),
    ] = None,
    weight_average: Annotated[
        float | None,
        typer.Option(help="Validate and keep a moving average of the weights, e.g. 0.99."),
    ] = None,
    decay: Annotated[
        str | None,
        typer.Option(
            help="Of the learning rates: cosine, to zero, or constant.  [dim]default: cosine from "
            "random weights[/dim]"
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="leave-one-out: choose the number of steps by leaving each source domain out in "
            "turn, which costs as many more trainings.  [dim]default: by source validation[/dim]"
        ),
    ] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    centre_images: Annotated[
        int | None,
        typer.Option(
            help="Training images per class and domain for the stored class centres.  "
            "[dim]default: 50[/dim]"
        ),
    ] = None,
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="Training augmentation.")
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Source images held out where the dataset gives no split."),
    ] = None,
    train_images: Annotated[
        int | None, typer.Option(help="Training images of rotated datasets, per angle.")
    ] = None,
    pseudo_domains: Annotated[
        str | None, typer.Option(help="Make source domains: random, or clusters (of features).")
    ] = None,
    num_pseudo_domains: Annotated[
        int | None, typer.Option(help="How many.  [dim]default: 3[/dim]")
    ] = None,
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Leave out what cannot be read, and say so.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output, if there is one.")
    ] = False,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    download: Download = False,
    workers: Annotated[int | None, typer.Option(help="Threads that read episodes ahead.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="For decoded images.")] = None,
    accelerator: Accelerator = None,
    devices: Annotated[str | None, typer.Option(help="How many, or which: 2, 0,1, auto.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Machines.")] = None,
    strategy: Annotated[str | None, typer.Option(help="auto, ddp, ...")] = None,
    precision: Annotated[str | None, typer.Option(help="32-true, 16-mixed or bf16-mixed.")] = None,
) -> None:
    """Train on all domains but the target, and keep the model that is best on source validation."""
    algorithm = algorithm or _default_algorithm(preset, variant)
    given = {
        name: value
        for name, value in {
            "targets": tuple(target) if target else None,
            "exclude": tuple(exclude) if exclude else None,
            "algorithm": algorithm,
            "variant": variant,
            "arguments": assignments(set_ or []),
            "backbone": backbone,
            "pretrained": pretrained,
            "weights": str(weights) if weights else None,
            "freeze_backbone": freeze_backbone,
            "train_stages": train_stages,
            "freeze_norm": freeze_norm,
            "image_norm": image_norm,
            "image_size": image_size,
            "channels": channels,
            "steps": steps,
            "batch_size": batch_size,
            "context_images": context_images,
            "learning_rate": learning_rate,
            "backbone_learning_rate": backbone_learning_rate,
            "weight_decay": weight_decay,
            "label_smoothing": label_smoothing,
            "weight_average": weight_average,
            "decay": decay,
            "select": select,
            "validate_every": validate_every,
            "centre_images": centre_images,
            "augment": augment,
            "val_fraction": val_fraction,
            "train_images": train_images,
            "pseudo_domains": pseudo_domains,
            "num_pseudo_domains": num_pseudo_domains,
            "skip_bad_images": skip_bad_images,
            "seed": seed,
            "devices": devices,
            "num_nodes": num_nodes,
            "precision": precision,
        }.items()
        if value is not None
    }
    machine_values = {
        "data_dir": data_dir,
        "cache_dir": cache_dir,
        "download": download,
        "workers": workers,
        "memory_gb": memory_gb,
        "accelerator": accelerator,
        "strategy": strategy,
    }
    from solodg.errors import unknown
    from solodg.progress import BarProgress
    from solodg.runs.config import PRESETS, Machine, RunConfig, build, resolve
    from solodg.runs.train import train_run

    if preset is not None and preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    values = (PRESETS[preset] if preset else {}) | given
    if algorithm != "solo" and variant is None:
        values.pop("variant", None)  # a preset's variant is solo's; its budget is for all
    config = resolve(build(RunConfig, {"dataset": dataset} | values))
    machine = build(Machine, {k: v for k, v in machine_values.items() if v is not None})
    folder = output or _default_folder(config)
    train_run(config, machine, folder, resume=resume, progress=BarProgress(err), say=err.print)
    if _is_first_process():
        _after_training(folder)


def _default_algorithm(preset: str | None, variant: str | None) -> str:
    """The best we have; the paper's method where a preset or a variant of it is asked for."""
    from solodg.algorithms import ALGORITHMS

    ours = preset is None and (variant is None or variant in ALGORITHMS["solo_plus"].variants)
    return "solo_plus" if ours else "solo"


def assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE, the value read as JSON where it is some."""
    values = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise UserError(f"--set {pair!r}: expected NAME=VALUE, e.g. kl_weight=0.")
        try:
            values[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            values[name.replace("-", "_")] = text
    return values


def _default_folder(config: Any) -> Path:
    from solodg.data.domains import fold

    dataset = Path(config.dataset).stem
    target = "-".join(fold(t) for t in config.targets) or "target"
    method = (
        config.algorithm if config.variant == "default" else f"{config.algorithm}-{config.variant}"
    )
    return Path("runs") / f"{dataset}-{target}-{method}-{config.seed}"


def _is_first_process() -> bool:
    """False in the further processes that a distributed run starts with the same command."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def _after_training(folder: Path) -> None:
    from solodg.runs.checkpoint import selection

    chosen = selection(folder)
    accuracy = 100 * chosen["validation"]["accuracy"]
    out.print(f"Selected step {chosen['step']}: source validation accuracy {accuracy:.1f}%.")
    out.print(f"Model: {folder}")
    out.print(f"Next: solodg evaluate {folder}", style="dim")
