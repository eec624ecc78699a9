"""From the bytes of a file to the pixels that a model wants.

Invariants: what is made equals what transformers' PIL image processors make of the same file, before they rescale; the
size of an image is known, and refused where it is too large, before its pixels are unpacked; whatever is wrong with a
file is a RequestError that names the field it came in.
Knows nothing of where the bytes came from.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from io import BytesIO

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from stoker_runtime.errors import RequestError
from stoker_runtime.images.rule import ImageRule, TooNarrowError
from stoker_runtime.request import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = (1 << 30) // 12
"""Beyond it Pillow itself warns of decompression bombs: 89 million, 340 MB while it is decoded."""


class Opened:
    """An image whose header was read. `tokens` are its placeholders, however it will be turned."""

    def __init__(self, data: bytes, rule: ImageRule, field: str) -> None:
        """`field` is where it came from. Raises RequestError."""
        self._rule, self._field = rule, field
        try:
            self._image = Pillow.open(BytesIO(data), formats=FORMATS)
            wide, tall = self._image.size
        # A decoder fails on a broken file with whatever it stumbled over.
        except Exception as error:
            raise self._unreadable(error) from error
        if wide * tall > MAX_PIXELS:
            raise RequestError(
                f"{field}: the image has {wide}x{tall} pixels; at most {MAX_PIXELS} are decoded.", param=field
            )
        try:
            self.tokens = rule.tokens(*rule.size_of(tall, wide))
        except TooNarrowError as error:
            raise RequestError(f"{field}: the image has {wide}x{tall} pixels: {error}.", param=field) from error
    def _unreadable(self, error: Exception) -> RequestError:
        if isinstance(error, (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning)):
            return RequestError(
                f"{self._field}: the image has more than {MAX_PIXELS} pixels, which is the most that is decoded.",
                param=self._field,
            )
        if isinstance(error, UnidentifiedImageError):
            # Its own text is the address of an object.
            why = f"it must be one of {', '.join(FORMATS)}"
        else:
            why = f"{type(error).__name__}: {error!s:.200}" if str(error) else type(error).__name__
        return RequestError(f"{self._field} is no image that can be read: {why}.", param=self._field)

    def decode(self) -> Image:
        """The image, its place among tokens still open (`at` 0). Raises RequestError."""
        try:
            turned = ImageOps.exif_transpose(self._image)
            height, width = self._rule.size_of(turned.height, turned.width)
            resized = _rgb(turned).resize((width, height), resample=Pillow.Resampling(self._rule.resample))
        except Exception as error:
            raise self._unreadable(error) from error
        pixels, span = resized.tobytes(), self._rule.span(height, width)
        return Image(0, self.tokens, height, width, pixels, digest_of(height, width, pixels), span)


def _rgb(image: Pillow.Image) -> Pillow.Image:
    """In RGB, what is transparent over white, as transformers' `convert_to_rgb` has it."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """The SHA-256 of the sides, as 32-bit little-endian numbers, and the pixels."""
    found = sha256(struct.pack("<II", height, width))
    found.update(pixels)
    return found.digest()
