"""Untrusted folders: pipes, devices and links instead of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.files import read_text
from localllm.regular_file import open_regular, read_regular
from tests.helpers.command_line import run_main

pytestmark = pytest.mark.posix("Windows restricts links and has no named pipes")


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def test_links_lead_to_files_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "file").write_bytes(b"12345")
    (folder / "inner").symlink_to("file")
    (folder / "outer").symlink_to("../secret")
    (tmp_path / "linked").symlink_to("model")
    for path in (folder, tmp_path / "linked"):
        assert read_regular(path / "inner", 5, folder=path) == b"12345"
        with pytest.raises(OSError, match="it is a link to a file in another folder: copy that file"):
            open_regular(path / "outer", folder=path)
    with pytest.raises(OSError, match="it has more than"):
        read_regular(folder / "file", 4)


def test_links_of_the_hubs_cache_lead_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(b"{}")
    (tmp_path / "secret").write_bytes(b"secret")
    for path, target in ((snapshot / "a", "../../blobs/abc"), (snapshot / "1_Pooling" / "a", "../../../blobs/abc")):
        path.symlink_to(target)
        assert read_regular(path, 9, folder=path.parent) == b"{}"
    (snapshot / "b").symlink_to("../../../secret")
    with pytest.raises(OSError, match="copy that file"):
        read_regular(snapshot / "b", 9, folder=snapshot)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe with a writer that waits for a reader and writes nothing, so that no fault waits forever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: open(path, "wb").close(), daemon=True)
    writer.start()
    yield path
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer.join()  # the reader stays open: the writer may have yet to open the pipe
    os.close(reader)


def test_named_pipes_are_refused_but_not_pipes_that_are_open(pipe: Path) -> None:
    with pytest.raises(UsageError, match=r"pipe cannot be read \(it is a named pipe\)"):
        read_text(pipe)
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}") == "text"
    os.close(reading)


@pytest.mark.parametrize(
    "line",
    [
        "serve --models PIPE",
        "serve -m PIPE",
        "generate -p a --mmproj PIPE",
        "generate -p a --lora PIPE",
        "serve -m demo --api-key-file PIPE --port 0",
        "serve -m demo --ssl-key-file PIPE --ssl-cert-file PIPE --port 0",
        "serve -m demo --chat-template-file PIPE",
        "generate -f PIPE",
        "generate -p a -jf PIPE",
        "generate -p a --grammar-file PIPE",
        "generate -p a --draft-model PIPE",
        "evaluate -f PIPE",
        "evaluate --base-logits PIPE",
        "evaluate --choices PIPE",
        "imatrix demo -f PIPE",
        "imatrix demo -f pyproject.toml --in-file PIPE",
        "quantize demo NEW Q4_0 --imatrix PIPE",
        "embed -f PIPE",
        "merge demo NEW --lora PIPE",
    ],
)
def test_no_command_waits_for_a_named_pipe(
    pipe: Path, line: str, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = [word.replace("PIPE", str(pipe)).replace("NEW", str(tmp_path / "new")) for word in line.split()]
    error = run_main(capfdbinary, *words).error()
    assert "it is a named pipe" in error or "not a regular file" in error
