"""Real servers for tests: `solodg serve` in a process of its own, or an app on a real socket."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import uvicorn

from solodg.predict.base import ImagePredictor
from solodg.serving.app import build_app
from solodg.serving.settings import ServerSettings


class Server(NamedTuple):
    url: str
    process: subprocess.Popen


@contextmanager
def served(model: Path, *options: str, **environment: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "solodg", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        seen = ""
        for line in process.stderr:
            seen += line
            if found := re.search(r"http://\S+", line):
                yield Server(found[0], process)
                break
        else:
            raise AssertionError(f"the server did not start: {seen}")
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()


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
