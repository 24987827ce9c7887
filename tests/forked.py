"""Commands in processes of their own, forked from a server that has imported what they need.

They start at once: to import PyTorch and Fabric takes seconds of each process.
"""

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["solodg.cli", "solodg.runs.train", "solodg.runs.evaluate", "solodg.bench.runner",
     "solodg.bench.page", "solodg.figures.plots"]
)  # fmt: skip


def start(*arguments: object, said: Path = Path(os.devnull)) -> BaseProcess:
    """Starts `solodg ARGUMENTS`, of one thread; its output goes to the file `said`.

    `process.kill()` ends it, and `process.exitcode` is None while it runs.
    """
    words = [str(argument) for argument in arguments]
    process = _FORKS.Process(target=_run, args=(words, dict(os.environ), said))
    process.start()
    return process


def _run(arguments: list[str], environment: dict[str, str], said: Path) -> None:
    import torch

    from solodg.cli import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["solodg", *arguments]
    main()
