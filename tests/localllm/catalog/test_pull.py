"""Downloads from a hub on localhost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest

import localllm
from localllm.catalog import pull as pulling
from localllm.catalog.pull import pull, pull_checkpoint
from localllm.convert import Checkpoint
from localllm.errors import HubError, LocalLLMError, ModelNotFoundError, UsageError
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.command_line import environment, run_main, running
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import RawGGUF, RawTensor, key, string, u32
from tests.helpers.hub_server import COMMIT, HubServer, Repo, hub_of_this_process, hub_variables

DEMO = (ROOT / "localllm" / "data" / "demo.gguf").read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_of_this_process(tmp_path / "home", monkeypatch) as server:
        yield server


def small_gguf(**keys: str) -> bytes:
    """Return a tiny valid file; its keys distinguish it from others."""
    rest = [key(name, 8, string(value)) for name, value in keys.items()]
    return bytes(RawGGUF(keys=[key("general.architecture", 8, string("llama")), *rest]))


def split_parts() -> list[bytes]:
    """Return the two files of one split model."""
    return [
        bytes(
            RawGGUF(
                keys=[
                    key("general.architecture", 8, string("llama")),
                    key("split.no", 4, u32(i)),
                    key("split.count", 4, u32(2)),
                    key("split.tensors.count", 4, u32(2)),
                ],
                tensors=[RawTensor(f"t{i}", (8,), bytes(32))],
            )
        )
        for i in range(2)
    ]


def blobs(repo: str = "org/repo") -> list[str]:
    folder = Path(os.environ["HF_HOME"], "hub", "models--" + repo.replace("/", "--"), "blobs")
    return sorted(path.name for path in folder.iterdir())


# -- Downloads ------------------------------------------------------------------------------------------------------


@pytest.mark.posix("links need rights there")
def test_a_download_has_the_cache_layout_of_huggingface_hub(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"README.md": b"hello", "demo-Q8_0.gguf": DEMO})
    seen: list[tuple[str, int, int]] = []
    path = pull("org/repo", lambda *report: seen.append(report))
    assert path.read_bytes() == DEMO
    assert path.parts[-3:] == ("snapshots", COMMIT, "demo-Q8_0.gguf")
    assert blobs() == [repo.hash("demo-Q8_0.gguf")]
    # huggingface_hub finds it without a request.
    found = huggingface_hub.try_to_load_from_cache(
        "org/repo", "demo-Q8_0.gguf", cache_dir=Path(os.environ["HF_HOME"], "hub")
    )
    assert Path(found) == path
    stages = [stage for stage, _, _ in seen]
    assert stages == sorted(stages, reverse=True)
    assert set(stages) == {"download", "check"}
    assert seen[-1] == ("check", len(DEMO), len(DEMO))
    for stage in ("download", "check"):
        done = [n for each, n, total in seen if each == stage and total == len(DEMO)]
        assert done == sorted(done)
        assert done[-1] == len(DEMO)


def test_a_second_time_nothing_is_fetched(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": small_gguf()})
    first = pull("org/repo")
    hub.requests.clear()
    assert pull("org/repo:a") == first
    assert hub.ranges == []


@pytest.mark.posix("links need rights there")
def test_a_small_file_has_gits_hash(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"a.gguf": small_gguf()}, small={"a.gguf"})
    assert pull("org/repo").read_bytes() == repo.files["a.gguf"]
    assert blobs() == [repo.hash("a.gguf")]


@pytest.mark.posix("links need rights there")
def test_the_quantisation_or_the_file_chooses(hub: HubServer) -> None:
    files = {f"m-{quant}.gguf": small_gguf(quant=quant) for quant in ("Q4_0", "Q4_K_S", "Q4_K_M", "Q8_0")}
    hub.repos["org/repo"] = Repo(files)
    assert pull("org/repo").name == "m-Q4_K_M.gguf"
    assert pull("org/repo:q8_0").read_bytes() == files["m-Q8_0.gguf"]
    assert pull("org/repo:m-q4_0.gguf").name == "m-Q4_0.gguf"
    with pytest.raises(UsageError, match=r"org/repo has no 'Q6_K': there are org/repo:Q4_0 \(0\.00 MB\), "):
        pull("org/repo:Q6_K")
    assert len(blobs()) == 3


def test_all_parts_of_a_split_model_are_fetched(hub: HubServer) -> None:
    parts = split_parts()
    names = [f"Q4_0/m-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.repos["org/repo"] = Repo(dict(zip(names, parts, strict=True)))
    seen: list[tuple[str, int, int]] = []
    path = pull("org/repo:q4_0", lambda *report: seen.append(report))
    assert path.as_posix().endswith(names[0])
    assert {total for _, _, total in seen} == {sum(map(len, parts))}
    with localllm.GGUFFile.open(path) as file:
        assert set(file.tensors) == {"t0", "t1"}


def encoder(name: str, projector: str = "gemma3") -> bytes:
    """Return a projector file without tensors."""
    keys = {"general.architecture": "clip", "clip.projector_type": projector, "general.name": name}
    return bytes(RawGGUF(keys=[key(name, 8, string(value)) for name, value in keys.items()]))


def test_the_image_encoder_is_pulled_with_its_model(
    hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    models = {name: small_gguf(name=name) for name in ("m-Q8_0.gguf", "small/m-Q4_K_M.gguf")}
    names = (*(f"mmproj-{quant}.gguf" for quant in ("BF16", "F16", "Q8_0")), "small/mmproj-m-Q8_0.gguf")
    hub.repos["org/repo"] = Repo(models | {name: encoder(name) for name in names})
    outcome = run_main(capfdbinary, "pull", "org/repo:Q8_0")
    assert "mmproj-F16.gguf is next to the model: it lets the model accept images or audio" in outcome.err
    path = pull("org/repo:Q8_0")
    assert sorted(each.name for each in path.parent.iterdir()) == ["m-Q8_0.gguf", "mmproj-F16.gguf"]
    assert sorted(each.name for each in pull("org/repo").parent.iterdir()) == ["m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("has_ranges", [True, False])
def test_an_encoder_that_this_version_does_not_support_is_not_pulled(
    hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes], has_ranges: bool
) -> None:
    new, known = encoder("new", "projector-of-2030"), encoder("known")
    files = {"m-Q8_0.gguf": small_gguf(), "mmproj-F16.gguf": new + bytes(64), "mmproj-Q8_0.gguf": new}
    hub.repos["org/repo"] = Repo(files, has_ranges=has_ranges)
    outcome = run_main(capfdbinary, "pull", "org/repo")
    assert outcome.code == 0, outcome.err
    fault = "the projector 'projector-of-2030' of the mmproj file is not supported, so the model accepts only text"
    assert f"warning: mmproj-F16.gguf is not downloaded: {fault}" in outcome.err
    assert "is next to the model" not in outcome.err
    path = Path(outcome.out.strip())
    assert [each.name for each in path.parent.iterdir()] == ["m-Q8_0.gguf"]
    assert "bytes=0-1048575" in hub.ranges
    files["mmproj-Q8_0.gguf"] = known
    assert sorted(each.name for each in pull("org/repo").parent.iterdir()) == ["m-Q8_0.gguf", "mmproj-Q8_0.gguf"]
    hub.repos["org/other"] = Repo({"m-Q8_0.gguf": small_gguf(), "mmproj-F16.gguf": known[:60]})  # no metadata
    outcome = run_main(capfdbinary, "pull", "org/other")
    assert sorted(os.listdir(Path(outcome.out.strip()).parent)) == ["m-Q8_0.gguf", "mmproj-F16.gguf"]
    assert "warning: mmproj-F16.gguf is next to the model, but the model accepts only text: " in outcome.err


def test_a_model_of_the_hub_that_lacks_a_part_is_refused(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"m-00001-of-00002.gguf": split_parts()[0]})
    with pytest.raises(HubError, match="org/repo has not all files of m: choose another model"):
        pull("org/repo")
    assert hub.ranges == []


def test_a_commit_pushed_during_a_download_changes_nothing(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO})

    def push(stage: str, done: int, total: int) -> None:
        if stage == "check":
            repo.commit, repo.files = "f" * 40, {"a.gguf": small_gguf()}

    path = pull("org/repo", push)
    assert (path.parent.name, path.read_bytes()) == (COMMIT, DEMO)


@pytest.mark.parametrize("commit", [COMMIT, "f" * 40], ids=["the same commit", "another commit"])
def test_without_links_files_lie_under_their_names(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """The layout of huggingface_hub without links; files are found, and not downloaded again for another commit."""

    def refuse(self: Path, target: object, target_is_directory: bool = False) -> None:
        raise OSError("links are not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO, "b.gguf": small_gguf()})
    path = pull("org/repo:a")
    assert (path.is_symlink(), path.read_bytes(), blobs()) == (False, DEMO, [])
    hub.requests.clear()
    repo.commit = commit
    other = pull("org/repo:a")
    assert other.samefile(path)
    assert other.parent.name == commit
    assert hub.requests == []


# -- Cuts and resuming ---------------------------------------------------------------------------------------------


def test_a_cut_connection_is_resumed(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO}, cuts=[100_000, 200_000])
    assert pull("org/repo").read_bytes() == DEMO
    assert hub.ranges == [None, "bytes=100000-", "bytes=300000-"]


@pytest.mark.posix("links need rights there")
def test_the_next_download_resumes_a_partial_file(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO}, cuts=[100_000, 0, 0, 0])
    with pytest.raises(HubError, match=r"keeps breaking off .* 100,000 of the 4,6.* bytes of a\.gguf are kept"):
        pull("org/repo")
    assert blobs() == [repo.hash("a.gguf") + ".incomplete"]
    with pytest.raises(ModelNotFoundError, match=r"pull it first, localllm pull org/repo"):
        localllm.load("org/repo")
    repo.cuts.clear()
    assert pull("org/repo").read_bytes() == DEMO
    assert hub.ranges[-1] == "bytes=100000-"
    assert blobs() == [repo.hash("a.gguf")]


def test_a_server_without_ranges_sends_all_again(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO}, cuts=[100_000], has_ranges=False)
    assert pull("org/repo").read_bytes() == DEMO


def test_a_partial_file_that_is_too_long_is_not_resumed(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"a.gguf": small_gguf()})
    pull("org/repo")
    blob = Path(os.environ["HF_HOME"], "hub", "models--org--repo", "blobs", repo.hash("a.gguf"))
    blob.with_name(blob.name + ".incomplete").write_bytes(bytes(10_000))
    blob.write_bytes(b"cut")  # a wrong size, so it is downloaded again
    assert pull("org/repo").read_bytes() == repo.files["a.gguf"]


def test_a_file_damaged_in_transit_is_removed(hub: HubServer) -> None:
    wrong = DEMO[:-1] + bytes([DEMO[-1] ^ 1])
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO}, sent={"a.gguf": wrong})
    with pytest.raises(HubError, match=r"a\.gguf was damaged .* removed: pull it again"):
        pull("org/repo")
    assert blobs() == []
    repo.sent.clear()
    assert pull("org/repo").read_bytes() == DEMO


@pytest.mark.parametrize("data", [b"<!doctype html>" * 10, DEMO[:100_000], b""], ids=["page", "truncated", "empty"])
def test_a_file_that_is_not_a_model_is_removed(hub: HubServer, data: bytes, windows: None) -> None:
    """Also on Windows, where a file that an error's traceback still maps cannot be removed."""
    hub.repos["org/repo"] = Repo({"a.gguf": data})
    with pytest.raises(HubError, match=r"org/repo has a broken a, which was removed again \(.*\): choose another"):
        pull("org/repo")
    assert blobs() == []


