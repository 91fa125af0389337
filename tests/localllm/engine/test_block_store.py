"""Blocks on disk: what comes back is what was stored, whatever happens to the files and the process."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.engine import block_store
from localllm.engine.block_store import BlockStore, StoredBlock, open_store
from localllm.engine.records import MAGIC, NO_PARENT, digest, ids_bytes
from localllm.errors import UsageError
from tests.helpers.data import ROOT

LABEL = b'["a model"]'
ROOT_KEY = digest(NO_PARENT, LABEL)
#: Number of kills in `test_a_killed_process_leaves_no_wrong_block`.
N_KILLS = int(os.environ.get("LOCALLLM_KILLS", "5"))


def data_of(parent: bytes, ids: bytes, part: int, n_bytes: int = 3000) -> bytes:
    """Return data that belongs to one part alone."""
    seed = hashlib.sha256(parent + ids + str(part).encode()).digest()
    return (seed * (n_bytes // len(seed) + 1))[:n_bytes]


def opened(folder: Path, max_bytes: int | None = 1 << 24, **options: bool) -> BlockStore:
    store = BlockStore(folder, max_bytes, **options)
    store.flush()
    assert store.is_ready
    return store


def put(store: BlockStore, *path: int, part: int = 0, n_bytes: int = 3000) -> bytes:
    """Store the last block of a path of one-token blocks, and return its key."""
    store.put(NO_PARENT, LABEL, 0)
    parent = ROOT_KEY
    for id_ in path[:-1]:
        parent = digest(parent, ids_bytes([id_]))
    ids = ids_bytes([path[-1]])
    store.put(parent, ids, part, data_of(parent, ids, part, n_bytes))
    return digest(parent, ids)


def put_path(store: BlockStore, *path: int, n_bytes: int = 3000) -> None:
    for i in range(len(path)):
        put(store, *path[: i + 1], n_bytes=n_bytes)


def nodes(store: BlockStore) -> Iterator[tuple[tuple[int, ...], StoredBlock]]:
    """Yield the ids before and of each block that can be reached from the root, and the block."""

    def below(node: StoredBlock, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], StoredBlock]]:
        for child in store.children(node):
            whole = (*path, *memoryview(child.ids).cast("q").tolist())
            yield whole, child
            yield from below(child, whole)

    root = store.get(ROOT_KEY)
    if root is not None:
        yield from below(root, ())


def read_all(store: BlockStore) -> dict[tuple[tuple[int, ...], int], bytes]:
    """Return the data of all parts by path and part. Each must be right or missing."""
    found = {}
    for path, node in list(nodes(store)):
        assert node.parent is not None
        for part in list(node.parts):
            data = store.read(node, part).result()
            if data is not None:
                assert data == data_of(node.parent.digest, node.ids, part, len(data))
                found[path, part] = data
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.blocks"))


def test_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path / "folder")
    put_path(store, 1, 2, 3)
    put(store, 1, 2, part=1)
    put(store, 1, 2, part=-1)
    store.flush()
    before = read_all(store)
    assert [(path, part) for path, part in sorted(before)] == [
        ((1,), 0), ((1, 2), -1), ((1, 2), 0), ((1, 2), 1), ((1, 2, 3), 0)
    ]  # fmt: skip
    store.close()
    for options in ({}, {"reads_only": True}):
        store = opened(tmp_path / "folder", **options)
        assert read_all(store) == before
        [size] = store.sizes()
        assert (size.label, size.n_tokens) == (LABEL.decode(), 3)
        assert size.n_bytes < store.n_bytes < size.n_bytes + 100
        store.close()


def test_a_part_is_written_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    key = put(store, 1)
    assert store.has(key, 0)
    store.flush()
    n_bytes = store.n_bytes
    put(store, 1)
    store.flush()
    assert store.n_bytes == n_bytes
    store.close()


@pytest.mark.posix("needs POSIX permissions")
def test_the_files_are_private(tmp_path: Path) -> None:
    store = opened(tmp_path / "a" / "folder")
    put(store, 1)
    store.close()
    assert (tmp_path / "a" / "folder").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "folder").iterdir()} == {0o600}


def test_no_damage_is_read(tmp_path: Path) -> None:
    """Flipped bits and truncated files, at every kind of place."""
    store = opened(tmp_path)
    put_path(store, 1, 2, 3, 4, n_bytes=100)
    put(store, 1, 5, n_bytes=100)
    store.close()
    [path] = segments(tmp_path)
    data, chance = path.read_bytes(), random.Random(0)
    damages = [data[:n] for n in range(0, len(data), 5)]
    for i in range(len(data)):
        damages.append(data[:i] + bytes([data[i] ^ 1 << chance.randrange(8)]) + data[i + 1 :])
    n_right = set()
    for damaged in damages:
        path.write_bytes(damaged)
        store = opened(tmp_path, reads_only=True)
        n_right.add(len(read_all(store)))
        store.close()
    assert n_right == set(range(5))


def test_a_new_segment_follows_a_damaged_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put_path(store, 1, 2)
    store.close()
    [path] = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    store = opened(tmp_path)
    assert [path for path, _ in read_all(store)] == [(1,)]
    put(store, 1, 2)
    store.close()
    store = opened(tmp_path)
    assert [path for path, _ in read_all(store)] == [(1,), (1, 2)]
    store.close()


def test_files_of_another_version_are_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    [path] = segments(tmp_path)
    path.write_bytes(path.read_bytes().replace(MAGIC, b"llmblk99"))
    (tmp_path / "a slot").write_bytes(b"something else")
    store = opened(tmp_path, reads_only=True)
    assert not store.sizes()
    store.close()
    assert path.exists()
    store = opened(tmp_path)
    assert not store.sizes()
    assert not store.take_notice()
    store.close()
    assert not path.exists()
    assert (tmp_path / "a slot").exists()


def test_a_second_process_reads_only(tmp_path: Path) -> None:
    first = opened(tmp_path)
    put(first, 1)
    first.flush()
    second = opened(tmp_path)
    assert "another program writes to it" in second.take_notice()
    assert not second.take_notice()
    assert not second.has_room
    assert len(read_all(second)) == 1
    put(second, 2)
    second.flush()
    assert len(read_all(second)) == 1
    for path in segments(tmp_path):  # the first one may evict what the second one knows
        path.unlink()
    assert not read_all(second)
    assert not second.take_notice()
    second.close()
    first.close()
    third = opened(tmp_path)
    assert third.has_room
    third.close()


def test_models_of_a_process_share_a_store(tmp_path: Path) -> None:
    first, second = open_store(tmp_path, None), open_store(tmp_path, None)
    assert first is second
    first.close()
    assert second.has_room
    second.close()
    third = open_store(tmp_path, None)
    assert third is not first
    assert third.has_room
    third.close()


def test_a_full_disk_ends_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.flush()
    write_all = block_store._write_all

    def full(file: object, data: bytes) -> None:
        if len(data) > 1000:
            write_all(file, data[:1000])  # type: ignore[arg-type]
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)  # type: ignore[arg-type]

    monkeypatch.setattr(block_store, "_write_all", full)
    put_path(store, 2, 3)
    store.flush()
    assert "no longer stored" in (notice := store.take_notice())
    assert "No space left on device" in notice
    assert not store.has_room
    assert not store.take_notice()
    assert len(read_all(store)) == 1
    store.close()
    store = opened(tmp_path)
    assert len(read_all(store)) == 1
    store.close()


def test_a_folder_that_is_not_writable_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(block_store, "open", refused, raising=False)
    store = opened(tmp_path)
    assert "the folder is not writable (Permission denied)" in store.take_notice()
    assert len(read_all(store)) == 1
    store.close()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be created .*: name another folder"):
        BlockStore(tmp_path / "file")


def test_a_removed_file_is_reported_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put_path(store, 1, 2)
    store.flush()
    [path] = segments(tmp_path)
    path.unlink()
    assert not read_all(store)
    assert "damaged or missing" in store.take_notice()
    put(store, 7)
    store.flush()
    assert not read_all(store)
    assert not store.take_notice()
    store.close()


# -- Eviction ------------------------------------------------------------------------------------------------------


def paths_left(store: BlockStore) -> set[tuple[int, ...]]:
    return {path for path, _ in nodes(store)}


def test_common_beginnings_are_evicted_last(tmp_path: Path) -> None:
    """Three prompts with a common beginning, then one that needs room."""
    store = opened(tmp_path, 1 << 20)
    for branch in (10, 20, 30):
        put_path(store, 1, 2, branch, branch + 1, n_bytes=40_000)
    store.flush()
    used = next(node for path, node in nodes(store) if path == (1, 2, 10, 11))
    for id_ in range(100, 140):
        store.use(used)
        put(store, id_, n_bytes=40_000)
        store.flush()
        left = paths_left(store)
        assert {(1,), (1, 2), (1, 2, 10), (1, 2, 10, 11)} <= left
    assert not {(1, 2, 20), (1, 2, 30), (100,)} & left
    assert (139,) in left
    store.close()


def test_uses_survive_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, 1 << 20)
    for id_ in range(10):
        put(store, id_, n_bytes=40_000)
    store.flush()
    store.use(next(node for path, node in nodes(store) if path == (0,)))
    store.close()
    store = opened(tmp_path, 1 << 20)
    for id_ in range(10, 25):
        put(store, id_, n_bytes=40_000)
    store.flush()
    left = paths_left(store)
    assert (0,) in left
    assert (1,) not in left
    store.close()


def test_the_files_stay_within_their_size(tmp_path: Path) -> None:
    """Random blocks and uses, with restarts: every block that is left is right."""
    chance, max_bytes = random.Random(1), 1 << 20
    for _ in range(4):
        store = opened(tmp_path, max_bytes)
        for _ in range(150):
            path = [chance.randrange(4) for _ in range(chance.randrange(1, 6))]
            put_path(store, *path, n_bytes=chance.choice([100, 5000, 30_000]))
            if chance.random() < 0.2 and (known := list(nodes(store))):
                store.use(chance.choice(known)[1])
            store.flush()
            assert sum(path.stat().st_size for path in segments(tmp_path)) == store.n_bytes <= max_bytes
        found = read_all(store)
        assert len(found) > 10
        store.close()
        store = opened(tmp_path, max_bytes)
        assert set(found) <= set(read_all(store))
        store.close()


def test_a_block_larger_than_a_quarter_is_not_stored(tmp_path: Path) -> None:
    store = opened(tmp_path, 1 << 20)
    put(store, 1, n_bytes=300_000)
    store.flush()
    assert not read_all(store)
    store.close()


def test_clearing_removes_the_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put_path(store, 1, 2)
    store.clear()
    assert not segments(tmp_path)
    put(store, 3)
    store.close()
    store = opened(tmp_path)
    assert paths_left(store) == {(3,)}
    store.close()


# -- Kill ----------------------------------------------------------------------------------------------------------

WRITER = """
import random, sys
from pathlib import Path
from tests.localllm.engine.test_block_store import opened, put_path
chance, n = random.Random(sys.argv[2]), 0
store = opened(Path(sys.argv[1]), int(sys.argv[3]))
while True:
    put_path(store, *(chance.randrange(50) for _ in range(3)), n_bytes=chance.choice([100, 20_000]))
    store.flush()
    n += 1
    print(n, flush=True)
"""


@pytest.mark.posix("needs SIGKILL")
def test_a_killed_process_leaves_no_wrong_block(tmp_path: Path) -> None:
    chance, max_bytes = random.Random(), 1 << 21
    for i in range(N_KILLS):
        words = [sys.executable, "-c", WRITER, str(tmp_path), str(i), str(max_bytes)]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(chance.random() / 4)
            process.send_signal(signal.SIGKILL)
            n_written = 1 + len(process.stdout.readlines())
        store = opened(tmp_path, max_bytes)
        assert store.has_room
        found = read_all(store)
        if store.n_bytes < max_bytes // 2:  # nothing was evicted
            again = random.Random(str(i))
            for _ in range(n_written - 1):
                path = tuple(again.randrange(50) for _ in range(3))
                again.choice([100, 20_000])
                assert (path, 0) in found
        store.close()
