"""Load: a minute at 64 clients, each of which asks again as soon as it has its answer."""

import asyncio
import time
from pathlib import Path

import numpy as np

from benchmarks.server_process import served
from benchmarks.serving import Load, client
from torture.commands import export_model, pictures
from torture.http_client import Piece, ask, post
from torture.requests import check_memory
from torture.tally import Tally

DEFAULT_COUNT = 60  # seconds
CLIENTS, IMAGES = 64, 32
PEAK = AFTER = 200  # megabytes above those of the idle server


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Asks for `count` seconds; every answer must be that which its image got alone."""
    model, images, load = export_model(scratch), pictures(seed, IMAGES), Load()

    async def crowd() -> None:
        alone = [await ask(server.host, server.port, [Piece(post(x))], 30) for x in images]
        expected = [answer.json()["predictions"][0] for answer in alone]
        idle = server.memory().now
        until = time.perf_counter() + count
        ended = await asyncio.gather(
            *(
                client(server.host, server.port, images, expected, until, load, number)
                for number in range(CLIENTS)
            ),
            return_exceptions=True,
        )
        for error in ended:
            tally.check(error is None, f"a client could not go on: {error!r}")
        await check_memory(tally, server, idle, PEAK, AFTER)

    with served(model) as server:
        asyncio.run(crowd())
    answered = len(load.times)
    failed = {status: n for status, n in load.statuses.items() if status != 200}
    tally.checks += answered
    tally.check(not failed, f"answers that failed, by status: {failed}")
    tally.check(load.wrong == 0, f"{load.wrong} answers differ from that of the image alone")
    if tally.check(answered > CLIENTS, f"only {answered} answers"):
        quantiles = np.percentile(load.times, [50, 90, 99, 100]) * 1000
        shown = ", ".join(
            f"{name} {value:.0f} ms"
            for name, value in zip(("p50", "p90", "p99", "longest"), quantiles, strict=True)
        )
        tally.figures.insert(0, f"{answered:,} answers to {CLIENTS} clients in {count} s: {shown}")
