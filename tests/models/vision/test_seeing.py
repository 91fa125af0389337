"""Models that see against transformers, from a picture to the ids that are written, through `localllm.load`."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM
from localllm.loading.vision import VisionEncoder
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
        encoder = VisionEncoder.open(folder / "mmproj.gguf")
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
