"""Conversion of picture files to bytes and back: PNG, JPEG and WebP, by Pillow."""

import io
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbcli.base.errors import ArbError, library_errors, one_line, optional_module
from arbcli.families.media.bounded import HEADER_BYTES, BoundedFile
from arbcli.families.media.spans import PictureHeader

if TYPE_CHECKING:
    import numpy as np

MAX_PIXELS = 2**26
"""Maximum number of pixels, 8192 by 8192; larger pictures are refused by their header."""
MAX_SIDE = 2**15
SCALE_HINT = f"scale it down, to at most {MAX_SIDE:,} in each direction"
"""Hint for a picture with too many pixels."""
MAX_PIXEL_BYTES = 8
"""Maximum number of bytes that are read per pixel: four channels of 16 bits."""
STRIP_HINT = "save its pixels alone: one frame, without metadata"
"""Hint for a file whose metadata and other frames exceed the limit on bytes read."""
DAMAGED_HINT = "it is truncated or damaged, or not a PNG, JPEG or WebP"
FORMATS = ("PNG", "JPEG", "WEBP")
WEBP = re.compile(
    rb"RIFF.{4}WEBP(?:VP8X.{8}(?P<canvas>.{6})|VP8L.{4}/(?P<lossless>.{4})"
    rb"|VP8 .{7}\x9d\x01\*(?P<lossy>.{4}))",
    re.DOTALL,
)
"""Start of a WebP file, up to the size of its canvas or of its single picture."""
MAX_WEBP_START = 30
MAX_WEBP_SIDE = 2**14 - 1
FORM = re.compile(r"(rgb|grey)(?::([1-9][0-9]{0,4})x([1-9][0-9]{0,4}))?")
"""Syntax of `picture`: a mode and, for a common size, width and height."""
PIL_MODES = {"rgb": "RGB", "grey": "L"}


def check_form(form: str) -> None:
    """Check the syntax of a value of `picture`: see `FORM`.

    Raises:
        ArbError: it is invalid, or a side exceeds `MAX_SIDE`.
    """
    match = FORM.fullmatch(form)
    if match is None or max(int(match[2] or 1), int(match[3] or 1)) > MAX_SIDE:
        raise ArbError(
            f"`picture` is `{form}`",
            "use `rgb` or `grey`, or a size with it, as in `rgb:64x48`",
            fields=("picture",),
        )


