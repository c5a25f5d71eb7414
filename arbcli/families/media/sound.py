"""Sound files to bytes and back: WAV, FLAC and Ogg, read and written by the package soundfile."""

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
"""Maximum number of frames: a day and more at 48 kHz."""
WIDEST_SAMPLE = 8
"""Bytes of a sample that are read at most: those of a float of 64 bits."""
STREAMED = 2**31
"""Bytes of data from which on a WAV header says that its writer did not know them."""
DAMAGED = "it is truncated or damaged, or of a format that libsndfile does not read"
MU = 255
PEAK = 32767
"""Largest sample of 16 bits."""
FLOATS = ("FLOAT", "DOUBLE")
"""Subtypes of samples from -1 to 1, which libsndfile reads as integers without scaling them."""
MAX_FLAC_RATE = 655_350


def sound_bytes(path: Path, form: str) -> Iterator[bytes]:
    """Read a sound file as a header and samples, a block at a time.

    Samples of several channels alternate, and those of 16 bits are big-endian with 32,768 added, so
    that the coarse byte comes first and grows with the sample.

    Args:
        path: path of a file that libsndfile reads.
        form: one of `arbcli.families.SOUND_FORMS`.

    Yields:
        The header, then blocks of samples.

    Raises:
        ArbError: the package is missing, or the file is damaged, empty, or has too many channels.
    """
    soundfile = _package(path)
    damaged = library_errors(f"`{path}` is not a readable sound", DAMAGED)
    with BoundedFile(path, HEADER_BYTES) as content, damaged:
        try:
            yield from _blocks(soundfile, content, path, form)
        except soundfile.SoundFileError as error:
            if content.cut_by:
                raise _too_heavy(path, content) from None
            raise _damaged(path, str(error).rpartition(": ")[2]) from None


def _blocks(soundfile: Any, content: BoundedFile, path: Path, form: str) -> Iterator[bytes]:
    read = 0
    with soundfile.SoundFile(content) as file:
        header = SoundHeader(form, file.samplerate, file.channels, file.frames)
        _check(header, path)
        content.allow(WIDEST_SAMPLE * header.units)
        cut = re.search(r"^data : ([0-9]+) \(should be", file.extra_info, re.MULTILINE)
        if cut and int(cut[1]) < STREAMED:
            raise _damaged(path, "it is shorter than its header says")
        yield header.encode()
        while len(samples := _next_samples(file)):
            read += len(samples)
            if read > header.frames:
                break
            yield encode_samples(samples, form)
    if read != header.frames and content.cut_by:
        raise _too_heavy(path, content)
    if read != header.frames:
        raise _damaged(path, f"it has {read:,} of {header.frames:,} frames")


def _next_samples(file: Any) -> "np.ndarray":
    """Read the next samples of a file, (frames, channels) int16; none at its end."""
    import numpy as np  # takes a tenth of a second, and help needs none

    if file.subtype not in FLOATS:
        return file.read(BLOCK_FRAMES, dtype="int16", always_2d=True)
    samples = np.nan_to_num(file.read(BLOCK_FRAMES, dtype="float64", always_2d=True))
    return np.rint(samples.clip(-1, 1) * (PEAK + 1)).clip(max=PEAK).astype(np.int16)


def _check(header: SoundHeader, path: Path) -> None:
    if not 0 < header.frames <= MAX_FRAMES:
        raise _damaged(path, f"its header says {header.frames:,} frames")
    if header.channels > MAX_CHANNELS:
        raise ArbError(
            f"`{path}` has {header.channels} channels", f"mix it down to {MAX_CHANNELS} or 1"
        )


def _too_heavy(path: Path, content: BoundedFile) -> ArbError:
    return ArbError(
        f"`{path}` is not a readable sound: {content.cut_by}",
        "save its samples alone, without metadata, unless it is damaged",
    )


def _damaged(path: Path, why: str) -> ArbError:
    return ArbError(f"`{path}` is not a readable sound: {why.strip().rstrip('.')}", DAMAGED)


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
    share = np.clip(samples / PEAK, -1, 1)
    curve = np.sign(share) * np.log1p(MU * np.abs(share)) / np.log1p(MU)
    return np.rint(127.5 * (1 + curve)).astype(np.uint8).tobytes()


def decode_samples(body: bytes, header: SoundHeader) -> "np.ndarray":
    """Decode the body of a sound to (frames, channels) int16, without a frame that is cut off."""
    import numpy as np  # takes a tenth of a second, and help needs none

    whole = len(body) // header.item_bytes * header.item_bytes
    if header.form == "pcm16":
        samples = (np.frombuffer(body[:whole], ">u2").astype(np.int32) - 32768).astype(np.int16)
    else:
        curve = np.frombuffer(body[:whole], np.uint8) / 127.5 - 1
        share = np.sign(curve) * np.expm1(np.abs(curve) * np.log1p(MU)) / MU
        samples = np.rint(PEAK * share).astype(np.int16)
    return samples.reshape(-1, header.channels)


def write_sound(path: Path, body: bytes, header: SoundHeader) -> None:
    """Write a sound to a file of 16 bits a sample, by the suffix of its name.

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
    """Count the bytes of a FLAC file, at its best level, of (frames, channels) int16 samples."""
    soundfile, file = import_module("soundfile"), io.BytesIO()
    rate = min(rate, MAX_FLAC_RATE)
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16", compression_level=1.0)
    return len(file.getvalue())


def _package(path: Path) -> Any:
    return optional_module("soundfile", path, "soundfile", "'arb[media]'")