def test_a_file_that_cannot_be_removed_is_reported(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO[:100_000]})

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            raise PermissionError(13, "in use")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(HubError, match=r"org/repo has a broken a, which cannot be removed \(in use\) \(.*\): choose"):
        pull("org/repo")


def test_two_downloads_of_one_file_are_refused(hub: HubServer) -> None:
    filelock = pytest.importorskip("filelock")
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO})
    lock = Path(os.environ["HF_HOME"], "hub", ".locks", "models--org--repo", repo.hash("a.gguf") + ".lock")
    lock.parent.mkdir(parents=True)
    with (
        filelock.FileLock(lock).acquire(),
        pytest.raises(HubError, match=r"another program downloads a\.gguf now: wait"),
    ):
        pull("org/repo")


# -- Refused files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "refuses_files", "message"),
    [
        ((401, "GatedRepo"), True, "org/repo is gated: request access on its page"),
        ((403, "GatedRepo"), True, "org/repo is gated: request access on its page"),
        ((401, "RepoNotFound"), False, "the hub has no repository org/repo, or it is private: check the name"),
        ((404, "RepoNotFound"), False, "the hub has no repository org/repo, or it is private: check the name"),
        ((403, ""), False, r"the hub refuses access to org/repo \(HTTP 403\)"),
        ((404, "EntryNotFound"), True, r"no longer has what it listed of org/repo \(HTTP 404\)"),
        ((500, ""), False, r"the hub does not answer for org/repo \(HTTP 500\): try again later"),
    ],
)
def test_refusals_of_the_hub(hub: HubServer, refusal: tuple[int, str], refuses_files: bool, message: str) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO}, refusal=refusal, refuses_files=refuses_files)
    with pytest.raises(HubError, match=message):
        pull("org/repo")


