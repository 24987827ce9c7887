"""Writes runs to the Hub: `solodg push RUN OWNER/NAME`."""

import tempfile
from pathlib import Path

from solodg.errors import UserError, missing_extra
from solodg.hub.download import WHAT, hub_errors
from solodg.hub.files import ONNX, check_private, stage
from solodg.hub.names import HubName, parse_hub_name
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.runs.folder import CARD
from solodg.runs.model_card import card_text
from solodg.storage import write_atomically


def push_run(
    run: Path,
    name: str,
    *,
    public: bool = False,
    licence: str | None = None,
    onnx: bool = True,
    message: str | None = None,
) -> str:
    """Pushes a finished run to a repository of the Hub; returns the address of the commit.

    `name` is OWNER/NAME, optionally with @BRANCH. A repository that does not exist yet is private
    unless `public`; that of an existing one is not changed. Paths of this machine are not pushed.
    With `onnx`, the exported file is pushed too.
    """
    target = parse_hub_name(name)
    if target.file is not None:
        raise UserError(f"{name}: a run is pushed to OWNER/NAME, without the name of a file.")
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        raise missing_extra("hub", WHAT, error) from error
    api = HfApi(library_name="solodg")
    with tempfile.TemporaryDirectory(prefix="solodg-hub-") as temporary:
        folder = Path(temporary)
        write_files(run, folder, target, licence=licence, onnx=onnx)
        with hub_errors(target):
            api.create_repo(target.repo, private=not public, exist_ok=True)
            if target.revision is not None:
                api.create_branch(target.repo, branch=target.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=target.repo,
                folder_path=folder,
                revision=target.revision,
                commit_message=message or f"Run of solodg: {run.resolve().name}",
            )
    return str(commit.commit_url)


def write_files(
    run: Path, folder: Path, name: HubName, *, licence: str | None = None, onnx: bool = True
) -> None:
    """Writes to a folder all that is pushed of a run, checked to hold no path of this machine."""
    predictor = Predictor.load(run)  # refuses what is damaged, before anything is sent
    stage(run, folder)
    write_atomically(folder / CARD, card_text(folder, hub_name=str(name), licence=licence).encode())
    if onnx:
        export_onnx(predictor, folder / ONNX)
    check_private(run, folder)
