"""Hostile requests: a generator of requests that no honest client sends.

`Hostile(kind, pieces, ...)` says of each what it is and whether the server must answer it.
"""

import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from PIL import Image

from torture.http_client import Piece, post

BOUNDARY = "----torture"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
MAX_MB, SECONDS = 4, 15  # limits of the server that the requests are made for
SLOW = 0.01  # share of slow clients
BOMBS = 0.005  # share of images that cost much time, to be decoded or to be refused


class Hostile(NamedTuple):
    """A request, and whether the server has to answer it or may close the connection."""

    kind: str
    pieces: tuple[Piece, ...]
    must_answer: bool = True
    half_close: bool = False
    slow: bool = False


class Generator:
    """Makes hostile requests out of one good image, the same ones for the same seed."""

    def __init__(self, seed: int, picture: bytes) -> None:
        """Stores the good image; images that take long to make are made once, when needed."""
        self.seed, self.picture = seed, picture
        image = Image.open(io.BytesIO(picture)).convert("RGB")
        self.files = [encoded(image, kind) for kind in
                      ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]  # fmt: skip
        self.bombs: dict[str, Callable[[], bytes]] = {
            f"{mode} bomb": cache(partial(large_png, 7000, 7000, mode))
            for mode in ("RGB", "RGBA", "L", "I;16")
        } | {
            "too many pixels": cache(partial(large_png, 7300, 7300, "1")),
            "many frames": cache(partial(_frames, image, 200)),
            "text bomb": cache(partial(_text_bomb, picture)),
        }

    def request(self, number: int) -> Hostile:
        """Returns the request of this number."""
        generator = random.Random(f"{self.seed} request {number}")
        draw = generator.random()
        if draw < SLOW:
            return self._slow(generator)
        if draw < SLOW + BOMBS:
            kind = generator.choice(list(self.bombs))
            return Hostile(kind, (Piece(post(self.bombs[kind]())),))
        make: Callable[[random.Random], Hostile] = generator.choices(
            (self._image, self._form, self._head, self._size), (50, 25, 20, 5)
        )[0]
        return make(generator)

    def _image(self, g: random.Random) -> Hostile:
        file = g.choice(self.files)
        makers: dict[str, Callable[[], bytes]] = {
            "truncated image": lambda: file[: g.randrange(len(file))],
            "flipped image": lambda: _flipped(file, g),
            "shuffled image": lambda: _spliced(file, g.choice(self.files), g),
            "huge dimensions": lambda: _with_size(self.picture, *_sizes(g)),
            "huge PPM": lambda: f"P6 {g.randint(1, 10**9)} {g.randint(1, 10**9)} 255\n".encode(),
            "no image": lambda: g.choice(NO_IMAGES),
            "polyglot": lambda: g.choice(NO_IMAGES) + file if g.random() < 0.5
            else file + g.choice(NO_IMAGES),
            "empty image": lambda: b"",
            "random bytes": lambda: file[: g.randint(0, 12)] + g.randbytes(g.randint(1, 3000)),
        }  # fmt: skip
        kind = g.choice(list(makers))
        body = makers[kind]()
        content_type = g.choice(("image/png", "image/*", "application/octet-stream", "IMAGE/x"))
        request = post(in_form([(kind, body)]), FORM) if g.random() < 0.3 else post(
            body, content_type
        )  # fmt: skip
        return Hostile(kind, (Piece(request),))

    def _form(self, g: random.Random) -> Hostile:
        picture = self.picture
        good = in_form([("a.png", picture)])
        field = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"'.encode()
        odd_name = g.choice(("../../etc/passwd", "a" * 5000, "\u202egnp.exe", 'a"b', "a\\0", "%00"))
        forms: dict[str, tuple[bytes, str]] = {
            "form cut off": (good[: g.randrange(len(good))], FORM),
            "form flipped": (_flipped(good, g, len(good) - len(picture)), FORM),
            "form without boundary": (good, "multipart/form-data"),
            "form with another boundary": (good, "multipart/form-data; boundary=other"),
            "form with an odd boundary": (good, f"multipart/form-data; boundary={'x' * 3000}"),
            "form of text": (field + b"\r\n\r\ntext\r\n--" + BOUNDARY.encode() + b"--\r\n", FORM),
            "form of many files": (in_form([("a.png", b"x")] * g.randint(33, 400)), FORM),
            "form of nothing": (f"--{BOUNDARY}--\r\n".encode(), FORM),
            "form in a form": (in_form([("a", good)]), FORM),
            "form with an odd name": (in_form([(odd_name, picture)]), FORM),
            "form with long headers": (
                field + b"\r\nX-Long: " + b"y" * g.randint(1, 200_000) + b"\r\n\r\n" + picture, FORM
            ),
            "form with a bad image": (in_form([("a", picture), ("b", picture[:50])]), FORM),
            "form that is no form": (g.randbytes(500), FORM),
        }  # fmt: skip
        kind = g.choice(list(forms))
        return Hostile(kind, (Piece(post(*forms[kind])),))

    def _head(self, g: random.Random) -> Hostile:
        kind, request, must_answer = g.choice(odd_requests(self.picture, g))
        # A client that ends its side ends the request too; else some would take the server's time.
        return Hostile(kind, (Piece(request),), must_answer, half_close=not must_answer)

    def _size(self, g: random.Random) -> Hostile:
        size = MAX_MB * 1024**2 + g.randint(1, 1024**2)
        head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        kinds = {
            "announced size": (
                Piece(f"{head}Content-Length: {g.choice((size, 10**12, 2**63))}\r\n\r\n".encode()),
                Piece(self.picture, 0.05),
            ),
            "size over the limit": (
                Piece(f"{head}Content-Length: {size}\r\n\r\n".encode() + bytes(size)),
            ),
            "chunks over the limit": (
                Piece(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()),
                *[Piece(chunk)] * (size // 0x10000 + 1),
            ),
            "size at the limit": (Piece(post(_padded(self.picture, MAX_MB * 1024**2))),),
        }
        kind = g.choice(list(kinds))
        # For a body that never comes the server waits some seconds before it answers.
        return Hostile(kind, kinds[kind], slow=kind == "announced size")

    def _slow(self, g: random.Random) -> Hostile:
        request = post(self.picture)
        start = request.index(b"\r\n\r\n") + 4
        kinds = {
            "slow head": (0, 1),
            "slow body": (start, max(1, (len(request) - start) // 40)),
            "stops in the body": (start + g.randrange(len(self.picture)), len(request)),
        }
        kind = g.choice(list(kinds))
        done, step = kinds[kind]
        if kind == "stops in the body":
            pieces = [Piece(request[:done], SECONDS + 10)]
        else:
            rest = [request[i : i + step] for i in range(done, len(request), step)]
            pieces = [Piece(request[:done]), *(Piece(x, 0.5) for x in rest[:60])]
        return Hostile(kind, tuple(pieces), must_answer=kind != "slow head", slow=True)


def odd_requests(picture: bytes, g: random.Random) -> list[tuple[str, bytes, bool]]:
    """Returns requests whose heads are odd, by kind, and whether they must be answered."""

    def request(line: str, *headers: str, body: bytes = picture) -> bytes:
        lines = [line, *(headers or ("Host: localhost", f"Content-Length: {len(body)}"))]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    host, length = "Host: localhost", f"Content-Length: {len(picture)}"
    line = "POST /predict HTTP/1.1"
    return [
        ("length too small", request(line, host, "Content-Length: 10"), True),
        ("length too large", request(line, host, f"Content-Length: {len(picture) + 99}"), False),
        ("length negative", request(line, host, "Content-Length: -5"), False),
        ("length no number", request(line, host, "Content-Length: many"), False),
        ("two lengths", request(line, host, length, "Content-Length: 3"), False),
        ("length and chunks", request(line, host, length, "Transfer-Encoding: chunked"), False),
        ("bad chunks", request(line, host, "Transfer-Encoding: chunked", body=b"zz\r\nx"), False),
        ("odd coding", request(line, host, length, "Transfer-Encoding: gzip, x"), False),
        ("packed body", request(line, host, length, "Content-Encoding: gzip"), True),
        ("foreign host", request(line, "Host: example.com", length), True),
        ("no host", request(line, length), False),
        ("two hosts", request(line, host, "Host: example.com", length), False),
        ("long header", request(line, host, length, "X: " + "y" * g.randint(1, 300_000)), False),
        ("many headers", request(line, host, length, *["X: y"] * g.randint(1, 5000)), False),
        ("null in a header", request(line, host, length, "X: \0"), False),
        ("folded header", request(line, host, length, "X: a\r\n b"), False),
        ("unknown method", request("BREW /predict HTTP/1.1"), False),
        ("other method", request("DELETE /predict HTTP/1.1"), True),
        ("old version", request("POST /predict HTTP/1.0"), True),
        ("odd version", request("POST /predict HTTP/9.9"), False),
        ("no version", b"GET /\r\n\r\n", False),
        ("long path", request(f"POST /{'p' * g.randint(1, 100_000)} HTTP/1.1"), False),
        ("path upwards", request("GET /../../../../etc/passwd HTTP/1.1"), False),
        ("odd path", request("POST /%00%ff//predict?x=%zz HTTP/1.1"), False),
        ("whole address", request("POST http://example.com/predict HTTP/1.1"), False),
        ("no figures", request("POST /explain HTTP/1.1"), True),
        ("odd type", request(line, host, length, "Content-Type: " + "/;,=" * 50), True),
        ("type of text", request(line, host, length, "Content-Type: application/json"), True),
        ("websocket", request("GET / HTTP/1.1", host, "Upgrade: websocket", "Connection: Upgrade",
                              body=b""), False),
        ("expects", request(line, host, length, "Expect: 100-continue"), True),
        ("no request", g.randbytes(g.randint(1, 2000)), False),
        ("nothing", b"", False),
    ]  # fmt: skip


def encoded(image: Image.Image, kind: str) -> bytes:
    """Returns an image as the content of a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def large_png(width: int, height: int, mode: str) -> bytes:
    """Returns a PNG of one colour: few bytes for many pixels."""
    return encoded(Image.new(mode, (width, height)), "PNG")


NO_IMAGES = (
    b"GIF89a/*<svg/onload=alert(1)>*/=1;", b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n", b"PK\x03\x04" * 9,
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", b"\x1f\x8b\x08\x00" + bytes(99),
    b"\x80\x04\x95cos\nsystem\n", b"null", json.dumps({"images": [1] * 99}).encode(), b"II*\x00"
    + b"\xff" * 60, b"MM\x00*\x00\x00\x00\x08\xff\xff" + bytes(50), b"BM" + b"\xff" * 60,
    b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 30, b"\xff\xd8\xff\xe1\xff\xffExif\x00\x00" * 3,
)  # fmt: skip


def _flipped(content: bytes, g: random.Random, within: int | None = None) -> bytes:
    changed = bytearray(content)
    for _ in range(g.choice((1, 1, 3, 30))):
        changed[g.randrange(within or len(changed))] ^= 1 << g.randrange(8)
    return bytes(changed)


def _spliced(first: bytes, second: bytes, g: random.Random) -> bytes:
    return first[: g.randrange(len(first))] + second[g.randrange(len(second)) :]


def _sizes(g: random.Random) -> tuple[int, int]:
    most = 2**31 - 1
    return g.choice(((0, 0), (most, most), (60_000, 60_000), (1, most), (7000, 7000)))


def _with_size(png: bytes, width: int, height: int) -> bytes:
    """Returns a PNG whose head claims another size, with the right checksum."""
    head = struct.pack(">II", width, height) + png[24:29]
    return png[:16] + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + png[33:]


def _frames(image: Image.Image, count: int) -> bytes:
    """Returns a GIF of many frames."""
    noise = np.random.default_rng(0).integers(0, 256, (count, 64, 64), dtype=np.uint8)
    file = io.BytesIO()
    frames = [Image.fromarray(frame) for frame in noise]
    image.save(file, "GIF", save_all=True, append_images=frames)
    return file.getvalue()


def _text_bomb(png: bytes) -> bytes:
    """Returns a PNG with a text of 256 MB, compressed."""
    content = b"zTXtx\x00\x00" + zlib.compress(bytes(256 * 1024**2), 9)
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:33] + chunk + png[33:]


def _padded(png: bytes, size: int) -> bytes:
    """Returns an image of exactly `size` bytes."""
    return png + bytes(size - len(png))


def in_form(files: list[tuple[str, bytes]]) -> bytes:
    """Returns a form of several files, by name and content."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n'
        "Content-Type: image/png\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in files
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
