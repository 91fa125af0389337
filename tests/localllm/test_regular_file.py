"""Untrusted folders: pipes, devices and links instead of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localllm.regular_file import open_regular, read_regular

pytestmark = pytest.mark.posix(reason="Windows restricts links and has no named pipes")


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
