"""Configuration files as released checkpoints write them: no key that changes nothing is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.convert import Checkpoint, MmprojCheckpoint
from tests.localllm.convert.released_forms import IMAGES, TEXTS

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")
from tests.benchmarks.configurations import signature
from tests.models.encoders.families import make
from tests.models.tiny import TINY, make_model, save

_SECTIONS = ("text_config", "vision_config")


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return values


def as_released(folder: Path, keys: dict[str, dict[str, Any]]) -> None:
    """Rewrite a tiny model's files with the keys of a released model."""
    for file, values in keys.items():
        if not file.endswith(".json"):
            continue
        present = read(folder / file)
        if file == "preprocessor_config.json":
            present |= (
                {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
                if (size := present.get("size")) and "min_pixels" in values
                else {}
            )
            present = {name: value for name, value in present.items() if name in values}
            present.pop("image_processor_type", None)
        merged = values | present
        if file == "config.json":
            for section in _SECTIONS:
                if section in merged:
                    merged[section] = keys.get(section, {}) | merged[section]
        (folder / file).write_text(json.dumps(merged), "utf-8")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make(name, folder)
        return folder

    return made


def same(one: Any, other: Any) -> None:
    """Compare two signatures, without the keys that generation_config.json and tokenizer_config.json change."""
    ignored = ("general.", "tokenizer.")
    one, other = ({k: v for k, v in each.items() if not k.startswith(ignored)} for each in (one, other))
    assert one == other


@pytest.mark.parametrize("name", IMAGES)
def test_models_that_see(family: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    folder = family(name)
    encoder, text = signature(MmprojCheckpoint(folder)), signature(Checkpoint(folder))
    released = Path(shutil.copytree(folder, tmp_path / "released"))
    as_released(released, IMAGES[name])
    same(signature(MmprojCheckpoint(released)), encoder)
    same(signature(Checkpoint(released)), text)


@pytest.mark.parametrize("name", ["qwen2.5vl_merger", "qwen2vl_merger", "paddleocr", "hunyuanvl"])
def test_settings_of_the_text_model_beside_the_encoders_section(
    family: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    folder = family(name)
    encoder, text = signature(MmprojCheckpoint(folder)), signature(Checkpoint(folder))
    flat = Path(shutil.copytree(folder, tmp_path / "flat"))
    values = read(flat / "config.json")
    section = values.pop("text_config")
    values = {key: value for key, value in section.items() if key != "model_type"} | values
    (flat / "config.json").write_text(json.dumps(values), "utf-8")
    same(signature(MmprojCheckpoint(flat)), encoder)
    same(signature(Checkpoint(flat)), text)


@pytest.mark.parametrize("name", TEXTS)
def test_text_models(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a", make_model(TINY[name]))
    original = signature(Checkpoint(tmp_path / "a"))
    as_released(tmp_path / "a", TEXTS[name])
    same(signature(Checkpoint(tmp_path / "a")), original)
