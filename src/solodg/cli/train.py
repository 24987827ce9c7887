"""`solodg train`."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from solodg.cli.config_options import options_of, validated, with_options
from solodg.cli.console import err, out, shown
from solodg.cli.data_table import print_data
from solodg.cli.options import Quiet
from solodg.errors import UserError, unknown_name
from solodg.runs.config import Machine, ResolvedConfig, RunConfig
from solodg.runs.presets import PRESETS
from solodg.storage import parse_json

if TYPE_CHECKING:
    from solodg.progress import Say

_OPTIONS = {option.name: option for option in options_of(RunConfig) + options_of(Machine)}
_LAST = ("devices", "num_nodes", "strategy", "precision")  # rarely needed: --help shows them last


@with_options(
    *(option for name, option in _OPTIONS.items() if name not in _LAST),
    *(_OPTIONS[name] for name in _LAST),
    after={
        "targets": "estimate",
        "exclude": "output",
        "variant": "preset",
        "seed": "resume",
        "precision": "quiet",
    },
)
def train(
    output: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder.  [dim]default: runs/DATASET-TARGET-ALGORITHM-SEED; without "
            "target runs/DATASET-all-ALGORITHM-SEED[/dim]"
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="literal: the paper's recipe taken literally, 10,000 steps."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --output, if there is one.")
    ] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Without --target: leave each domain out in turn first, to say what to expect on "
            "a new site, beside ERM; the final model uses the steps and the parts of the "
            "adaptation that these trainings choose.",
        ),
    ] = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Train on all domains but the target, and keep the model that is best on source validation.

    Neither training nor the choice of the model sees the target domain. Score the model on it with
    [bold]solodg evaluate RUN[/bold].

    Without --target, the model is trained on all domains of your images; a dataset by name leaves
    its default target out, if it has one. --estimate says what to expect of such a model on a new
    site. [bold]solodg evaluate RUN --on SITE[/bold] scores it there.

    A table of the images is printed first; for the same as JSON, use
    [bold]solodg datasets DATA --json[/bold]. The run's folder has a model card, README.md.
    """
    progress, say = shown(quiet)
    with progress.stage("Loading PyTorch"):
        from solodg.runs.defaults import resolve
        from solodg.runs.estimate import train_with_estimate
        from solodg.runs.train import train_run

    config = config_of(options, preset)
    resolved = resolve(config)
    machine = validated(Machine, options)
    folder = output or _default_folder(resolved, () if estimate else resolved.targets)
    common: dict[str, Any] = {
        "resume": resume,
        "progress": progress,
        "say": say,
        "show": (lambda summary: None) if quiet else partial(print_data, console=err),
    }
    if estimate:
        train_with_estimate(config, machine, folder, **common)
    else:
        train_run(resolved, machine, folder, **common)
    if _is_first_process():
        _show_result(folder, say)


def config_of(options: dict[str, Any], preset: str | None = None) -> RunConfig:
    """Builds the configuration; given options override those of the preset."""
    if preset is not None and preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    values = dict(PRESETS[preset]) if preset else {}
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("algorithm", values.get("algorithm")) != values.get("algorithm"):
        values.pop("variant", None)  # it is one of the preset's algorithm; its settings fit all
    arguments = assignments(options["arguments"] or [])
    return validated(RunConfig, values | given | {"arguments": arguments})


def assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """Reads `NAME=VALUE` pairs; a value that is JSON is read as JSON, any other as text."""
    values = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise UserError(f"--set {pair!r}: expected NAME=VALUE, e.g. kl_weight=0.")
        try:
            values[name.replace("-", "_")] = parse_json(text, f"--set {name}")
        except UserError:  # a text
            values[name.replace("-", "_")] = text
    return values


def _default_folder(config: ResolvedConfig, targets: tuple[str, ...]) -> Path:
    from solodg.data.domains import normalise_name

    dataset = Path(config.dataset).stem
    target = "-".join(normalise_name(t) for t in targets) or "all"
    method = (
        config.algorithm if config.variant == "default" else f"{config.algorithm}-{config.variant}"
    )
    return Path("runs") / f"{dataset}-{target}-{method}-{config.seed}"


def _is_first_process() -> bool:
    """Returns whether this is the first of the processes that a distributed run starts."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def _show_result(folder: Path, say: "Say") -> None:
    """Prints the estimate, if there is one, and the selected model; says what to do next."""
    from solodg.runs.checkpoint import selected_steps, selection
    from solodg.runs.folder import CARD, read_config
    from solodg.runs.site_estimate import estimate_table, read_estimate

    estimate = read_estimate(folder)
    if estimate is not None:
        out.print(estimate_table(estimate))
        for text in estimate.remarks():
            out.print(text)
    chosen = selection(folder)
    accuracy = 100 * chosen["validation"]["accuracy"]
    out.print(f"Selected {selected_steps(chosen)}: source validation accuracy {accuracy:.1f}%.")
    left_out = bool(read_config(folder).targets)
    out.print(f"Model: {folder}" + ("" if left_out else ", trained on all domains"))
    if (folder / CARD).is_file():
        out.print(f"Model card: {folder / CARD}")
    say(f"Next: solodg evaluate {folder}{'' if left_out else ' --on SITE'}")
