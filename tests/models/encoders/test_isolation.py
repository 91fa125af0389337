"""Decoding in worker processes: hostile files are bounded, requests can be cancelled, workers exit."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from localllm.cancellation import CancelledError, cancellable
from localllm.errors import UsageError
from localllm.models.encoders import isolation
from localllm.models.encoders.images import open_image
from localllm.models.encoders.sounds import open_audio
from tests.helpers import decoders
from tests.helpers.data import ROOT
from tests.helpers.fork import in_forked_child, needs_fork
from tests.helpers.images import file_of

#: Generous limit for work that takes a second or less.
BOUND_S = 30


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[isolation._Pool]:
    """Give this test separate workers, which end after 4 idle seconds."""
    monkeypatch.setattr(isolation, "SECONDS", 4)
    pool = isolation._Pool()
    monkeypatch.setattr(isolation, "_pool", pool)
    yield pool
    pool.close()


# -- Hostile files ---------------------------------------------------------------------------------------------------


def many_scans() -> bytes:
    """Return a progressive JPEG file with 20,000 copies of its last scan."""
    data = file_of(Image.new("RGB", (8000, 8000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + 20_000 * scan + data[-2:]


def many_segments() -> bytes:
    """Return a JPEG file with 10 million comments."""
    data = file_of(Image.new("RGB", (8, 8)), "JPEG")
    return data[:2] + 10_000_000 * b"\xff\xfe\x00\x02" + data[2:]


def many_directories() -> bytes:
    """Return a TIFF file with 300,000 pages of one pixel."""
    tags = struct.pack("<HHIHHHHIHHHHIHHHHIHH", 256, 3, 1, 1, 0, 257, 3, 1, 1, 0, 258, 3, 1, 8, 0, 262, 3, 1, 1, 0)
    tags += struct.pack("<HHII", 273, 4, 1, 8) + struct.pack("<HHII", 279, 4, 1, 1)
    parts, size = [b"II*\0", struct.pack("<I", 8)], 8
    for _ in range(300_000):
        size += 2 + len(tags) + 4
        parts.append(struct.pack("<H", 6) + tags + struct.pack("<I", size))
    parts[-1] = parts[-1][:-4] + bytes(4)
    return b"".join(parts)


def circle_of_directories() -> bytes:
    """Return a TIFF file whose directory links to itself."""
    data = bytearray(file_of(Image.new("L", (9, 9)), "TIFF"))
    (start,) = struct.unpack_from("<I", data, 4)
    (n_tags,) = struct.unpack_from("<H", data, start)
    struct.pack_into("<I", data, start + 2 + 12 * n_tags, start)
    return bytes(data)


def many_frames() -> bytes:
    """Return a GIF file with a million frames of one pixel."""
    data = file_of(Image.new("P", (1, 1)), "GIF")
    frame = b"\x2c" + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return data[:-1] + 1_000_000 * frame + data[-1:]


@pytest.mark.filterwarnings("ignore:.*is an animation")
@pytest.mark.parametrize("make", [many_directories, circle_of_directories, many_frames])
def test_hostile_images_are_bounded(make: Callable[[], bytes], pool: isolation._Pool) -> None:
    begin = time.monotonic()
    assert open_image(make()).size in ((1, 1), (9, 9))
    assert time.monotonic() - begin < BOUND_S


@pytest.mark.parametrize("make", [many_scans, many_segments])
def test_endless_images_name_the_limit(make: Callable[[], bytes], pool: isolation._Pool) -> None:
    data, begin = make(), time.monotonic()
    with pytest.raises(UsageError, match=r"the image of message 0 takes more than 4 seconds or \d GiB to decode"):
        open_image(data, "the image of message 0")
    assert time.monotonic() - begin < BOUND_S
    assert open_image(file_of(Image.new("RGB", (5, 4)), "PNG")).size == (5, 4)  # other files work


def test_large_photos_work() -> None:
    """Return 50 megapixels in 10 scans."""
    data = file_of(Image.linear_gradient("L").convert("RGB").resize((8160, 6144)), "JPEG", progressive=True)
    assert data.count(b"\xff\xda") == 10
    assert open_image(data).size == (8160, 6144)


def test_damaged_audio_is_reported_in_a_sentence(pool: isolation._Pool) -> None:
    pytest.importorskip("soundfile")
    for data in (b"fLaC" + bytes(5000), b"OggS" + bytes(5000), b"ID3" + bytes(5000), b"RIFF\xff\xff\xff\xffWAVE"):
        with pytest.raises(UsageError, match="the audio cannot be read"):
            open_audio(data)


# -- Workers ---------------------------------------------------------------------------------------------------------


def test_a_worker_is_used_again(pool: isolation._Pool) -> None:
    large = os.urandom(3 << 20)
    answers = [isolation.decode(decoders.worker_pid, data, "x") for data in (b"", large, bytearray(b"1"))]
    assert [bytes(answer.data) for answer in answers] == [b"", large, b"1"]
    assert len({answer.info["pid"] for answer in answers}) == 1 != os.getpid()


def test_a_worker_imports_nothing_from_the_current_folder(
    pool: isolation._Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "json.py").write_text("raise SystemExit('this file was imported')")
    assert open_image(file_of(Image.new("RGB", (4, 4)), "PNG")).size == (4, 4)


def test_a_worker_that_crashes_is_replaced(pool: isolation._Pool) -> None:
    with pytest.raises(UsageError, match="crashes its decoder"):
        isolation.decode(decoders.crash, b"", "x")
    pid = isolation.decode(decoders.worker_pid, b"", "x").info["pid"]
    psutil.Process(pid).kill()  # while it is idle, like the system when memory runs out
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 10)
    assert isolation.decode(decoders.worker_pid, b"", "x").info["pid"] != pid


@pytest.mark.linux("other systems do not limit the address space of a process")
def test_memory_is_limited(pool: isolation._Pool) -> None:
    with pytest.raises(UsageError, match="takes too much memory"):
        isolation.decode(decoders.use_memory, b"", "x", 16 << 30)


def test_a_cancelled_request_frees_its_worker(pool: isolation._Pool) -> None:
    is_cancelled = threading.Event()
    errors: list[BaseException] = []

    def request() -> None:
        try:
            with cancellable(is_cancelled.is_set):
                isolation.decode(decoders.sleep, b"", "x")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=request) for _ in range(isolation.MAX_WORKERS + 3)]  # some wait for a worker
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    while len(pool._workers) < isolation.MAX_WORKERS:
        time.sleep(0.01)
    processes = [worker._process for worker in pool._workers]
    is_cancelled.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert [type(error) for error in errors] == [CancelledError] * len(threads)
    assert all(process.poll() is not None for process in processes)
    assert not pool._workers
    assert isolation.decode(decoders.worker_pid, b"", "x").info
    assert time.monotonic() - begin < BOUND_S


def test_a_program_without_an_interpreter_decodes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import spawn

    monkeypatch.setattr(spawn, "get_executable", lambda: os.fsencode(os.path.join("opt", "viewer")))
    assert isolation.decode(decoders.worker_pid, b"", "x").info == {"pid": os.getpid()}


@needs_fork
def test_a_forked_process_has_workers_of_its_own(pool: isolation._Pool) -> None:
    pid = isolation.decode(decoders.worker_pid, b"", "x").info["pid"]

    def work() -> None:
        assert isolation.decode(decoders.worker_pid, b"", "x").info["pid"] != pid
        isolation._pool.close()

    in_forked_child(work)
    assert isolation.decode(decoders.worker_pid, b"2", "x") == ({"pid": pid}, b"2")


# -- Programs that embed the library ---------------------------------------------------------------------------------

PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
print("begin", flush=True)
from localllm.models.encoders import isolation
from tests.helpers import decoders
print(isolation.decode(decoders.worker_pid, b"", "x").info["pid"], flush=True)
"""


