"""`solodg.train`: trains a model on data in files or in memory, as the command line does."""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solodg.errors import UserError
from solodg.model import Model, load
from solodg.progress import stderr_output
from solodg.runs.named_settings import as_domains, checked_name, named_settings

_NAME = "images"  # of data in memory, where none is given
_ARGUMENTS = ("target", "estimate", "output", "name", "resume", "verbose")


def train(
    data: Any,
    *,
    target: str | Sequence[str] | None = None,
    estimate: bool = False,
    output: str | Path | None = None,
    name: str | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Model:
    """Trains a model, as `solodg train` does with the same settings, and returns it.

    Parameters
    ----------
    data
        The name of a dataset, a folder `domain/class/image`, a CSV manifest, a pandas DataFrame
        (columns path or image, label, domain, and optionally group, split), a Hugging Face
        `datasets.Dataset` (the same columns), or a map-style dataset of torch, or another sequence,
        whose items are (image, label, domain).
    target
        The domain to leave out, or several. None: the model is trained on all domains.
    estimate
        Whether to leave each domain out in turn first, to see what to expect on a new site;
        `estimate.json` and the model card in the folder of the run have the result. Only without
        target, and for data on disk.
    output
        The folder of the run. None: a temporary one, which lives as long as the model;
        `Model.save` keeps it.
    name
        Of data in memory, for records and the random split. None: "images".
    resume
        Whether to continue the run in `output`, with the same data and options.
    verbose
        Whether to show messages and progress, on stderr.
    **options
        The options of `solodg train`, with underscores: `backbone="small_cnn"`, `steps=500`.
        They are the fields of `solodg.runs.config.RunConfig` and `Machine`.
    """
    from solodg.data.in_memory import IN_MEMORY, load_in_memory
    from solodg.runs.defaults import resolve
    from solodg.runs.estimate import train_with_estimate
    from solodg.runs.opened_data import loading_of
    from solodg.runs.train import train_run

    progress, say = stderr_output(verbose)
    is_path = isinstance(data, str | Path)
    if is_path and name is not None:
        raise UserError(f"name={name!r} is for data in memory: {data} has a name already.")
    dataset = (
        str(data) if is_path else f"{IN_MEMORY}{checked_name(_NAME if name is None else name)}"
    )
    if estimate and not is_path:
        raise UserError(
            "estimate=True opens the data once for each domain: write images in memory to a folder "
            "domain/class/image, or give a CSV of their paths."
        )
    config, machine = named_settings(dataset, as_domains(target), options, taken=_ARGUMENTS)
    if output is None and (resume or config.devices != "1" or config.num_nodes > 1):
        raise UserError("resume, and training on several devices, need a folder: give output.")
    resolved = resolve(config)
    held = None
    if not is_path:
        loading = loading_of(resolved, machine)
        held = load_in_memory(
            data,
            loading,
            name=checked_name(_NAME if name is None else name),
            skip_bad_images=resolved.skip_bad_images,
            progress=progress,
        )
    folder, temporary = (Path(output), None) if output is not None else _temporary_folder()
    try:
        if estimate:
            train_with_estimate(config, machine, folder, resume=resume, progress=progress, say=say)
        else:
            train_run(
                resolved, machine, folder, data=held, resume=resume, progress=progress, say=say
            )
        model = load(folder)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        weakref.finalize(model, shutil.rmtree, temporary, ignore_errors=True)
    return model


def _temporary_folder() -> tuple[Path, Path]:
    """Returns a folder for a run, and the temporary folder around it, which is to be removed."""
    outer = Path(tempfile.mkdtemp(prefix="solodg-"))
    return outer / "run", outer
