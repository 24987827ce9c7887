"""The settings of the server: its limits, and the bearer token."""

import math
from dataclasses import dataclass, field

from solodg.errors import UserError
from solodg.pixels import DecodeLimits


@dataclass(frozen=True)
class ServerSettings:
    """Limits on requests and images, the size of micro-batches, and the bearer token."""

    max_batch: int = 16  # images of one micro-batch, from any number of requests; 1: no batching
    max_images: int = 32  # of one request
    max_bytes: int = 20 * 1024**2  # of one request
    max_pixels: int = 50_000_000  # of one image, checked before it is decoded
    decode_pixels: int = 50_000_000  # of all images decoded at once; the others wait
    queue: int = 128  # images admitted and not yet answered; beyond, a request gets a 429
    queue_bytes: int = 256 * 1024**2  # of admitted requests; beyond, a request gets a 429
    seconds: float = 30.0  # for a request, from its first byte to its response
    token: str | None = field(default=None, repr=False)  # required of every request, if set

    def __post_init__(self) -> None:
        sizes = (self.max_batch, self.max_images, self.max_bytes, self.max_pixels)
        smallest = min(*sizes, self.decode_pixels, self.queue, self.queue_bytes)
        if smallest < 1 or not 0 < self.seconds < math.inf:
            raise UserError(
                "the server's limits (--max-..., --decode-pixels, --queue..., --timeout) must be "
                "finite and above 0."
            )
        if self.queue < self.max_images:
            raise UserError(
                f"a queue of {self.queue} images cannot take a request of {self.max_images}: "
                "give a larger --queue, or a smaller --max-images."
            )
        if self.token is not None and not (self.token and self.token.isascii()):
            raise UserError("the token is empty, or has characters that no HTTP header can hold.")

    @property
    def decode_limits(self) -> DecodeLimits:
        """The limits on a single image, which the decoder applies."""
        return DecodeLimits(self.max_pixels)
