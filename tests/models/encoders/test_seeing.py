"""Models that see, compared with transformers from the image to the generated ids, through `localllm.load`."""

from __future__ import annotations

import contextlib
import inspect
import queue
from collections.abc import Callable, Iterable, Iterator
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
from tests.helpers.images import file_of
from tests.models.encoders.families import FAMILIES, SIZES, make, picture, processor_of, torch

#: A template that renders an image like the families' templates.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
N = 6
#: Tokens per step for chunked prompts.
CHUNK = 80


@contextlib.contextmanager
def loading(made: Callable[[str], tuple[Any, Path]], kind: str) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    """Yield a function that returns transformers' model of a family and this project's, loaded once per device."""
    loaded: list[LLM] = []

    @cache
    def get(name: str, device: str = "reference", step_tokens: int = Backend.step_tokens) -> tuple[Any, LLM]:
        model, folder = made(name)
        encoder = MediaEncoder.open(folder / "mmproj.gguf")
        template = TEMPLATE.replace("MARKER", "".join(encoder.markers[kind])).replace("'image'", f"'{kind}'")
        encoder.close()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Backend, "step_tokens", step_tokens)
            patched.setattr("localllm.kernels.reference._kept_types", lambda cache: [np.dtype(np.float32)] * 2)
            llm = localllm.load(folder / "model.gguf", device=device, context=1024, threads=2, chat_template=template)
        loaded.append(llm)
        return model, llm

    yield get
    for llm in loaded:
        llm.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return make(name, folder), folder

    with loading(made, "image") as get:
        yield get


def messages(*parts: Any, kind: str = "image") -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": kind, kind: p} for p in parts]
    return [{"role": "user", "content": shown}]


def forward(model: Any, name: str, ids: list[int], images: list[Any]) -> NDArray[np.float32]:
    """Return transformers' logits [n, n_vocab]; its ids have an image token at image positions."""
    family = FAMILIES[name]
    seen = processor_of(name)(images=images if name != "idefics3" else [images], return_tensors="pt")
    token = next(
        getattr(model.config, key) for key in ("image_token_id", "image_token_index") if hasattr(model.config, key)
    )
    taken = inspect.signature(type(model).forward).parameters
    given = torch.tensor([token if id_ < 0 else id_ for id_ in ids])[None]
    mask = (given == token).int()
    if name == "gemma3nv":  # the last row of an image is <end_of_image>
        given[0, :-1][(mask[0, :-1] == 1) & (mask[0, 1:] == 0)] = model.config.eoi_token_id
    more = {key: seen[key] for key in family.arguments if key in seen}
    more |= {key: mask for key in ("mm_token_type_ids", "token_type_ids") if key in taken}
    if name == "qwen3vl_merger omni":  # transformers finds images by the token before them, which text contains too
        more["position_ids"] = places(mask[0].tolist(), (seen["image_grid_thw"][:, 1:] // 2).tolist())
    if name == "qwen2.5o":  # transformers finds images by the token before them
        model.config.vision_start_token_id = int(given[0, int(mask.argmax()) - 1])
        more["attention_mask"] = torch.ones_like(given)
    with torch.no_grad():
        found: NDArray[np.float32] = model(input_ids=given, **more).logits[0].numpy()
    return found


def places(is_image: list[int], grids: list[list[int]]) -> Any:
    """Return the positions by time, row and column, [3, 1, n]."""
    found, start, sizes = list[tuple[int, int, int]](), 0, iter(grids)
    while len(found) < len(is_image):
        if not is_image[len(found)]:
            found.append((start,) * 3)
            start += 1
            continue
        rows, columns = next(sizes)
        found += [(start, start + row, start + column) for row in range(rows) for column in range(columns)]
        start += max(rows, columns)
    return torch.tensor(found).T[:, None]


def greedy(model: Any, name: str, ids: list[int], images: list[Any]) -> list[int]:
    written = list(ids)
    for _ in range(N):
        written.append(int(forward(model, name, written, images)[-1].argmax()))
    return written[-N:]


def logits(llm: LLM, ids: list[int], pictures: PromptMedia, first: int) -> tuple[NDArray[np.float32], Request]:
    """Return the logits from position ``first``, and the request for them."""
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
def test_a_chat_with_images_continues_as_in_transformers(seeing: Any, name: str, device: str) -> None:
    model, llm = seeing(name, device)
    images = [picture(*size) for size in SIZES[:2]]
    chat = messages("one", images[0], "and two", images[1], "what is it")
    ids = llm.tokenize_chat(chat)
    expected = greedy(model, name, ids, images)
    options: Any = {"max_tokens": N, "temperature": 0, "ignore_eos": True}
    assert list(llm.chat(chat, **options).ids) == expected
    assert llm.counts.encoded == 2
    # From the cache, after an edit before the image, and with another file of the same pixels.
    edited = messages("ones", file_of(images[0]), "and two", np.asarray(images[1]), "what is it")
    ids = llm.tokenize_chat(edited)
    assert list(llm.chat(edited, **options).ids) == greedy(model, name, ids, images)
    assert llm.counts.encoded == 2


def check_logits(
    llm: LLM,
    chunked: LLM,
    chats: Iterable[tuple[Any, ...]],
    kind: str,
    expect: Callable[[list[int]], Any],
    bound: float,
) -> None:
    """Compare a prompt evaluated at once, in chunks, from the cache, and after the edits of the following chats."""
    for parts in chats:
        ids, media = llm._chat_encoder(None, None, "")(
            read_messages(messages(*parts, kind=kind), may_open_files=True)
        )
        expected = expect(ids)
        stop = len(ids) - 3  # from here, the last run finds the rest in the cache
        for used, first in ((chunked, media.stop), (llm, media.stop), (llm, stop)):
            found, request = logits(used, ids, media, first)
            error = np.abs(found - expected[first:]).max() / np.abs(expected).max()
            assert error < bound, (parts[0], used is chunked, first, error)
        assert request.n_cached > 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("device", "bound"), [("reference", 1e-3), ("cpu", 5e-3)])
def test_logits_are_those_of_transformers(seeing: Any, name: str, device: str, bound: float) -> None:
    (model, llm), chunked = seeing(name, device), seeing(name, device, CHUNK)[1]
    images = [picture(*size) for size in SIZES[:2]]
    chats = [
        ("one", images[0], "and two", images[1], "what is it"),
        ("An", images[0], "and two", images[1], "what is it"),
        ("one", images[0], "or else", images[1], "what is it"),
        ("one", images[0], "and two", images[1], "who was there then"),
    ]
    check_logits(llm, chunked, chats, "image", lambda ids: forward(model, name, ids, images), bound)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["qwen3vl_merger", "gemma3", "hunyuanvl"])
def test_a_gpu_sees(seeing: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the emulator; the CPU encodes images, also for layers on the GPU."""
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
        # The tiny processor gives the image 4 × 3 tokens; a limit of 5 allows 2 × 2 or 2 × 1.
        assert n_prompt(llm) - n_prompt(limited) in (12 - 4, 12 - 2)
