"""Requests: thousands of hostile ones against a running server, and a good one after each hundred.

The server may refuse a request in any way that HTTP has for it. It must not fail (status 500), nor
hang, nor grow beyond a stated size, and a good request is answered as the first one was.
"""

import asyncio
from collections import Counter
from pathlib import Path

from benchmarks.server_process import Server, served
from torture.commands import IMAGE, export_model
from torture.hostile import MAX_MB, SECONDS, Generator, Hostile
from torture.http_client import Answer, Piece, ask, post
from torture.tally import Tally

DEFAULT_COUNT = 10_000
CONNECTIONS, SLOW_CONNECTIONS = 16, 24
ROUND = 100  # hostile requests between two good ones
# Megabytes above those of the idle server. An image of 50 megapixels takes up to 16 bytes for each
# pixel while it is decoded.
PEAK, AFTER = 1000, 200
REST = 10.0  # seconds until memory has returned


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Sends `count` hostile requests to a server, and checks what it answers and what it takes."""
    model = export_model(scratch)
    with served(model, "--max-mb", str(MAX_MB), "--timeout", str(SECONDS)) as server:
        asyncio.run(storm(tally, server, seed, count))
        tally.check(server.process.poll() is None, "the server has ended")
        log = server.log.read_text(errors="replace")
        tally.check("Traceback" not in log, f"a traceback in the server's log: {log[-3000:]}")


async def storm(tally: Tally, server: Server, seed: int, count: int) -> None:
    """Sends hostile requests in rounds, with a good one after each."""
    picture = IMAGE.read_bytes()
    generator = Generator(seed, picture)
    good = post(picture)
    first = await ask(server.host, server.port, [Piece(good)], SECONDS + 10)
    if not tally.check(first.status == 200, f"the first good request: {first}"):
        return
    idle = server.memory().now
    statuses: Counter[int] = Counter()
    kinds: set[str] = set()
    places, slow_places = asyncio.Semaphore(CONNECTIONS), asyncio.Semaphore(SLOW_CONNECTIONS)

    async def send(number: int, hostile: Hostile) -> None:
        async with slow_places if hostile.slow else places:
            seconds = 2.0 * SECONDS
            half_close = hostile.half_close
            answer = await ask(server.host, server.port, hostile.pieces, seconds, half_close)
        statuses[answer.status] += 1
        kinds.add(hostile.kind)
        problem = _problem(hostile, answer)
        tally.check(problem is None, f"request {number} ({hostile.kind}): {problem}")

    slow = []  # these take their time, while the rounds go on
    for start in range(0, count, ROUND):
        tasks = []
        for number in range(start, min(start + ROUND, count)):
            hostile = generator.request(number)
            task = asyncio.create_task(send(number, hostile))
            (slow if hostile.slow else tasks).append(task)
        await asyncio.gather(*tasks)
        again = await ask(server.host, server.port, [Piece(good)], SECONDS + 10)
        same = (again.status, again.body) == (first.status, first.body)
        tally.check(same, f"the good request after {start + ROUND}: {again}")
        tally.counts["good"] += same
    await asyncio.gather(*slow)
    await check_memory(tally, server, idle, PEAK, AFTER)
    shown = ", ".join(f"{n:,} x {s or 'closed'}" for s, n in sorted(statuses.items()))
    tally.figures.insert(0, f"{sum(statuses.values()):,} hostile requests of {len(kinds)} kinds, "
                            f"{len(slow)} of them slow ({shown})")  # fmt: skip
    tally.figures.insert(1, f"{tally.counts['good']} good answers between them")


async def check_memory(tally: Tally, server: Server, idle: float, peak: int, after: int) -> None:
    """Checks the most memory that the server has had, and what it keeps once it has rested."""
    most = server.memory().peak
    for _ in range(int(REST * 10)):
        now = server.memory().now
        if now <= idle + after:
            break
        await asyncio.sleep(0.1)
    tally.check(most <= idle + peak, f"memory: {most:.0f} MB at the peak, {idle:.0f} MB idle")
    tally.check(now <= idle + after, f"memory: {now:.0f} MB kept, {idle:.0f} MB before")
    tally.figures.append(
        f"memory {idle:.0f} MB idle, {most:.0f} MB at the peak (allowed: {peak:,} MB more), "
        f"{now:.0f} MB afterwards (allowed: {after} MB more)"
    )


def _problem(hostile: Hostile, answer: Answer) -> str | None:
    """Returns what is wrong with the answer to a hostile request, or None."""
    if answer.status == 0:
        return f"no answer in {answer.seconds:.1f} s" if hostile.must_answer else None
    if answer.status >= 500 and answer.status != 503:
        return f"{answer.status}: {answer.body[:300]!r}"
    if answer.status == 200 and b'"predictions"' in answer.body:
        try:
            for prediction in answer.json()["predictions"]:
                total = sum(prediction["probabilities"].values())
                if not 0.99 < total < 1.01:
                    return f"probabilities that sum to {total}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"200 with {answer.body[:300]!r}: {error!r}"
    return None
