"""Conversion of sound files to bytes and back: WAV, FLAC and Ogg, by the package soundfile."""

import io
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbcli.base.errors import ArbError, library_errors, optional_module
from arbcli.families.media.bounded import HEADER_BYTES, BoundedFile
from arbcli.families.media.spans import MAX_CHANNELS, SoundHeader

if TYPE_CHECKING:
    import numpy as np

BLOCK_FRAMES = 2**16
MAX_FRAMES = 2**32
"""Maximum number of frames: 24.9 hours at 48 kHz."""
MAX_SAMPLE_BYTES = 8
"""Maximum number of bytes that are read per sample: those of a float64."""
STREAMED_BYTES = 2**31
"""Minimum size of data in a WAV header that means an unknown size, as in streamed files."""
DAMAGED_HINT = "it is truncated or damaged, or of a format that libsndfile does not read"
MU = 255
MAX_SAMPLE = 32767
"""Maximum value of int16 samples."""
FLOAT_SUBTYPES = ("FLOAT", "DOUBLE")
"""Subtypes of samples from -1 to 1, which libsndfile would convert to integers without scaling."""
MAX_FLAC_RATE = 655_350


def sound_bytes(path: Path, form: str) -> Iterator[bytes]:
    """Read a sound file as a header and samples, a block at a time.

    Channels are interleaved. 16-bit samples are big-endian with 32,768 added, so that the more
    significant byte comes first and increases with the sample.

    Args:
        path: path of a file that libsndfile reads.
        form: one of `arbcli.families.SOUND_FORMS`.

    Yields:
        The header, then blocks of samples.

    Raises:
        ArbError: the package is missing, or the file is damaged, empty, or has too many channels.
    """
    soundfile = _package(path)
    damaged = library_errors(f"`{path}` is not a readable sound", DAMAGED_HINT)
    with BoundedFile(path, HEADER_BYTES) as content, damaged:
        try:
            yield from _blocks(soundfile, content, path, form)
        except soundfile.SoundFileError as error:
            if content.stop_reason:
                raise _limit_error(path, content) from None
            raise _damaged_error(path, str(error).rpartition(": ")[2]) from None


def _blocks(soundfile: Any, content: BoundedFile, path: Path, form: str) -> Iterator[bytes]:
    num_read = 0
    with soundfile.SoundFile(content) as file:
        header = SoundHeader(form, file.samplerate, file.channels, file.frames)
        _check(header, path)
        content.allow(MAX_SAMPLE_BYTES * header.units)
        cut = re.search(r"^data : ([0-9]+) \(should be", file.extra_info, re.MULTILINE)
        if cut and int(cut[1]) < STREAMED_BYTES:
            raise _damaged_error(path, "it is shorter than its header says")
        yield header.encode()
        while len(samples := _next_samples(file)):
            num_read += len(samples)
            if num_read > header.frames:
                break
            yield encode_samples(samples, form)
    if num_read != header.frames and content.stop_reason:
        raise _limit_error(path, content)
    if num_read != header.frames:
        raise _damaged_error(path, f"it has {num_read:,} of {header.frames:,} frames")


def _next_samples(file: Any) -> "np.ndarray":
    """Read the next samples of a file, (frames, channels) int16; empty at its end."""
    import numpy as np  # takes a tenth of a second, and help needs none

    if file.subtype not in FLOAT_SUBTYPES:
        return file.read(BLOCK_FRAMES, dtype="int16", always_2d=True)
    samples = np.nan_to_num(file.read(BLOCK_FRAMES, dtype="float64", always_2d=True))
    return np.rint(samples.clip(-1, 1) * (MAX_SAMPLE + 1)).clip(max=MAX_SAMPLE).astype(np.int16)


def _check(header: SoundHeader, path: Path) -> None:
    if not 0 < header.frames <= MAX_FRAMES:
        raise _damaged_error(path, f"its header says {header.frames:,} frames")
    if header.channels > MAX_CHANNELS:
        raise ArbError(
            f"`{path}` has {header.channels} channels", f"mix it down to {MAX_CHANNELS} or 1"
        )


def _limit_error(path: Path, content: BoundedFile) -> ArbError:
    return ArbError(
        f"`{path}` is not a readable sound: {content.stop_reason}",
        "save its samples alone, without metadata, unless it is damaged",
    )


def _damaged_error(path: Path, why: str) -> ArbError:
    return ArbError(f"`{path}` is not a readable sound: {why.strip().rstrip('.')}", DAMAGED_HINT)


def encode_samples(samples: "np.ndarray", form: str) -> bytes:
    """Encode samples.

    Args:
        samples: (frames, channels) int16.
        form: `pcm16`, or `mulaw`, which rounds the continuous mu-law curve, mu = 255, to 256 levels
            in the order of the samples: 127.5 (1 + sign(s) ln(1 + 255 |s|) / ln 256), s in [-1, 1].
    """
    import numpy as np  # takes a tenth of a second, and help needs none

    if form == "pcm16":
        return (samples.astype(np.int32) + 32768).astype(">u2").tobytes()
    share = np.clip(samples / MAX_SAMPLE, -1, 1)
    curve = np.sign(share) * np.log1p(MU * np.abs(share)) / np.log1p(MU)
    return np.rint(127.5 * (1 + curve)).astype(np.uint8).tobytes()


def decode_samples(body: bytes, header: SoundHeader) -> "np.ndarray":
    """Decode the body of a sound to (frames, channels) int16; an incomplete frame is dropped."""
    import numpy as np  # takes a tenth of a second, and help needs none

    size = len(body) // header.item_bytes * header.item_bytes
    if header.form == "pcm16":
        samples = (np.frombuffer(body[:size], ">u2").astype(np.int32) - 32768).astype(np.int16)
    else:
        curve = np.frombuffer(body[:size], np.uint8) / 127.5 - 1
        share = np.sign(curve) * np.expm1(np.abs(curve) * np.log1p(MU)) / MU
        samples = np.rint(MAX_SAMPLE * share).astype(np.int16)
    return samples.reshape(-1, header.channels)


def write_sound(path: Path, body: bytes, header: SoundHeader) -> None:
    """Write a sound to a file of 16-bit samples, in the format of its suffix.

    Raises:
        ArbError: the package is missing, or the file cannot be written.
    """
    soundfile = _package(path)
    samples = decode_samples(body, header)
    try:
        with soundfile.SoundFile(path, "w", header.rate, header.channels) as file:
            for start in range(0, len(samples), BLOCK_FRAMES):  # long ones overflow Ogg's stack
                file.write(samples[start : start + BLOCK_FRAMES])
    except (OSError, soundfile.SoundFileError) as error:
        raise ArbError(f"cannot write `{path}`: {error}", "check its folder") from None


def flac_bytes(samples: "np.ndarray", rate: int) -> int:
    """Return the bytes of (frames, channels) int16 samples as FLAC at maximum compression."""
    soundfile, file = import_module("soundfile"), io.BytesIO()
    rate = min(rate, MAX_FLAC_RATE)
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16", compression_level=1.0)
    return len(file.getvalue())


def _package(path: Path) -> Any:
    return optional_module("soundfile", path, "soundfile", "'arb[media]'")
