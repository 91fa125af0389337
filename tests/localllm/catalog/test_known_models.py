"""Models with short names: the table, the names, downloads from a hub on localhost, and the refresh of the table."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.catalog import known_models as module
from localllm.catalog.find import find
from localllm.catalog.hub_names import HubName
from localllm.catalog.known_models import (
    ABILITIES,
    USES,
    KnownModel,
    advice,
    hub_name,
    known_model,
    known_models,
    short_names,
)
from localllm.catalog.listing import find_models
from localllm.catalog.pull import pull
from localllm.errors import ModelNotFoundError, UsageError
from localllm.models.encoders.registry import PROJECTORS
from localllm.models.registry import ARCHITECTURES
from tests import refresh_catalog
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import RawGGUF, key, string
from tests.helpers.hub_server import HubServer, Repo, hub_of_this_process

DEMO = (ROOT / "localllm" / "data" / "demo.gguf").read_bytes()
QWEN = "unsloth/Qwen3.5-4B-GGUF"


def small_gguf(name: str) -> bytes:
    """Return a tiny valid file; its name distinguishes it from others."""
    return bytes(
        RawGGUF(keys=[key("general.architecture", 8, string("llama")), key("general.name", 8, string(name))])
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(module, "available_bytes", lambda: 64 << 30)
    with hub_of_this_process(tmp_path / "home", monkeypatch) as server:
        yield server


# -- The table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_an_entry_is_complete(model: KnownModel) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9.-]+", model.family)
    assert re.fullmatch(r"e?\d+(\.\d+)?[bm]|v\d+(\.\d+)?", model.tag)
    assert model.title
    assert re.fullmatch(r"[a-z0-9.-]+", model.licence)
    assert HubName.parse(model.repository) == HubName(model.repository)
    assert set(model.abilities) <= set(ABILITIES)
    assert set(model.uses) <= set(USES)
    assert set(model.uses) & set(ABILITIES) <= set(model.abilities)
    assert 0 < model.active <= model.parameters < 1000
    assert model.formats
    assert all(re.fullmatch(r"(UD-)?(Q\d_[01]|Q\d_K_[SML]|MXFP4|F16)", format) for format in model.formats)
    bits = [8 * n_bytes / (1e9 * model.parameters) for n_bytes in model.formats.values()]
    assert all(3 < n < 18 for n in bits)  # per parameter; tables of small models take a large share


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_localllm_supports_an_entry(model: KnownModel) -> None:
    assert model.architecture in ARCHITECTURES
    assert ("embeddings" in model.abilities) == (
        ARCHITECTURES[model.architecture].is_encoder or model.family == "qwen3-embedding"
    )
    kinds = {ability.rstrip("s") for ability in model.abilities if ability in ("images", "audio")}
    supported = {p.kind for p in PROJECTORS.values() if model.architecture in p.texts.split()}
    assert kinds <= supported
    assert (model.projector is not None) == bool(kinds)
    assert model.projector is None or 0 < model.projector_bytes < 5e9


def test_names_are_unique() -> None:
    names = Counter(model.name.replace("-", "") for model in known_models())
    assert max(names.values()) == 1
    assert max(Counter(model.repository for model in known_models()).values()) == 1
    families = {model.family for model in known_models()}
    assert len(families) >= 40
    assert Counter(model.family for model in known_models() if model.is_default) == Counter(families)


def test_the_table_has_a_date_and_no_unknown_keys() -> None:
    table = tomllib.loads(refresh_catalog.PATH.read_text(encoding="utf-8"))
    assert isinstance(table["updated"], datetime.date)
    known = {"name", "title", "architecture", "licence", "abilities", "uses", "default", "sizes"}
    of_sizes = {"tag", "repository", "parameters", "active", "formats", "projector"}
    for family in table["models"]:
        assert family.keys() <= known
        for size in family["sizes"]:
            assert size.keys() <= of_sizes | {"architecture", "licence", "abilities"}


@pytest.mark.parametrize("use", USES)
def test_every_use_has_models_of_several_sizes(use: str) -> None:
    assert len([model for model in known_models() if use in model.uses]) >= 3


@pytest.mark.parametrize("use", refresh_catalog.PAGES)
def test_the_documentation_names_the_models(use: str) -> None:
    text = refresh_catalog.PAGES[use].read_text(encoding="utf-8")
    assert refresh_catalog.table(use) in text, "run python -m tests.refresh_catalog --write"


# -- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("qwen3.5:4b", ("qwen3.5:4b", None)),
        ("QWEN3.5:4B", ("qwen3.5:4b", None)),
        ("gemma4", ("gemma4:e4b", None)),
        ("gemma-4:latest", ("gemma4:e4b", None)),
        ("llama3.2", ("llama3.2:3b", None)),
        ("llama3.2:1b-instruct-q4_K_M", ("llama3.2:1b", "Q4_K_M")),
        ("gemma3:12b-it-q8_0", ("gemma3:12b", "Q8_0")),
        ("qwen3.5:35b-a3b", ("qwen3.5:35b", None)),
        ("qwen3.5:q8_0", ("qwen3.5:9b", "Q8_0")),
        ("gpt-oss", ("gpt-oss:20b", None)),
        ("embeddinggemma", ("embeddinggemma:300m", None)),
    ],
)
def test_names_work_as_in_ollama(name: str, meaning: tuple[str, str | None]) -> None:
    known = known_model(name)
    assert known is not None
    assert (known[0].name, known[1]) == meaning


@pytest.mark.parametrize(
    "name",
    ["qwen3.5:5b", "qwen3.5:4b-base", "qwen", "gemma4.gguf", "demo", "org/repo", "./gemma4", "", "qwen3.5:", "ü"],
)
def test_other_names_are_not_short_names(name: str) -> None:
    assert known_model(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3.5:5b", "the tags of qwen3.5 are 0.8b, 2b, 4b, 9b, 27b, 35b"),
        ("qwen3.5:4b-base", "the tags of qwen3.5 are 0.8b"),
        ("lama3.2", "did you mean llama3.2 or"),
        ("lama3.2:1b", "did you mean llama3.2:1b or"),
        ("mistrall", "did you mean mistral"),
    ],
)
def test_similar_names_are_suggested(name: str, words: str) -> None:
    assert (advice(name) or "").startswith(words)


@pytest.mark.parametrize("name", ["xyzzy", "model.gguf", "org/repo", "mistral.gguf", "/tmp/gemma4x"])
def test_nothing_is_suggested_for_other_names(name: str) -> None:
    assert advice(name) is None


def test_memory_chooses_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_model("qwen3.5:27b")
    assert known is not None
    model = known[0]
    default, smaller, larger = model.formats
    assert (default, smaller, larger) == ("Q4_K_M", "Q3_K_M", "Q8_0")
    for available, chosen in ((model.memory(larger), default), (model.memory(default), default)):
        assert model.format_for(available) == chosen
    assert model.format_for(model.memory(default) - 1) == smaller
    assert model.format_for(1) == default  # nothing fits: localllm can keep experts in the file, or swap
    monkeypatch.setattr(module, "available_bytes", lambda: model.memory(smaller))
    assert hub_name("qwen3.5:27b") == HubName(model.repository, smaller)
    assert hub_name("qwen3.5:27b-q8_0") == HubName(model.repository, "Q8_0")
    assert hub_name("org/repo:Q4_0") == HubName("org/repo", "Q4_0")
    assert hub_name("qwen9.9") is None


def test_memory_and_speed_are_estimated_from_bytes() -> None:
    known = known_model("gpt-oss")
    assert known is not None
    model = known[0]
    n_bytes = model.formats["MXFP4"]
    assert model.memory("MXFP4") == pytest.approx(1.1 * n_bytes + 2.5e8)
    assert model.tokens_per_s("MXFP4", 40e9) == pytest.approx(40e9 / (n_bytes * 3.6 / 20.9))


# -- Downloads ------------------------------------------------------------------------------------------------------


def test_a_short_name_is_pulled_with_its_projector_and_found(hub: HubServer) -> None:
    files = {f"Qwen3.5-4B-{quant}.gguf": small_gguf(quant) for quant in ("Q3_K_M", "Q4_K_M", "Q8_0")}
    hub.repos[QWEN] = Repo(files | {"mmproj-F16.gguf": small_gguf("f16"), "mmproj-BF16.gguf": small_gguf("bf16")})
    with pytest.raises(
        ModelNotFoundError, match=r"qwen3\.5:4b is not on this machine: localllm pull qwen3\.5:4b downl"
    ):
        find("qwen3.5:4b")
    path = pull("Qwen3.5:4B")
    assert path.name == "Qwen3.5-4B-Q4_K_M.gguf"
    assert {file.name for file in path.parent.iterdir()} == {path.name, "mmproj-F16.gguf"}
    for name in ("qwen3.5:4b", "qwen3.5:4b-q4_k_m", "QWEN3.5:4b", f"{QWEN}:Q4_K_M"):
        assert find(name) == path
    with pytest.raises(ModelNotFoundError):
        find("qwen3.5:4b-q8_0")
    assert pull("qwen3.5:4b-q8_0").name == "Qwen3.5-4B-Q8_0.gguf"
    assert find("qwen3.5:4b") == path
    assert find("qwen3.5:4b-q8_0").name == "Qwen3.5-4B-Q8_0.gguf"  # type: ignore[union-attr]
    aliases = {model.name: model.aliases for model in find_models().models if model.name.startswith(QWEN)}
    assert aliases == {f"{QWEN}:Q4_K_M": ("qwen3.5:4b",), f"{QWEN}:Q8_0": ("qwen3.5:4b-q8_0",)}


def test_another_format_that_was_downloaded_is_used(hub: HubServer) -> None:
    hub.repos[QWEN] = Repo({"Qwen3.5-4B-Q8_0.gguf": small_gguf("a"), "Qwen3.5-4B-Q4_K_M.gguf": small_gguf("b")})
    path = pull("qwen3.5:4b-q8_0")
    assert find("qwen3.5:4b") == path


def test_drafters_next_to_a_model_are_not_pulled(hub: HubServer) -> None:
    names = ["gemma-4-E4B-it-Q4_K_M.gguf", "mtp-gemma-4-E4B-it.gguf", "mmproj-F16.gguf", "MTP/mtp-gemma-Q4_K_M.gguf"]
    hub.repos["unsloth/gemma-4-E4B-it-GGUF"] = Repo({name: small_gguf(name) for name in names})
    path = pull("gemma4")
    assert sorted(file.name for file in path.parent.iterdir()) == ["gemma-4-E4B-it-Q4_K_M.gguf", "mmproj-F16.gguf"]


def test_a_projector_that_localllm_does_not_support_is_not_pulled(hub: HubServer) -> None:
    names = ["Muse-Glimmer-30B-Q4_K_M.gguf", "mmproj-Muse-Glimmer-30B-f16.gguf"]
    hub.repos["bartowski/Muse-Glimmer-30B-GGUF"] = Repo({name: small_gguf(name) for name in names})
    path = pull("muse-glimmer")
    assert [file.name for file in path.parent.iterdir()] == [names[0]]


def test_unknown_short_names_are_refused_before_a_request(hub: HubServer) -> None:
    with pytest.raises(UsageError, match=r"'qwen3\.5:5b' is not the name of a model on the hub: the tags of qwen"):
        pull("qwen3.5:5b")
    with pytest.raises(UsageError, match=r"'gema4' is not the name of a model on the hub: did you mean gemma4 or"):
        pull("gema4")
    with pytest.raises(ModelNotFoundError, match=r"there is no file or model 'gema4' here: did you mean gemma4 or"):
        find("gema4")
    assert hub.requests == []


def test_run_downloads_a_model_and_answers(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    hub.repos["unsloth/SmolLM2-135M-Instruct-GGUF"] = Repo({"SmolLM2-135M-Instruct-Q8_0.gguf": DEMO})
    outcome = run_main(capfdbinary, "run", "smollm2:135m", "Hello!", "-n", "2")
    assert outcome.code == 0, outcome.err
    assert "smollm2:135m is unsloth/SmolLM2-135M-Instruct-GGUF:Q8_0 on the hub" in outcome.err
    n_requests = len(hub.requests)
    outcome = run_main(capfdbinary, "generate", "-m", "smollm2:135m", "-p", "Hello!", "-n", "2")
    assert outcome.code == 0, outcome.err
    assert len(hub.requests) == n_requests
    outcome = run_main(capfdbinary, "rm", "smollm2:135m", "--yes")
    assert outcome.code == 0, outcome.err
    with pytest.raises(ModelNotFoundError, match="is not on this machine"):
        find("smollm2:135m")


def test_pull_tells_how_a_model_fits(
    hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "unsloth/Qwen3.5-27B-GGUF"
    hub.repos[name] = Repo({f"Qwen3.5-27B-{format}.gguf": DEMO for format in ("Q3_K_M", "Q4_K_M")})
    for gigabytes, format, words in (
        (64, "Q4_K_M", None),
        (17, "Q3_K_M", "Q4_K_M, the default, takes about 19.8 GB"),
        (9, "Q4_K_M", "warning: qwen3.5:27b takes about 19.8 GB of memory in Q4_K_M, and 9 GB is available"),
    ):
        monkeypatch.setattr(module, "available_bytes", lambda n=gigabytes: n * 10**9)
        outcome = run_main(capfdbinary, "pull", "qwen3.5:27b")
        assert outcome.code == 0, outcome.err
        assert f"qwen3.5:27b is {name}:{format} on the hub" in outcome.err
        assert outcome.out.endswith(f"-{format}.gguf\n")
        assert ("takes about" in outcome.err) == (words is not None)
        assert (words or "") in outcome.err


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_the_names_of_a_file_mean_the_file(model: KnownModel) -> None:
    for format in model.formats:
        for name in short_names(model.repository, format):
            known = known_model(name)
            assert known is not None
            assert known[0] is model
            assert (known[1] or model.default_format) == format


# -- The refresh ----------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the table, which the refresh writes."""
    path = tmp_path / "models.toml"
    path.write_text(refresh_catalog.PATH.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(refresh_catalog, "PATH", path)
    page = tmp_path / "images.md"
    page.write_text("# Images\n\n| pull | old |\n|---|---|\n\nMore.\n", encoding="utf-8")
    monkeypatch.setattr(refresh_catalog, "PAGES", {"images": page})
    return path


def test_the_refresh_writes_sizes(hub: HubServer, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = "ggml-org/bge-m3-Q8_0-GGUF"
    about = {"gguf": {"architecture": "bert"}, "tags": ["license:mit", "gguf"]}
    hub.repos[repository] = Repo({"bge-m3-q8_0.gguf": bytes(12_345_678)}, about=about)
    before = table.read_text(encoding="utf-8")
    assert refresh_catalog.main(["bge-m3"]) == 0
    assert table.read_text(encoding="utf-8") == before
    assert refresh_catalog.main(["--write", "bge-m3"]) == 0
    after = table.read_text(encoding="utf-8")
    assert capsys.readouterr().out == "bge-m3:567m: the sizes of the files differ\n" * 2
    changed = [line for line in after.split("\n") if line not in before.split("\n")]
    assert len([line for line in changed if "formats = { Q8_0 = 0.01 }" in line and repository in line]) == 1
    page = refresh_catalog.PAGES["images"].read_text(encoding="utf-8")
    assert page == f"# Images\n\n{refresh_catalog.table('images')}More.\n"
    assert len(changed) == 1 + (f"updated = {datetime.datetime.now(tz=datetime.UTC).date()}" in changed)
    assert [family["name"] for family in tomllib.loads(after)["models"]] == [
        family["name"] for family in tomllib.loads(before)["models"]
    ]


def test_the_refresh_reports_what_needs_a_decision(
    hub: HubServer, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"gguf": {"architecture": "qwen36"}, "tags": ["license:mit"]}
    hub.repos["ggml-org/Qwen3-ASR-0.6B-GGUF"] = Repo({"Qwen3-ASR-0.6B-bf16.gguf": b"x"}, about=about)
    assert refresh_catalog.main(["qwen3-asr"]) == 1
    output = capsys.readouterr().out
    for problem in (
        "qwen3-asr:0.6b: the architecture is qwen36, not qwen3vl",
        "qwen3-asr:0.6b: the licence is mit, not apache-2.0",
        "qwen3-asr:0.6b: ggml-org/Qwen3-ASR-0.6B-GGUF has 0 models in Q8_0",
        "qwen3-asr:0.6b: the projector is None, not mmproj-Qwen3-ASR-0.6B-Q8_0.gguf",
        "qwen3-asr:1.7b: the hub has no repository ggml-org/Qwen3-ASR-1.7B-GGUF",
    ):
        assert problem in output
