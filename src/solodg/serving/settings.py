"""What the server allows."""

from dataclasses import dataclass, field

from solodg.errors import UserError
from solodg.pixels import Trust


@dataclass(frozen=True)
class Settings:
    max_batch: int = 16  # images computed at once, of however many requests; 1: one by one
    max_images: int = 32  # of one request
    max_bytes: int = 20 * 1024**2  # of one request
    max_pixels: int = 50_000_000  # of one image, before it is decoded
    queue: int = 128  # images taken in and not yet answered; more are told to come again
    seconds: float = 30.0  # for a request, from its first byte to its answer
    token: str | None = field(default=None, repr=False)  # asked of every request, if there is one

    def __post_init__(self) -> None:
        numbers = (self.max_batch, self.max_images, self.max_bytes, self.max_pixels, self.queue)
        if min(numbers) < 1 or self.seconds <= 0:
            raise UserError("the server's limits must be positive.")
        if self.queue < self.max_images:
            raise UserError(
                f"a queue of {self.queue} images cannot take a request of {self.max_images}: "
                "give a larger --queue, or a smaller --max-images."
            )
        if self.token is not None and not (self.token and self.token.isascii()):
            raise UserError("the token is empty, or has characters that no HTTP header can hold.")

    @property
    def trust(self) -> Trust:
        return Trust(self.max_pixels)
