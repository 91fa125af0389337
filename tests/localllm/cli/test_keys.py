"""``localllm keys``: the file that it writes, and what a server reads from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.server.keys import PREFIX, KeyFile, read_keys
from tests.helpers.command_line import command, environment, run_main
from tests.helpers.data import ROOT

pytest.importorskip("starlette")


def test_a_key_is_added_listed_and_revoked(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "new folder" / "keys.toml"
    file = ("--keys", str(path))
    limits = ("--model", "qwen*", "--model", "demo", "--requests-per-minute", "60", "--tokens-per-minute", "5000")
    added = run_main(capfdbinary, "keys", "add", "alice.smith@example", *file, *limits)
    assert added.code == 0, added.err
    key = added.out.strip()
    assert key.startswith(PREFIX)
    assert len(key) == len(PREFIX) + 43  # 256 bits
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert key not in added.err
    admin = run_main(capfdbinary, "keys", "add", "bob", *file, "--role", "admin").out.strip()
    keys = KeyFile(path)
    alice, bob = keys.find(key), keys.find(admin)
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.entry.role, alice.entry.models) == ("alice.smith@example", "client", ["qwen*", "demo"])
    assert (alice.entry.requests_per_minute, alice.entry.tokens_per_minute) == (60, 5000)
    assert (bob.entry.role, bob.entry.models, bob.entry.requests_per_minute) == ("admin", None, None)
    listed = run_main(capfdbinary, "keys", "list", *file).out.splitlines()
    assert listed[1].split() == ["alice.smith@example", "client", "qwen*,", "demo", "60", "5,000"]
    as_json = json.loads(run_main(capfdbinary, "keys", "list", *file, "--json").out)
    assert [each["name"] for each in as_json["keys"]] == ["alice.smith@example", "bob"]
    assert run_main(capfdbinary, "keys", "revoke", "bob", *file).code == 0
    assert [each.name for each in read_keys(path)] == ["alice.smith@example"]
    assert run_main(capfdbinary, "keys", "revoke", "alice.smith@example", *file).code == 0
    assert read_keys(path) == []
    assert "0 keys" in run_main(capfdbinary, "keys", "list", *file).out


def test_the_rest_of_the_file_stays(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "keys.toml"
    text = f'# team\n[a]  # first\nhash = "sha256:{"0" * 64}"\ntokens_per_minute = 1_000\n'
    path.write_text(text)
    if sys.platform != "win32":
        path.chmod(0o640)
    for action in ("add", "revoke"):
        assert run_main(capfdbinary, "keys", action, "b", "--keys", str(path)).code == 0
        assert path.read_text().startswith(text)
        if sys.platform != "win32":
            assert path.stat().st_mode & 0o777 == 0o640  # for a server of another user


def test_what_cannot_be_done_is_said(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "keys.toml"
    file = ("--keys", str(path))
    assert "no key file" in run_main(capfdbinary, "keys", "revoke", "a", *file).err
    assert "name is needed" in run_main(capfdbinary, "keys", "add", *file).err
    assert "cannot be the name" in run_main(capfdbinary, "keys", "add", "a b", *file).err
    assert not path.exists()
    assert run_main(capfdbinary, "keys", "add", "a", *file).code == 0
    before = path.read_bytes()
    assert "has a key a already" in run_main(capfdbinary, "keys", "add", "a", *file).err
    assert "has no key 'b'" in run_main(capfdbinary, "keys", "revoke", "b", *file).err
    assert "flags of localllm keys add" in run_main(capfdbinary, "keys", "revoke", "a", *file, "--role", "admin").err
    assert "not needed" in run_main(capfdbinary, "keys", "list", "a", *file).err
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["keys.toml"]
    path.write_text("[a")
    for action in ("add", "revoke", "list"):
        line = ("keys", action, *(() if action == "list" else ("b",)), *file)
        assert "is not valid TOML" in run_main(capfdbinary, *line).err
    assert path.read_text() == "[a"


def test_the_default_file_is_next_to_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "config.toml"))
    assert run_main(capfdbinary, "keys", "add", "a").code == 0
    assert [each.name for each in read_keys(tmp_path / "keys.toml")] == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_a_link_stays_a_link(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "link.toml").symlink_to(tmp_path / "keys.toml")
    assert run_main(capfdbinary, "keys", "add", "a", "--keys", str(tmp_path / "link.toml")).code == 0
    assert (tmp_path / "link.toml").is_symlink()
    assert len(read_keys(tmp_path / "keys.toml")) == 1


def test_changes_at_once_lose_no_key(tmp_path: Path) -> None:
    """A second change waits for no lock: it is refused, and not lost without a word."""
    path = tmp_path / "keys.toml"
    lines = [command("keys", "add", f"key{i}", "--keys", path) for i in range(4)]
    processes = [
        subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment(), cwd=ROOT
        )
        for line in lines
    ]
    outcomes = [(*process.communicate(), process.returncode) for process in processes]
    n_added = sum(code == 0 for *_, code in outcomes)
    assert n_added
    assert len(read_keys(path)) == n_added
    assert all("another program is writing" in err for _, err, code in outcomes if code)