def program(more: str) -> subprocess.Popen[str]:
    """A program without a main guard that uses daemon threads."""
    command = [sys.executable, "-c", PROGRAM + more, str(ROOT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_end(pid: int) -> None:
    begin = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - begin < BOUND_S
        time.sleep(0.01)


def test_a_program_ends_while_a_thread_decodes() -> None:
    more = "threading.Thread(target=isolation.decode, args=(decoders.sleep, b'', 'x'), daemon=True).start()\n"
    with program(more + "time.sleep(0.3)\n") as process:
        begin = time.monotonic()
        output = process.communicate(timeout=BOUND_S)[0].split()
        assert len(output) == 2, output
        assert process.returncode == 0
        wait_for_end(int(output[1]))
        assert time.monotonic() - begin < BOUND_S


@pytest.mark.parametrize("task", ["idle", "busy"])
def test_workers_of_a_killed_program_end(task: str) -> None:
    busy = "threading.Thread(target=isolation.decode, args=(decoders.sleep, b'', 'x'), daemon=True).start()\n"
    limit = "isolation._pool.close(); isolation.SECONDS = 3\n" if task == "busy" else ""
    more = limit + "print(isolation.decode(decoders.worker_pid, b'', 'x').info['pid'], flush=True)\n"
    with program(more + (busy if task == "busy" else "") + "print('go', flush=True); time.sleep(99)\n") as process:
        assert process.stdout is not None
        _, _, pid, _ = (process.stdout.readline() for _ in range(4))
        process.kill()
        process.wait()
        wait_for_end(int(pid))
