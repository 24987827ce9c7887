"""Real servers for tests: `solodg serve` in a process of its own, or an app on a real socket."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import Server, served
from solodg.predict.base import ImagePredictor
from solodg.serving.app import build_app
from solodg.serving.settings import ServerSettings

__all__ = ["Server", "listening", "served"]


@contextmanager
def listening(predictor: ImagePredictor, **settings) -> Iterator[str]:
    """The app in a thread of this process; yields its address."""
    config = uvicorn.Config(
        build_app(predictor, "test", ServerSettings(**settings)), log_level="error"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
