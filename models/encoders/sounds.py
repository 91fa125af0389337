"""Preparation of audio for encoders: decoding, mixing to one channel, resampling to 16 kHz, and spectrograms."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Generator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError, path_text
from localllm.models.encoders import isolation
from localllm.regular_file import open_regular, reading_error

Samples = NDArray[np.float32]

#: Sample rate of encoders in Hz.
RATE = 16_000
#: Maximum length of audio in seconds. One hour becomes up to 47,000 tokens.
MAX_SECONDS = 3600
#: Accepted formats, by libsndfile's names. Its other formats are not in practical use and are rejected.
FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
#: Most chunks of a WAV file before its data.
_MAX_CHUNKS = 100
#: Number of values that are decoded at once.
_BLOCK = 1 << 20
#: Samples between the starts of two frames of a spectrogram, and samples per frame.
HOP, WINDOW = 160, 400


def open_audio(source: Any, label: str = "the audio") -> Samples:
    """Return the samples of audio, float32 [n] at 16 kHz.

    Channels are averaged, then resampled by soxr in high quality, as in transformers' ``load_audio``.

    Args:
        source: a path, the bytes of a WAV, MP3, FLAC or OGG file, or an array of samples at 16 kHz: floats or int16,
            [n] or [n, channels].
        label: name of the audio in errors, if it has no path.

    Raises:
        UsageError: the source has another type or format, is damaged, empty, or longer than `MAX_SECONDS`; or a
            package is not installed.
    """
    label = f"the audio {path_text(source)}" if isinstance(source, str | os.PathLike) else label
    if isinstance(source, np.ndarray):
        if source.ndim not in (1, 2) or not (source.dtype == np.int16 or source.dtype.kind == "f"):
            raise UsageError("audio as an array is floats or int16 at 16 kHz, [n] or [n, channels]")
        values = source.astype(np.float32) / (1 << 15 if source.dtype == np.int16 else 1)
        samples = values if values.ndim == 1 else values.mean(axis=1)
    elif isinstance(source, str | os.PathLike | bytes | bytearray):
        samples = np.frombuffer(isolation.decode(decode_audio, source, label).data, np.float32)
    else:
        raise UsageError(f"audio is a path, bytes or an array, not {type(source).__name__}")
    if len(samples) > MAX_SECONDS * RATE:
        raise UsageError(f"{label} is longer than {MAX_SECONDS:,} seconds: cut it into parts")
    if not len(samples):
        raise UsageError(f"{label} has no samples")
    if not np.isfinite(samples).all():
        raise UsageError(f"{label} has samples that are not numbers: the file is damaged")
    return np.ascontiguousarray(samples, np.float32)


def decode_audio(source: str | bytes | bytearray, label: str) -> isolation.Decoded:
    """Return the samples of a file, float32 [n] at 16 kHz; see `open_audio`."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError):  # OSError: libsndfile is missing
        raise UsageError('audio needs the packages soundfile and soxr: pip install "localllm[audio]"') from None
    try:
        stream = _opened(source)
    except OSError as error:
        raise reading_error(label, error) from None
    try:
        with stream, soundfile.SoundFile(stream) as file:
            if file.format not in FORMATS:
                raise UsageError(f"{label} is {file.format}: give a WAV, MP3, FLAC or OGG file")
            if not 1000 <= file.samplerate <= 1_000_000:
                raise UsageError(f"{label} has {file.samplerate:,} samples a second: give one of 1,000 to 1,000,000")
            # After a read, soundfile seeks to the next sample, which fails if the header has a wrong length.
            file.seekable = lambda: False
            resample = soxr.ResampleStream(file.samplerate, RATE, 1, dtype="float32", quality="HQ")
            chunks, n = list[Samples](), 0
            while n <= MAX_SECONDS * RATE:
                block = file.read(_BLOCK // file.channels, dtype="float32", always_2d=True)
                mono = np.ascontiguousarray(block.mean(axis=1))
                chunks.append(mono if file.samplerate == RATE else resample.resample_chunk(mono, last=not len(block)))
                n += len(chunks[-1])
                if not len(block):
                    break
    except UsageError:
        raise
    except Exception as error:  # soundfile.LibsndfileError, and any other error of decoders
        reason = getattr(error, "error_string", error)  # without the stream's address
        words = f"{label} cannot be read ({reason!s:.100}): give a WAV, MP3, FLAC or OGG file that is whole"
        raise UsageError(words) from error
    return isolation.Decoded({}, np.concatenate(chunks))


def _opened(source: str | bytes | bytearray) -> Any:
    """Return an open file.  If the header of a WAV file has no length, the data last until the end of the file."""
    file: Any = open_regular(source) if isinstance(source, str) else io.BytesIO(source)
    n_bytes = file.seek(0, os.SEEK_END)
    if (position := _missing_length(file)) is not None:
        if isinstance(source, str):
            with file:
                file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writing changes only the copy
        file.seek(position)
        file.write(min(n_bytes - position - 4, 0xFFFFFFF0).to_bytes(4, "little"))
    file.seek(0)
    return file


def _missing_length(file: BinaryIO) -> int | None:
    """Return the position of the length of a WAV file's data if a program that wrote to a pipe left it 0 or -1."""
    file.seek(0)
    head, position = file.read(12), 12
    for _ in range(_MAX_CHUNKS if head[:4] == b"RIFF" and head[8:] == b"WAVE" else 0):
        file.seek(position)
        chunk = file.read(8)
        length = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data" and len(chunk) == 8:
            return position + 4 if length in (0, 0xFFFFFFFF) else None
        position += 8 + length + length % 2
    return None


def mel_filters(
    n_mels: int, n_fft: int = WINDOW, lowest: float = 0, highest: float = RATE / 2, *, is_htk: bool = False
) -> NDArray[np.float64]:
    """Return the weight of each frequency of a spectrum in each mel band: [n_mels, n_fft / 2 + 1].

    The weights are triangles from ``lowest`` to ``highest`` Hz: of equal area on Slaney's scale, which is linear up
    to 1 kHz and logarithmic above and always ranges from 0 to 8 kHz, or of equal height on HTK's scale.

    Sources: Slaney, Auditory Toolbox (1998), as in Whisper (arXiv:2212.04356); The HTK Book (1995).
    """
    if is_htk:
        first, last = (2595 * np.log10(1 + end / 700) for end in (lowest, highest))
        edges = 700 * (10 ** (np.linspace(first, last, n_mels + 2) / 2595) - 1)
    else:
        log_step = np.log(6.4) / 27
        mels = np.linspace(0, 15 + np.log(RATE / 2 / 1000) / log_step, n_mels + 2)
        edges = np.where(mels < 15, mels * (200 / 3), 1000 * np.exp(log_step * (mels - 15)))
    frequencies = np.linspace(0, RATE / 2, n_fft // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    return filters if is_htk else filters * 2 / (high - low)


def mel_spectrogram(
    padded: NDArray[np.float64],
    window: NDArray[Any],
    n_fft: int,
    n_frames: int,
    filters: NDArray[np.float64],
    *,
    power: int = 2,
) -> NDArray[np.float64]:
    """Return the mel bands of the first frames, [n_frames, n_mels]: magnitudes, or by default their squares.

    Args:
        padded: samples. Frame i starts at sample i * HOP and has the length of the window.
        n_fft: length of the Fourier transform. Shorter frames are padded with zeros.
        filters: from `mel_filters`.
    """
    frames = np.lib.stride_tricks.sliding_window_view(padded, len(window))[::HOP][:n_frames]
    bands = np.empty((len(frames), len(filters)))
    for i in range(0, len(frames), 3000):
        bands[i : i + 3000] = np.abs(np.fft.rfft(frames[i : i + 3000] * window, n_fft)) ** power @ filters.T
    return bands


def log_mel(samples: Samples, n_mels: int) -> NDArray[np.float32]:
    """Return Whisper's logarithmic mel spectrogram, float32 [len(samples) // HOP, n_mels].

    The result is within 1e-4 of transformers' WhisperFeatureExtractor, which computes in float32. ``samples`` must be
    longer than half a window.

    Source: Whisper, arXiv:2212.04356.
    """
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    n, window = len(samples) // HOP, np.hanning(WINDOW + 1)[:-1]
    return whisper_scale(mel_spectrogram(padded, window, WINDOW, n, mel_filters(n_mels)))


def whisper_scale(bands: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return logarithms of mel bands, limited to 8 below the largest, as Whisper scales them."""
    logarithms = np.log10(np.maximum(bands, 1e-10)).astype(np.float32)
    scaled: Samples = (np.maximum(logarithms, logarithms.max() - 8) + 4) / 4
    return scaled


#: Number of pieces of a convolution. Between two pieces, the engine can process other requests.
_PIECES = 4


def convolved(
    x: Samples,
    kernel: Samples,
    behind: Callable[[Samples], Samples],
    stride: int = 2,
    padding: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1)),
) -> Generator[None, None, Samples]:
    """Convolve x [height, width, n_in] with a kernel of 3 × 3 [n_in * 9, n_out] and zero padding.

    Return ``behind`` of the result: [⌈height / stride⌉, ⌈width / stride⌉, n_out] with two zeros of padding per axis.
    Yields between pieces of the work.
    """
    padded = np.pad(x, (*padding, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))[::stride, ::stride]
    outputs = []
    for piece in np.array_split(windows, min(_PIECES, len(windows))):
        values = piece.reshape(piece.shape[0] * piece.shape[1], -1) @ kernel
        outputs.append(behind(values).reshape(*piece.shape[:2], -1))
        yield
    return np.concatenate(outputs)
