"""The process around the app: an address, a log, and an end that finishes what was taken."""

import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import uvicorn

from solodg.errors import UserError
from solodg.predict.base import ImagePredictor
from solodg.serving.app import build_app
from solodg.serving.loopback_guard import is_loopback
from solodg.serving.service import Draw
from solodg.serving.settings import Settings

_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"uvicorn": {"handlers": ["stderr"], "level": "WARNING"}},
}


def serve(
    predictor: ImagePredictor,
    name: str,
    settings: Settings,
    *,
    host: str,
    port: int,
    draw: Draw | None = None,
    say: Callable[[str], None],
) -> None:
    """Until SIGTERM or SIGINT; then no more is taken in, and what was is answered."""
    listening = _listen(host, port)
    if not is_loopback(host) and settings.token is None:
        say(f"{host} is open to the network and asks for no token: see --token-file.")
    with listening:
        _warm_up(predictor, settings.max_batch)
        address = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            build_app(predictor, name, settings, draw, only_here=is_loopback(host)),
            log_config=_LOG,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.seconds) + 5,
        )
        # uvicorn raises the signal again once it has stopped: that is not an error here.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        told = f"Serving {name} at http://{address}:{listening.getsockname()[1]}"
        _Server(config, lambda: say(told)).run(sockets=[listening])
    say("Stopped.")
    logging.shutdown()


class _Server(uvicorn.Server):
    """Says so once it answers, and once a signal would stop it."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def _warm_up(predictor: ImagePredictor, images: int) -> None:
    """Every size of batch once, the largest first and last: no later one needs more memory, and the
    first client no patience."""
    channels, size = predictor.info.channels, predictor.info.image_size
    for count in (*range(images, 0, -1), images):
        predictor.compute(np.zeros((count, channels, size, size), np.uint8))


def read_token(path: Path | None, environment: str | None) -> str | None:
    """From a file, or from the environment; never from the command line, which all can see."""
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
            f"cannot listen at {host}, port {port}: {error}. Try another --port; 0 takes one that "
            "is free."
        ) from error