def test_a_failed_request_is_repeated(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO}, refusal=(503, ""), refuses_files=True)
    with pytest.raises(HubError, match=r"keeps breaking off .* 0 of the .* bytes of a\.gguf are kept"):
        pull("org/repo")
    assert len(hub.ranges) == 1 + len(pulling.RETRY_SECONDS)


def test_no_repository_no_files_no_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match="the hub has no repository no/body"):
        pull("no/body")
    hub.repos["org/repo"] = Repo({"model.safetensors": b"x"})
    with pytest.raises(UsageError, match="org/repo has no GGUF file"):
        pull("org/repo")
    hub.listings["org/page"] = b"<html>Log in to this network</html>"
    with pytest.raises(HubError, match=r"the server at http://127\.0\.0\.1:\d+ is not a hub"):
        pull("org/page")
    hub.listings["org/list"] = b"[]"
    with pytest.raises(HubError, match="is not a hub"):
        pull("org/list")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, without a server
    with pytest.raises(HubError, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached .*: check the network"):
        pull("org/repo")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "a SOCKS proxy needs the package socksio"),
        ("https_proxy", "socks5h://me:secret@127.0.0.1:9", "a SOCKS proxy needs the package socksio"),
        ("ALL_PROXY", "socks://127.0.0.1:9/", "Unknown scheme"),
        ("HTTPS_PROXY", "http://127.0.0.1:port", "Invalid port"),
        ("SSL_CERT_FILE", "/nonexistent/cert.pem", "No such file or directory"),
        ("SSL_CERT_FILE", __file__, "no certificate or crl found"),
    ],
)
def test_a_variable_of_the_environment_that_cannot_be_used_is_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    """The error names the missing package, not the network or localllm."""
    if "socksio" in reason and find_spec("socksio") is not None:
        pytest.skip("needs an environment without the SOCKS package")
    for other in [each for each in os.environ if each.lower().endswith("_proxy") or each.startswith("SSL_CERT")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    huggingface_hub.close_session()
    with pytest.raises(HubError) as caught:
        pull("org/repo")
    assert str(caught.value).startswith(f"the environment variable {name} cannot be used (")
    assert reason.lower() in str(caught.value).lower()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("hash", ["../../x", "a" * 40 + "/../../../x"])
def test_a_hash_that_is_a_path_is_not_followed(hub: HubServer, hash: str) -> None:
    file = {"rfilename": "a.gguf", "size": 3, "blobId": hash}
    hub.listings["org/repo"] = json.dumps({"id": "org/repo", "sha": COMMIT, "siblings": [file]}).encode()
    with pytest.raises(HubError, match=r"is not a hub .*no hash and size of a\.gguf"):
        pull("org/repo")


@pytest.mark.parametrize(
    "name", ["../../../m.gguf", "/m.gguf", "a/../../m.gguf", "..\\m.gguf", "a\0.gguf", "\x1b[2J.gguf"]
)
def test_a_file_name_outside_the_folder_is_refused(hub: HubServer, name: str) -> None:
    hub.repos["org/repo"] = Repo({name: DEMO})
    with pytest.raises(HubError, match="is not a hub"):
        pull("org/repo")
    assert hub.requests == []


def test_a_hub_that_sends_more_and_more_is_given_up(hub: HubServer) -> None:
    """False sizes would otherwise restart the download forever."""
    hub.repos["org/repo"] = Repo({"m.gguf": DEMO}, sent={"m.gguf": DEMO + b"more"}, tells_length=False)
    with pytest.raises(HubError, match=f"sends more of m.gguf than the {len(DEMO):,} bytes"):
        pull("org/repo")
    assert len(hub.ranges) == 1
    assert blobs() == []


@pytest.mark.parametrize(("n_sent", "n_listed"), [(4_620_959, "4,620,960"), (4_620_961, "4,620,960")])
def test_a_wrong_size_is_reported(hub: HubServer, n_sent: int, n_listed: str) -> None:
    hub.repos["org/repo"] = Repo({"m.gguf": DEMO}, sent={"m.gguf": (DEMO + b"x")[:n_sent]})
    with pytest.raises(HubError, match=rf"lists m\.gguf with {n_listed} bytes, but sends {n_sent:,}: check"):
        pull("org/repo")
    assert len(hub.ranges) == 1


@pytest.mark.parametrize(
    ("status", "message"), [(200, "more than 1 MiB"), (500, r"does not answer for org/repo \(HTTP 500\)")]
)
def test_an_answer_without_an_end_is_not_read_on(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    monkeypatch.setattr("localllm.catalog.hub._MAX_LISTING", 1 << 20)
    hub.endless["org/repo"] = status
    with pytest.raises(HubError, match=rf"{message}"):
        pull("org/repo")
    assert hub.n_endless < 32 << 20  # includes data in the system's buffers


@pytest.mark.parametrize("wait", ["7", "date"])
def test_a_busy_hub_is_queried_again_after_retry_after(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    said = formatdate(time.time() + 7.5, usegmt=True) if wait == "date" else wait
    hub.repos["org/repo"] = repo = Repo({"a.gguf": small_gguf()}, busy={"", "a.gguf"}, wait=said)
    assert pull("org/repo").read_bytes() == repo.files["a.gguf"]
    assert len(slept) == 2  # once for the list, once for the file
    assert all(0 < seconds <= 7.5 for seconds in slept)


def test_a_hub_that_stays_busy_is_reported(hub: HubServer) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": small_gguf()}, busy={""}, wait="3600")
    with pytest.raises(HubError, match=r"too many requests \(HTTP 429\): try again in 3600 seconds"):
        pull("org/repo")
    assert hub.requests == []


def test_a_list_of_many_files_is_cut(hub: HubServer) -> None:
    files = [{"rfilename": f"m{i}.gguf", "size": 3, "blobId": "a" * 40} for i in range(20_000)]
    hub.listings["org/repo"] = json.dumps({"id": "org/repo", "sha": COMMIT, "siblings": files}).encode()
    with pytest.raises(UsageError, match=r"has 20000 models: choose one, .* and 19,988 more$") as raised:
        pull("org/repo")
    assert len(str(raised.value)) < 1000


def test_a_listing_that_is_nested_too_deeply_is_no_hub(hub: HubServer) -> None:
    hub.listings["org/repo"] = b"[" * 100_000
    with pytest.raises(HubError, match="is not a hub"):
        pull("org/repo")


@pytest.mark.parametrize("name", ["repo", "org/repo/more", "", "./org/repo"])
def test_an_invalid_name_is_refused(hub: HubServer, name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a model on the hub: write ORG/REPO"):
        pull(name)


def test_a_name_that_the_hub_cannot_have_is_refused(hub: HubServer) -> None:
    with pytest.raises(LocalLLMError, match=r"'org/re\.\.po' is not the name of a repository"):
        pull("org/re..po")


def test_a_full_disk_is_reported_before_the_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO})
    usage = shutil.disk_usage(os.environ.get("TMPDIR", "/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(DEMO)))
    with pytest.raises(HubError, match=r"org/repo needs 0\.00 GB more on the disk of .*: make room, choose"):
        pull("org/repo")
    assert hub.ranges == []


def test_a_cache_that_cannot_be_written(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/repo"] = Repo({"a.gguf": DEMO})
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match=r"the cache .*file cannot be written \(.*\): make room"):
        pull("org/repo")


def test_a_missing_package_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"the package huggingface_hub cannot be loaded .*: install it again"):
        pull("org/repo")


# -- The command ---------------------------------------------------------------------------------------------------


def test_pulled_models_are_found_by_every_command(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    hub.repos["org/repo"] = Repo({"demo-Q8_0.gguf": DEMO})
    missing = run_main(capfdbinary, "inspect", "org/repo:q8_0")
    assert missing.code == 1
    assert "pull it first, localllm pull org/repo:q8_0" in missing.error()
    pulled = run_main(capfdbinary, "pull", "org/repo:q8_0")
    memory, advice = pulled.err.splitlines()
    assert re.fullmatch(r"\d+ MB of memory with 1,024 tokens of context", memory)
    assert (pulled.code, advice) == (0, "localllm generate -m org/repo:q8_0 runs this model")
    path = Path(pulled.out.removesuffix("\n"))
    assert path.read_bytes() == DEMO
    shown = run_main(capfdbinary, "inspect", "org/repo:q8_0", "--metadata")
    assert shown.out.startswith(f"{path}: GGUF version 3")
    with localllm.load("org/repo", device="reference") as llm:
        assert llm.info.path == path


def test_errors_of_the_command_are_one_line(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "pull", "no/body")
    assert outcome.code == 1
    assert outcome.error().startswith("the hub has no repository no/body")
    hub.repos["org/repo"] = Repo({"a-Q4_0.gguf": DEMO, "a-Q8_0.gguf": DEMO})
    outcome = run_main(capfdbinary, "pull", "org/repo")
    assert outcome.code == 2
    assert outcome.error() == ("org/repo has 2 models: choose one, org/repo:Q4_0 (4.62 MB), org/repo:Q8_0 (4.62 MB)")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_ctrl_c_keeps_what_was_fetched(hub: HubServer) -> None:
    hub.repos["org/repo"] = repo = Repo({"a.gguf": DEMO}, waits=True)
    home = Path(os.environ["HF_HOME"])
    partial = home / "hub" / "models--org--repo" / "blobs" / (repo.hash("a.gguf") + ".incomplete")
    env = environment(**hub_variables(hub, home))
    with running(["pull", "org/repo"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (partial.exists() and partial.stat().st_size > len(DEMO) // 4):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (-signal.SIGINT, b"")
    assert err.startswith(b"localllm: stopped; ")
    assert b"are saved: run the same command again to continue" in err
    kept = partial.stat().st_size
    repo.waits = False
    assert pull("org/repo").read_bytes() == DEMO
    assert hub.ranges == [None, f"bytes={kept}-"]


def test_a_checkpoint_is_pulled_without_what_is_not_converted(hub: HubServer, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = {"README.md": b"#", "consolidated.safetensors": b"", "original/params.json": b"{}", "x.gguf": b"GGUF"}
    hub.repos["org/tiny"] = Repo(files | others, small={"config.json", "README.md"})
    pulled = pull_checkpoint("org/tiny")
    assert {path.name for path in pulled.iterdir()} == files.keys()
    assert Checkpoint(pulled).metadata["general.name"] == "tiny"
    hub.repos["org/other"] = Repo(others)
    with pytest.raises(HubError, match=r"org/other has no checkpoint with config.json.*localllm pull org/other"):
        pull_checkpoint("org/other")


def test_convert_downloads_a_checkpoint(
    hub: HubServer, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    hub.repos["org/tiny"] = Repo({path.name: path.read_bytes() for path in folder.iterdir()}, small={"config.json"})
    outcome = run_main(capfdbinary, "convert", "org/tiny", tmp_path / "tiny.gguf", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    with localllm.load(tmp_path / "tiny.gguf", device="reference") as llm:
        assert llm.info.name == "tiny"
