"""Models that see against transformers, from a picture to the ids that are written, through `localllm.load`."""

from __future__ import annotations

import inspect
import io
import queue
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import LLM
from localllm.chat.conversation import read_messages
from localllm.engine.media import PromptMedia
from localllm.engine.request import Request
from localllm.kernels.backend import Backend
from localllm.loading.media_encoder import MediaEncoder
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.backends import no_harness
from tests.helpers.gpus import have_gpus
from tests.models.encoders.families import FAMILIES, SIZES, make, picture, processor_of, torch

#: A template that writes what families' own ones do for a picture.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
N = 6
#: Tokens of a step, where prompts come in chunks.
CHUNK = 80


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    """Of each family transformers' model, and ours."""
    loaded: list[LLM] = []

    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return make(name, folder), folder

    @cache
    def get(name: str, device: str = "reference", step_tokens: int = Backend.step_tokens) -> tuple[Any, LLM]:
        model, folder = made(name)
        encoder = MediaEncoder.open(folder / "mmproj.gguf")
        template = TEMPLATE.replace("MARKER", "".join(encoder.markers["image"]))
        encoder.close()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Backend, "step_tokens", step_tokens)
            patched.setattr("localllm.kernels.reference._kept_types", lambda cache: [np.dtype(np.float32)] * 2)
            llm = localllm.load(folder / "model.gguf", device=device, context=1024, chat_template=template)
        loaded.append(llm)
        return model, llm

    yield get
    for llm in loaded:
        llm.close()


def messages(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": shown}]


def forward(model: Any, name: str, ids: list[int], images: list[Any]) -> NDArray[np.float32]:
    """Transformers' logits [n, n_vocab]: in its ids pictures' places have one token."""
    family = FAMILIES[name]
    seen = processor_of(name)(images=images if name != "idefics3" else [images], return_tensors="pt")
    token = next(
        getattr(model.config, key) for key in ("image_token_id", "image_token_index") if hasattr(model.config, key)
    )
    taken = inspect.signature(type(model).forward).parameters
    given = torch.tensor([token if id_ < 0 else id_ for id_ in ids])[None]
    mask = (given == token).int()
    more = {key: seen[key] for key in family.arguments}
    more |= {key: mask for key in ("mm_token_type_ids", "token_type_ids") if key in taken}
    with torch.no_grad():
        found: NDArray[np.float32] = model(input_ids=given, **more).logits[0].numpy()
    return found


def greedy(model: Any, name: str, ids: list[int], images: list[Any]) -> list[int]:
    """What transformers goes on with."""
    written = list(ids)
    for _ in range(N):
        written.append(int(forward(model, name, written, images)[-1].argmax()))
    return written[-N:]


def logits(llm: LLM, ids: list[int], pictures: PromptMedia, first: int) -> tuple[NDArray[np.float32], Request]:
    """Those after the tokens from position ``first`` on, and the request for them."""
    rows: list[NDArray[np.float32]] = []
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    output: Any = SimpleNamespace(
        is_full=False,
        progress=lambda n: None,
        logits=lambda position, some: rows.append(some.copy()),
        flush=lambda: None,
        end=ended.put,
    )
    request = Request(list(ids), output, logits_from=first, media=pictures)
    assert llm._engine is not None
    llm._engine.submit(request)
    if (error := ended.get(timeout=300)) is not None:
        raise error
    return np.concatenate(rows), request


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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("device", "bound"), [("reference", 1e-3), ("cpu", 5e-3)])
def test_logits_are_those_of_transformers(seeing: Any, name: str, device: str, bound: float) -> None:
    """Whole, in chunks, from the cache, and after an edit before and behind the pictures."""
    model, llm = seeing(name, device)
    chunked = seeing(name, device, CHUNK)[1]
    images = [picture(*size) for size in SIZES[:2]]
    chats = {
        "whole": ("one", images[0], "and two", images[1], "what is it"),
        "edited before": ("An", images[0], "and two", images[1], "what is it"),
        "edited between": ("one", images[0], "or else", images[1], "what is it"),
        "edited behind": ("one", images[0], "and two", images[1], "who was there then"),
    }
    for what, parts in chats.items():
        ids, pictures = llm._chat_encoder(None, None, "")(read_messages(messages(*parts), may_open_files=True))
        expected = forward(model, name, ids, images)
        largest = np.abs(expected).max()
        stop = len(ids) - 3  # from which on, the second time, the cache has the rest
        for used, first in ((chunked, pictures.stop), (llm, pictures.stop), (llm, stop)):
            found, request = logits(used, ids, pictures, first)
            error = np.abs(found - expected[first:]).max() / largest
            assert error < bound, (what, used is chunked, first, error)
        assert request.n_cached > 0


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["qwen3vl_merger", "gemma3", "hunyuanvl"])
def test_a_gpu_sees(seeing: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the emulator; pictures are encoded on the CPU, for layers of the GPU, too."""
    model, llm = seeing(name)
    have_gpus(monkeypatch, EmulatedDriver(memory=1 << 29))
    images = [picture(*size) for size in SIZES[:2]]
    chat = messages("one", images[0], "and two", images[1], "what is it")
    given = {"device": "cuda", "context": 256, "chat_template": llm.chat_template.source}
    with localllm.load(llm.info.path, **given) as on_gpu:
        assert on_gpu.info.gpu_bytes
        ids, pictures = on_gpu._chat_encoder(None, None, "")(read_messages(chat, may_open_files=True))
        found, _ = logits(on_gpu, ids, pictures, pictures.stop)
        assert on_gpu.counts.encoded == 2
    expected = forward(model, name, ids, images)
    assert np.abs(found - expected[pictures.stop :]).max() < 1e-2 * np.abs(expected).max()


def test_a_limit_of_tokens_makes_images_smaller(seeing: Any) -> None:
    _, llm = seeing("qwen2vl_merger")
    path, template = llm.info.path, llm.chat_template.source
    parts = [{"type": "image", "image": picture(640, 480)}, {"type": "text", "text": "what"}]

    def n_prompt(model: LLM) -> int:
        return model.chat([{"role": "user", "content": parts}], max_tokens=1).usage.prompt_tokens

    with localllm.load(path, device="reference", context=512, image_max_tokens=5, chat_template=template) as limited:
        # The tiny processor gives the image 4 × 3 tokens; 5 allow 2 × 2, or 2 × 1.
        assert n_prompt(llm) - n_prompt(limited) in (12 - 4, 12 - 2)
