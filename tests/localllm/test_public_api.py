"""The names that ``import localllm`` provides, and the modules that it loads."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys

import pytest

import localllm
from tests.helpers.data import ROOT

NAMES = """
    LLM ChatTemplate Choice Chunk ClosedError Completion ContextLengthError DeviceError DeviceLostError
    DeviceMemoryError Drafts ExpertReadError GGUFError GGUFFile GrammarError HubError KernelError LocalLLMError
    ModelError ModelInfo ModelNotFoundError NotEnoughMemoryError Options OutputError PromptCacheError QueueFullError
    Sampling Score SettingsError Steering StoreError Stream TemplateError Timings Tokenizer TokenizerError
    UnsupportedArchitectureError Usage UsageError __version__ load
"""
PUBLIC = NAMES.split()
HEAVY = "numpy numba textual jinja2 tokenizers sentencepiece psutil rich cupy gguf"


def test_public_names_are_pinned() -> None:
    assert set(PUBLIC) <= set(dir(localllm))
    submodules = {name.split(".")[1] for name in sys.modules if name.startswith("localllm.")}
    assert {name for name in dir(localllm) if not name.startswith("_")} - submodules == {*PUBLIC} - {"__version__"}


def test_help_names_everything_in_two_screens() -> None:
    lines = pydoc.plain(pydoc.render_doc(localllm)).splitlines()
    assert len(lines) <= 96
    assert set(PUBLIC) - {"__version__"} <= set(re.findall(r"\w+", "\n".join(lines)))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists(name: str) -> None:
    value = getattr(localllm, name)
    assert isinstance(value, str) or value.__name__ == name


def test_every_error_is_public_and_a_localllm_error() -> None:
    from localllm import errors

    values = vars(errors).items()
    found = {name for name, value in values if isinstance(value, type) and issubclass(value, errors.LocalLLMError)}
    assert found <= set(PUBLIC)
    assert found >= {name for name in PUBLIC if name.endswith("Error")}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'localllm' has no attribute 'laod'"):
        localllm.laod  # noqa: B018


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = modules_after("import localllm")
    assert not loaded & {*HEAVY.split()}
    assert {name for name in loaded if name.startswith("localllm.")} == {"localllm.version"}


def test_the_library_needs_neither_numba_nor_jinja2_until_they_are_used() -> None:
    loaded = modules_after("import localllm; localllm.load")
    assert "localllm.llm" in loaded
    assert not loaded & {"numba", "jinja2", "textual", "rich", "cupy", "torch"}


def test_the_former_name_of_the_encoder_works() -> None:
    from localllm.loading import media_encoder, vision

    assert vision.VisionEncoder is media_encoder.MediaEncoder
