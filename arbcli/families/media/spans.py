r"""The byte format of sounds and pictures inside a text.

A sound or a picture is a byte 255, which UTF-8 never contains, an ASCII header, and a body
whose length follows from the header:

    \xffsound FORM RATE CHANNELS FRAMES\n       body: FRAMES x CHANNELS samples
    \xffpicture MODE WIDTH HEIGHT\n             body: HEIGHT rows of pixels, each ended by \n

FORM is `mulaw` (one byte a sample) or `pcm16` (two). MODE is `rgb` (three bytes a pixel) or `grey`
(one). All other bytes are text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SAMPLE_BYTES = {"mulaw": 1, "pcm16": 2}
"""Bytes of a sample, by the form of a sound."""
PIXEL_BYTES = {"rgb": 3, "grey": 1}
"""Bytes of a pixel, by the mode of a picture."""
MAX_CHANNELS = 2
HEADER = re.compile(
    rb"\xff(?:sound (mulaw|pcm16) ([1-9][0-9]{0,9}) ([12]) ([0-9]{1,10})"
    rb"|picture (rgb|grey) ([1-9][0-9]{0,5}) ([1-9][0-9]{0,5}))\n"
)
MAX_HEADER = 64
"""Upper bound of the bytes of a header."""


@dataclass(frozen=True, slots=True)
class SoundHeader:
    """Header of a sound."""

    form: str
    """A key of `SAMPLE_BYTES`."""
    rate: int
    """Frames per second."""
    channels: int
    frames: int

    kind = "sound"

    @property
    def units(self) -> int:
        """Number of samples of all channels."""
        return self.frames * self.channels

    @property
    def item_bytes(self) -> int:
        """Bytes of a frame: one sample per channel."""
        return SAMPLE_BYTES[self.form] * self.channels

    @property
    def body_bytes(self) -> int:
        """Bytes after the header."""
        return self.frames * self.item_bytes

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return b"\xff" + f"sound {self.form} {self.rate} {self.channels} {self.frames}\n".encode()


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Header of a picture."""

    mode: str
    """A key of `PIXEL_BYTES`."""
    width: int
    height: int

    kind = "picture"

    @property
    def units(self) -> int:
        """Number of pixels."""
        return self.width * self.height

    @property
    def item_bytes(self) -> int:
        """Bytes of a row, including its final newline."""
        return PIXEL_BYTES[self.mode] * self.width + 1

    @property
    def body_bytes(self) -> int:
        """Bytes after the header."""
        return self.height * self.item_bytes

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return b"\xff" + f"picture {self.mode} {self.width} {self.height}\n".encode()


Header = SoundHeader | PictureHeader


@dataclass(frozen=True, slots=True)
class Span:
    """A sound or a picture, and its position in a text."""

    header: Header
    start: int
    """Offset of the header."""
    body: int
    """Offset of the body."""

    @property
    def stop(self) -> int:
        """Offset of the first byte after the body, which may be beyond the end of the text."""
        return self.body + self.header.body_bytes


def find_spans(content: bytes | bytearray, offset: int = 0) -> Iterator[Span]:
    """Yield the sounds and pictures of a text, in order.

    Args:
        content: any buffer that `re` searches, such as a mapped file, from the start of the text.
        offset: where to start searching, outside of all bodies.

    Yields:
        One span for each header; the body of the last one may be cut off.
    """
    while match := HEADER.search(content, offset):
        form, rate, channels, frames, mode, width, height = match.groups()
        header: Header
        if form is not None:
            header = SoundHeader(form.decode(), int(rate), int(channels), int(frames))
        else:
            header = PictureHeader(mode.decode(), int(width), int(height))
        span = Span(header, match.start(), match.end())
        yield span
        offset = span.stop
