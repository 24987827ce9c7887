"""Writes runs to the Hub, for `Model.push_to_hub` and `solodg push RUN OWNER/NAME`."""

from pathlib import Path
from typing import TYPE_CHECKING

from solodg.errors import UserError, missing_extra
from solodg.hub.download import WHAT, hub_errors
from solodg.hub.files import ONNX, check_private, stage
from solodg.hub.names import HubName, parse_hub_name
from solodg.predict.export import export_onnx
from solodg.predict.torch import Predictor
from solodg.runs.folder import CARD
from solodg.runs.model_card import card_text
from solodg.storage import write_atomically

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_target(name: str) -> HubName:
    """Reads OWNER/NAME, optionally with @BRANCH, as a repository that a run is pushed to.

    Raises `UserError` if it cannot be, or if the extra `hub` is missing.
    """
    target = parse_hub_name(name)
    if target.file is not None:
        raise UserError(f"{name}: a run is pushed to OWNER/NAME, without the name of a file.")
    _api()
    return target


def upload(folder: Path, target: HubName, message: str, *, public: bool) -> str:
    """Pushes a folder to a repository of the Hub; returns the address of the commit.

    A repository that does not exist yet is private unless `public`; that of an existing one is not
    changed.
    """
    api = _api()
    with hub_errors(target):
        api.create_repo(target.repo, private=not public, exist_ok=True)
        if target.revision is not None:
            api.create_branch(target.repo, branch=target.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=target.repo,
            folder_path=folder,
            revision=target.revision,
            commit_message=message,
        )
    return str(commit.commit_url)


def write_files(run: Path, folder: Path, name: HubName, *, licence: str | None, onnx: bool) -> None:
    """Writes to a folder all that is pushed of a run, checked to hold no path of this machine."""
    predictor = Predictor.load(run)  # refuses what is damaged, before anything is sent
    stage(run, folder)
    write_atomically(folder / CARD, card_text(folder, hub_name=str(name), licence=licence).encode())
    if onnx:
        export_onnx(predictor, folder / ONNX)
    check_private(run, folder)


def _api() -> "HfApi":
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        raise missing_extra("hub", WHAT, error) from error
    return HfApi(library_name="solodg")
