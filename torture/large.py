"""Large images: requests at once, each of eight images of 50 megapixels."""

import asyncio
from pathlib import Path

from benchmarks.server_process import served
from torture.commands import export_model
from torture.hostile import FORM, in_form, large_png
from torture.http_client import Piece, ask, post
from torture.requests import check_memory
from torture.tally import Tally

DEFAULT_COUNT = 12  # requests
IMAGES, SIDE = 8, 7071  # of a request; 7071 x 7071 is just below 50 megapixels
# Megabytes above those of the idle server: one image at once, and up to 16 bytes for each pixel.
PEAK, AFTER = 1000, 200
SECONDS = 200  # of the server, for a request


def torture(tally: Tally, scratch: Path, seed: int, count: int) -> None:
    """Sends `count` requests at once; all are answered alike, and the memory returns."""
    model = export_model(scratch)
    kinds = [large_png(SIDE, SIDE, mode) for mode in ("RGB", "RGBA", "L", "I;16")]
    files = [(f"{number}.png", kinds[number % len(kinds)]) for number in range(IMAGES)]
    request = post(in_form(files), FORM)

    async def crowd() -> None:
        small = post(large_png(40, 40, "RGB"))
        await ask(server.host, server.port, [Piece(small)], 30)
        idle = server.memory().now
        asked = [
            ask(server.host, server.port, [Piece(request)], SECONDS + 10) for _ in range(count)
        ]
        answers = await asyncio.gather(*asked)
        for answer in answers:
            tally.check(answer.status == 200, f"{answer.status}: {answer.body[:300]!r}")
            tally.check(answer.body == answers[0].body, "two answers to the same request")
        await check_memory(tally, server, idle, PEAK, AFTER)
        longest = max(answer.seconds for answer in answers)
        tally.figures.insert(
            0, f"{count} requests of {IMAGES} images of 50 megapixels at once, all answered within "
            f"{longest:.0f} s",
        )  # fmt: skip

    with served(model, "--timeout", str(SECONDS)) as server:
        asyncio.run(crowd())
