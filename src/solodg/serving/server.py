"""Runs the app: listens, logs, and on a signal finishes open requests before it stops."""

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvicorn

from solodg.errors import UserError
from solodg.models.allocator import return_freed_memory
from solodg.predict.base import ImagePredictor
from solodg.progress import NoProgress, Progress, Say
from solodg.serving.app import build_app
from solodg.serving.loopback_guard import is_loopback
from solodg.serving.service import Draw
from solodg.serving.settings import ServerSettings

_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"uvicorn": {"handlers": ["stderr"], "level": "WARNING"}},
}


def serve(
    predictor: ImagePredictor,
    name: str,
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    draw: Draw | None = None,
    progress: Progress | None = None,
    say: Say,
    announce: Say | None = None,
) -> None:
    """Serves a model until SIGTERM or SIGINT; then finishes open requests and accepts no more.

    `say` receives messages for the operator, and the address if there is no `announce` for it.
    """
    listening = _listen(host, port)
    if not is_loopback(host) and settings.token is None:
        say(f"{host} is open to the network and requires no token: see --token-file.")
    with listening:
        with (progress or NoProgress()).stage("Computing a first batch of every size"):
            _warm_up(predictor, settings.max_batch)
        address = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            build_app(
                predictor,
                name,
                settings,
                draw,
                loopback_only=is_loopback(host),
                trim=return_freed_memory,
            ),
            log_config=_LOG,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.seconds) + 5,
        )
        message = f"Serving {name} at http://{address}:{listening.getsockname()[1]}"
        with _signals_ignored():
            _Server(config, lambda: (announce or say)(message)).run(sockets=[listening])
            say("Stopped.")
    logging.shutdown()


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignores SIGTERM and SIGINT, which uvicorn raises again after a graceful stop.

    They must not end the process, which may be a Python session that goes on afterwards.
    """
    before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """Calls `ready` once the server responds to requests and to signals."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def _warm_up(predictor: ImagePredictor, images: int) -> None:
    """Computes a batch of every size, the largest first and last.

    So no later batch needs more memory, and the first client does not wait for initialisation.
    """
    channels, size = predictor.info.channels, predictor.info.image_size
    for count in (*range(images, 0, -1), images):
        predictor.compute(np.zeros((count, channels, size, size), np.uint8))


def read_token(path: Path | None, environment: str | None) -> str | None:
    """Reads the bearer token from a file, or takes the value of the environment variable.

    It is not an option of the command line, because other users of the machine can see those.
    """
    if path is None:
        return environment.strip() if environment else None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the token from {path}: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen at {host}, port {port}: {error}. Try another --host, or "
            "another --port; 0 takes one that is free."
        ) from error
