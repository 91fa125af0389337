"""Models that see against transformers, from a picture to the ids that are written, through `localllm.load`."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM
from localllm.compat import Llama, Llava15ChatHandler
from localllm.loading.vision import Encoder
from tests.helpers.command_line import run_main
from tests.helpers.gguf_writer import write_gguf
from tests.models.vision.families import FAMILIES, SIZES, make, picture, processor_of, torch

#: A template that writes what families' own ones do for a picture.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
N = 6


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    """Of each family transformers' model, and ours."""
    loaded: list[LLM] = []

    @cache
    def get(name: str, device: str = "reference") -> tuple[Any, LLM]:
        folder = tmp_path_factory.mktemp(name)
        model = make(name, folder)
        encoder = Encoder.open(folder / "mmproj.gguf")
        template = TEMPLATE.replace("MARKER", "".join((encoder.around[0], encoder.marker, encoder.around[1])))
        encoder.close()
        llm = localllm.load(folder / "model.gguf", device=device, context=1024, chat_template=template)
        loaded.append(llm)
        return model, llm

    yield get
    for llm in loaded:
        llm.close()


def messages(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": shown}]


def greedy(model: Any, name: str, ids: list[int], images: list[Any], n: int = N) -> list[int]:
    """What transformers goes on with: in its ids pictures' places have one token."""
    family = FAMILIES[name]
    seen = processor_of(name)(images=images if name != "idefics3" else [images], return_tensors="pt")
    token = next(
        getattr(model.config, key) for key in ("image_token_id", "image_token_index") if hasattr(model.config, key)
    )
    taken = inspect.signature(type(model).forward).parameters
    written = [token if id_ < 0 else id_ for id_ in ids]
    for _ in range(n):
        given = torch.tensor(written)[None]
        mask = (given == token).int()
        more = {key: seen[key] for key in family.arguments}
        if "mm_token_type_ids" in taken:
            more["mm_token_type_ids"] = mask
        if "token_type_ids" in taken:
            more["token_type_ids"] = mask
        with torch.no_grad():
            logits = model(input_ids=given, **more).logits[0, -1]
        written.append(int(logits.argmax()))
    return written[-n:]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_chat_with_pictures_goes_on_as_in_transformers(seeing: Any, name: str, device: str) -> None:
    model, llm = seeing(name, device)
    images = [picture(*size) for size in SIZES[:2]]
    chat = messages("one", images[0], "and two", images[1], "what is it")
    ids = llm.tokenize_chat(chat)
    expected = greedy(model, name, ids, images)
    options: Any = {"max_tokens": N, "temperature": 0, "ignore_eos": True}
    assert list(llm.chat(chat, **options).ids) == expected
    assert llm.counts.encoded == 2
    # From the cache, with something before the pictures edited, and with others' bytes of the same pixels.
    file = io.BytesIO()
    images[0].save(file, "PNG")
    edited = messages("ones", file.getvalue(), "and two", np.asarray(images[1]), "what is it")
    ids = llm.tokenize_chat(edited)
    assert list(llm.chat(edited, **options).ids) == greedy(model, name, ids, images)
    assert llm.counts.encoded == 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a template that writes pictures, and of its encoder."""
    folder = tmp_path_factory.mktemp("files")
    written = TEMPLATE.replace("MARKER", "<start_of_image>")
    (folder / "chat_template.jinja").write_text(written, encoding="utf-8")
    make("gemma3", folder)
    return folder


def data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_llama_cpp_pythons_handlers_are_encoders(files: Path) -> None:
    handler = Llava15ChatHandler(clip_model_path=str(files / "mmproj.gguf"))
    part = {"type": "image_url", "image_url": {"url": data_url(picture(75, 130))}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, part]}]
    with Llama(str(files / "model.gguf"), n_ctx=1024, chat_handler=handler) as llm:
        for _ in range(2):
            llm.create_chat_completion(chat, max_tokens=2)
        assert llm.llm.counts.encoded == 1
        llm.load_state(llm.save_state())
    with pytest.raises(NotImplementedError, match=r"Llama\.from_pretrained fetches the mmproj file"):
        Llava15ChatHandler.from_pretrained("org/repo", filename="*mmproj*")


def test_inspect_shows_what_an_encoder_is_for(files: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "inspect", files / "mmproj.gguf")
    assert "an encoder of pictures for Gemma 3 (gemma3): 4 tokens of 48 values for a picture of" in outcome.out
    assert "sees by" in run_main(capfdbinary, "inspect", files / "model.gguf", "--plan").out


def test_an_encoder_that_is_none_is_inspected(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "clip", "clip.projector_type": "new"})
    assert "an encoder that localllm cannot run: the projector 'new'" in run_main(capfdbinary, "inspect", path).out
