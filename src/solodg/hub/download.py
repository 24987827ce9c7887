"""Reads runs from the Hub: `solodg.load("hf://owner/name")`, and every command that takes a RUN.

Only files of known names are fetched: JSON, safetensors, ONNX and the card. Nothing of a repository
is executed. Without a network, what the cache of the Hub holds is used.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solodg.errors import UserError, missing_extra
from solodg.hub.names import HubName, is_hub_name, parse_hub_name

WHAT = "The Hugging Face Hub"


def local_run(name: str | Path) -> Path:
    """Returns the folder or file of a run; one of the Hub (`hf://...`) is fetched first.

    The folder of a fetched run is a copy that may be written to, in the cache of solodg; weights in
    it are links to the cache of the Hub.
    """
    if not isinstance(name, str | Path):
        raise UserError(
            f"a model of type {type(name).__name__}: expected the path of a run folder or of an "
            "exported file that ends with .onnx, or hf://OWNER/NAME."
        )
    if not is_hub_name(name):
        return Path(name)
    hub_name = parse_hub_name(name)
    if hub_name.file is not None:
        return _fetched_file(hub_name, hub_name.file)
    return _writable(_snapshot(hub_name), hub_name)


def _fetched_file(name: HubName, file: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        raise missing_extra("hub", WHAT, error) from error
    with hub_errors(name):
        return Path(hf_hub_download(name.repo, file, revision=name.revision))


def _snapshot(name: HubName) -> Path:
    """Returns the folder of a commit in the cache of the Hub, with the files of a run."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise missing_extra("hub", WHAT, error) from error
    from solodg.hub.files import KNOWN, LARGE, missing

    wanted = [file for file in KNOWN if file not in LARGE]
    with hub_errors(name):
        folder = Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted))
    lacking = missing(path.name for path in folder.iterdir())
    if lacking:
        raise UserError(
            f"{name} holds no run of solodg: {' and '.join(lacking)} not found in it. Runs are "
            "written there by `solodg push RUN OWNER/NAME`."
        )
    return folder


def _writable(snapshot: Path, name: HubName) -> Path:
    """Returns a copy of a commit in the cache of solodg, made once."""
    from solodg.hub.files import KNOWN
    from solodg.runs.cache_folder import default_cache_dir
    from solodg.runs.checkpoint import WEIGHTS

    folder = default_cache_dir() / "hub" / name.repo.replace("/", "--") / snapshot.name
    folder.mkdir(parents=True, exist_ok=True)
    for file in KNOWN:
        source, copy = snapshot / file, folder / file
        if file == WEIGHTS:  # never written to: a link, which is renewed if the cache has moved
            target, part = source.resolve(), copy.with_name(f".{file}.{os.getpid()}")
            part.symlink_to(target)
            os.replace(part, copy)
        elif source.is_file() and not copy.is_file():
            part = copy.with_name(f".{file}.{os.getpid()}")
            shutil.copyfile(source, part)
            os.replace(part, copy)
    return folder


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Turns errors of the Hub into `UserError`: offline, no such repository, no permission."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is open only to those whom its owner admits: ask on its page, then run "
            "`hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is no repository {name.repo!r} on the Hub, or it is private and no token that "
            "may read it is given. Check the name; for a private one run `hf auth login` or set "
            "HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{name.repo} has no revision {name.revision!r}: give a branch, a tag or a commit."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise UserError(f"{name.repo} has no file {name.file!r}.") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"{name}: no token. Run `hf auth login`, or set HF_TOKEN.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise UserError(
            f"{name} is not in the cache of the Hub, or not whole, and {why}. Fetch it once with a "
            "network; HF_HOME names the cache."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"the Hub refuses this for {name.repo} (status {status}): run `hf auth login` or "
                "set HF_TOKEN, with a token that may do it."
            ) from error
        raise UserError(f"the Hub answered {name.repo} with status {status}: {error}") from error
    except OSError as error:  # of the network, and of the disk
        if not _of_network(error):
            raise
        raise UserError(f"{name}: the Hub cannot be reached ({error}).") from error
    except Exception as error:
        if not _of_network(error):
            raise
        raise UserError(f"{name}: the Hub cannot be reached ({error}).") from error


def _of_network(error: Exception) -> bool:
    """Returns whether an error is one of the HTTP library that the client of the Hub uses."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or bool(modules & {"httpx", "httpx2", "requests"})
