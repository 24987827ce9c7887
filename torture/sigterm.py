"""SIGTERM under load: what was accepted is answered, and the server exits with 0 in time.

Accepted are requests whose body the server is reading when the signal comes, and all that were sent
a while before. A request that is sent in the same moment may find the connection closed, with no
byte of an answer: its client may send it again elsewhere.
"""

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.server_process import Server, served
from torture.commands import export_model, pictures
from torture.http_client import Answer, Piece, ask, post
from torture.tally import Tally

DEFAULT_COUNT = 5  # stops
CLIENTS, HALF_SENT, IMAGES = 32, 8, 16
TIMEOUT = 10  # of the server, for a request; it has 5 seconds more to stop
GRACE = TIMEOUT + 5
MARGIN = 0.5  # seconds before the signal, by which a request has surely been accepted


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Stops a server `count` times, at random moments of its work."""
    model, images = export_model(scratch), pictures(seed, IMAGES)
    generator = random.Random(f"{seed} sigterm")
    slowest = 0.0
    for _ in range(count):
        with served(model, "--timeout", str(TIMEOUT)) as server:
            asyncio.run(_stop(tally, server, images, generator.uniform(1, 3)))
            stopped = time.monotonic()
            try:
                code = server.process.wait(GRACE)
                tally.check(code == 0, f"exit code {code}: {server.log.read_text()[-500:]}")
            except subprocess.TimeoutExpired:
                tally.check(False, f"still running {GRACE} s after SIGTERM")
            slowest = max(slowest, time.monotonic() - stopped)
    counts = tally.counts
    tally.figures += [
        f"{count} stops; {counts['answered']:,} requests answered, {counts['half']} of which were "
        f"half sent at the signal; {counts['closed']} sent in its moment found the connection "
        "closed",
        f"exit within {slowest:.1f} s of the last answer (allowed: {GRACE} s)",
    ]


async def _stop(tally: Tally, server: Server, images: list[bytes], delay: float) -> None:
    """Puts the server under load, sends SIGTERM after a while, and checks all answers."""
    where = (server.host, server.port)
    expected = [await ask(*where, [Piece(post(image))], 30) for image in images]
    signalled = asyncio.Event()
    moment = time.monotonic() + delay

    async def half_sent(number: int) -> None:
        request = post(images[number])
        middle = len(request) - len(images[number]) // 2
        pause = moment - time.monotonic() + 0.5  # the rest comes half a second after the signal
        answer = await ask(*where, [Piece(request[:middle], pause), Piece(request[middle:])], 30)
        same = (answer.status, answer.body) == (200, expected[number].body)
        tally.check(same, f"a request that was half sent at the signal: {answer}")
        tally.counts["half"] += same
        tally.counts["answered"] += same

    async def client(number: int) -> None:
        while not signalled.is_set():
            number = (number + 1) % len(images)
            started = time.monotonic()
            answer = await ask(*where, [Piece(post(images[number]))], 30)
            _judge(tally, answer, expected[number], moment - started)

    tasks = [asyncio.create_task(half_sent(n % len(images))) for n in range(HALF_SENT)]
    tasks += [asyncio.create_task(client(n)) for n in range(CLIENTS)]
    await asyncio.sleep(moment - time.monotonic())
    server.process.send_signal(signal.SIGTERM)
    signalled.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def _judge(tally: Tally, answer: Answer, expected: Answer, before: float) -> None:
    """Checks the answer to a request that was sent so many seconds before the signal."""
    if answer.status == 0 and not answer.body and before < MARGIN:
        tally.counts["closed"] += 1
        return
    same = (answer.status, answer.body) == (200, expected.body)
    tally.check(same, f"a request sent {before:.2f} s before the signal: {answer}")
    tally.counts["answered"] += same