def picture_bytes(path: Path, form: str) -> Iterator[bytes]:
    r"""Read a picture file as a header and rows of pixels, each row ended by `\n`.

    Transparent pictures get a white background, the orientation of EXIF is applied, and of several
    frames the first is read. With a size, the picture is scaled to cover it, and cropped at the
    centre.

    Args:
        path: path of a file that Pillow reads.
        form: size and channels in the syntax of `FORM`.

    Yields:
        The header, then the rows.

    Raises:
        ArbError: Pillow is missing, or the file is damaged, or has more than `MAX_PIXELS`.
    """
    import numpy as np  # takes a tenth of a second, and help needs none

    mode, width, height = FORM.fullmatch(form).groups()  # type: ignore[union-attr]
    image_module, operations = _package("Image", path), _package("ImageOps", path)
    damaged = library_errors(f"`{path}` is not a readable picture", DAMAGED_HINT)
    with BoundedFile(path, HEADER_BYTES) as content, damaged, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Pillow's own, larger limit
        try:
            if size := webp_size(content):  # Pillow reads all of a WebP at once
                _allow_pixels(content, size, path)
            image = image_module.open(content, formats=FORMATS)
            if not size:
                _allow_pixels(content, image.size, path)
            if width:  # a JPEG is decoded at a fraction of its size if that suffices
                image.draft(PIL_MODES[mode], (int(width), int(height)))
            upright = operations.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits, which `convert` clips to 255
                upright = upright.point(lambda shade: shade * (1 / 256)).convert("L")
            if "A" in upright.getbands() or "transparency" in upright.info:
                upright = upright.convert("RGBA")
                white = image_module.new("RGBA", upright.size, "white")
                upright = image_module.alpha_composite(white, upright)
            converted = upright.convert(PIL_MODES[mode])
            if width:
                converted = operations.fit(converted, (int(width), int(height)))
            pixels = np.asarray(converted)
        except image_module.DecompressionBombError:  # its header has more than twice Pillow's limit
            raise ArbError(
                f"`{path}` has too many pixels: at most {MAX_PIXELS:,} are read", SCALE_HINT
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ArbError(
                f"`{path}` is not a readable picture: {content.stop_reason or _reason(error)}",
                STRIP_HINT if content.stop_reason else DAMAGED_HINT,
            ) from None
    yield PictureHeader(mode, pixels.shape[1], pixels.shape[0]).encode()
    yield _encode_rows(pixels)


def _reason(error: Exception) -> str:
    unknown = type(error).__name__ == "UnidentifiedImageError"
    return "its format is unknown" if unknown else one_line(error).rstrip(".")


def webp_size(content: BoundedFile) -> tuple[int, int] | None:
    """Read the width and height of a WebP picture from the start of a file, if it is one."""
    match = WEBP.match(content.read(MAX_WEBP_START))
    content.seek(0)
    if match is None:
        return None
    size_bits = int.from_bytes(match[match.lastgroup or ""], "little")
    if match["lossy"]:
        return size_bits & 0x3FFF, size_bits >> 16 & 0x3FFF
    bits = 24 if match["canvas"] else 14
    return (size_bits & (1 << bits) - 1) + 1, (size_bits >> bits & (1 << bits) - 1) + 1


def _allow_pixels(content: BoundedFile, size: tuple[int, int], path: Path) -> None:
    """Raise the limit of the file to the bytes of its pixels.

    Raises:
        ArbError: there are too many pixels.
    """
    if size[0] * size[1] > MAX_PIXELS or max(size) > MAX_SIDE:
        raise ArbError(
            f"`{path}` has {size[0]:,} x {size[1]:,} pixels, and at most {MAX_PIXELS:,} are read",
            SCALE_HINT,
        )
    content.allow(MAX_PIXEL_BYTES * size[0] * size[1])


def _encode_rows(pixels: "np.ndarray") -> bytes:
    import numpy as np  # takes a tenth of a second, and help needs none

    rows = pixels.reshape(len(pixels), -1)
    return np.concatenate([rows, np.full((len(rows), 1), ord("\n"), np.uint8)], axis=1).tobytes()


def decode_pixels(body: bytes, header: PictureHeader) -> "np.ndarray":
    """Decode the body of a picture to (height, width) or (height, width, 3) uint8.

    Missing rows are black; the byte that ends a row is ignored.
    """
    import numpy as np  # takes a tenth of a second, and help needs none

    rows = np.zeros((header.height, header.item_bytes), np.uint8)
    pixels = np.frombuffer(body, np.uint8)[: rows.size]
    rows.reshape(-1)[: len(pixels)] = pixels
    shape = (header.height, header.width, 3) if header.mode == "rgb" else rows[:, :-1].shape
    return rows[:, :-1].reshape(shape)


def write_picture(path: Path, body: bytes, header: PictureHeader) -> None:
    """Write a picture to a file, in the format of its suffix.

    Raises:
        ArbError: Pillow is missing, or the file cannot be written.
    """
    image = _package("Image", path).fromarray(decode_pixels(body, header))
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise ArbError(f"cannot write `{path}`: {error}", "check its folder") from None


def encoded_bytes(pixels: "np.ndarray") -> dict[str, int]:
    """Return the bytes of a picture as PNG and as lossless WebP, at maximum compression, by format.

    WebP is left out if a side exceeds `MAX_WEBP_SIDE`.
    """
    image = import_module("PIL.Image").fromarray(pixels)
    sizes = {}
    formats: dict[str, dict[str, Any]] = {"PNG": {"optimize": True}}
    if max(image.size) <= MAX_WEBP_SIDE:
        formats["WebP"] = {"lossless": True, "quality": 100, "method": 6}
    for name, options in formats.items():
        file = io.BytesIO()
        image.save(file, format=name, **options)
        sizes[name] = len(file.getvalue())
    return sizes


def _package(name: str, path: Path) -> Any:
    return optional_module(f"PIL.{name}", path, "Pillow", "'arb[media]'")
