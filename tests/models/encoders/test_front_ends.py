"""Images in every front end, with a tiny model that sees."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import localllm
from localllm import LLM, web
from localllm.catalog import known_models
from localllm.chat.conversation import Media
from localllm.compat import Llama, Llava15ChatHandler
from localllm.errors import ContextLengthError, LocalLLMError, ModelError, TemplateError, UsageError
from localllm.loading import media_encoder
from localllm.models.encoders.images import open_image
from localllm.server import image_urls
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.http_server import Serving
from tests.helpers.hub_server import Repo, hub_of_this_process
from tests.helpers.images import file_of
from tests.helpers.terminal import Terminal
from tests.localllm.server.test_serve_command import started
from tests.models.encoders.families import Image, make, picture
from tests.models.encoders.test_seeing import TEMPLATE, messages

#: Tokens per image.
N_TOKENS = 4
GREEDY: Any = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a template that renders images, and of its encoder."""
    folder = tmp_path_factory.mktemp("files")
    written = TEMPLATE.replace("MARKER", "<start_of_image>")
    (folder / "chat_template.jinja").write_text(written, encoding="utf-8")
    make("gemma3", folder)
    return folder


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(image: Any) -> str:
    return f"data:image/png;base64,{text_of(file_of(image))}"


def asked(url: str, text: str = "what is it") -> list[Any]:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


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
    assert "an encoder of images for Gemma 3 (gemma3): 4 tokens of 48 values for an image of" in outcome.out
    assert "encoder" in run_main(capfdbinary, "inspect", files / "model.gguf", "--plan").out


def test_the_encoder_of_another_model_is_not_used(files: Path, tmp_path: Path) -> None:
    for name, source in (("alpha", "model"), ("gamma", "model"), ("mmproj-alpha", "mmproj")):
        shutil.copy(files / f"{source}.gguf", tmp_path / f"{name}-Q8_0.gguf")
    with localllm.load(tmp_path / "alpha-Q8_0.gguf", device="cpu", context=64, threads=1) as llm:
        assert llm.accepts_images
    with (
        pytest.warns(
            UserWarning, match=r"gamma-Q8_0\.gguf is loaded without mmproj-alpha-Q8_0\.gguf, which fits but"
        ),
        localllm.load(tmp_path / "gamma-Q8_0.gguf", device="cpu", context=64, threads=1) as llm,
    ):
        assert not llm.accepts_images


def test_an_unsupported_encoder_is_inspected(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "clip", "clip.projector_type": "new"})
    assert "an encoder that localllm cannot run: the projector 'new'" in run_main(capfdbinary, "inspect", path).out


def test_the_command_of_the_documentation(
    llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    page = (ROOT / "docs" / "images.md").read_text("utf-8")
    (command,) = re.findall(r"`localllm (generate .*--image [^`]*)`", page)
    monkeypatch.chdir(files)
    picture(75, 130).save("cat.jpg")
    picture(64, 64).save("dog.png")
    more = ["--image", "dog.png", "-n", "8", "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "-q"]
    outcome = run_main(capfdbinary, *shlex.split(command), *more)
    chat = messages(files / "cat.jpg", files / "dog.png", "What is this?")
    expected = llm.chat(chat, max_tokens=8, temperature=0, ignore_eos=True).text
    assert (outcome.code, outcome.out.rstrip("\n")) == (0, expected)


def test_the_first_minutes_of_an_ollama_user(
    llm: LLM,
    files: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three words download the format that fits, and chat.  Then commands and clients of Ollama use the model."""
    photo = tmp_path / "cat.jpg"
    picture(75, 130).save(photo)
    asked_here = llm.chat(messages(photo, "What is this?"), max_tokens=8, temperature=0, ignore_eos=True).text
    monkeypatch.setattr(known_models, "available_bytes", lambda: 10**10)
    monkeypatch.setenv("LOCALLLM_DATA", str(tmp_path / "data"))
    with hub_of_this_process(tmp_path, monkeypatch) as hub:
        formats = {f"gemma-3-4b-it-{name}.gguf": (files / "model.gguf").read_bytes() for name in ("Q8_0", "Q4_K_M")}
        encoder = {"mmproj-model-f16.gguf": (files / "mmproj.gguf").read_bytes()}
        hub.repos["ggml-org/gemma-3-4b-it-GGUF"] = Repo(formats | encoder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n"), encoding="utf-8"))
        outcome = run_main(capfdbinary, "run", "gemma3", "-n", "2", "--ignore-eos")
        assert outcome.code == 0, outcome.err
        assert "gemma3 is ggml-org/gemma-3-4b-it-GGUF:Q4_K_M on the hub" in outcome.err
        assert "mmproj-model-f16.gguf is next to the model: it lets the model accept images" in outcome.err
        assert outcome.out
    more = ["-n", "8", "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "-q"]
    monkeypatch.chdir(tmp_path)
    for question in ("What is this? ./cat.jpg", "@cat.jpg What is this?"):
        outcome = run_main(capfdbinary, "run", "gemma3", question, *more)  # without the hub
        assert (outcome.code, outcome.out.rstrip("\n")) == (0, asked_here), outcome.err
    assert "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M" in run_main(capfdbinary, "list").out
    assert "gemma3" in run_main(capfdbinary, "show", "gemma3").out
    ollama = pytest.importorskip("ollama")
    flags = ("-q", "--port", 0, "-c", 512, "-t", 1)
    with started(*flags, HF_HOME=tmp_path, HF_HUB_OFFLINE=1) as (_, url), ollama.Client(url) as client:
        assert "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M" in [model.model for model in client.list().models]
        assert "vision" in client.show("gemma3").capabilities
        message = {"role": "user", "content": "What is this?", "images": [photo.read_bytes()]}
        options = {"temperature": 0, "num_predict": 8, "ignore_eos": True}
        assert client.chat("gemma3", [message], options=options).message.content == asked_here
        assert [model.model for model in client.ps().models] == ["ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"]
    outcome = run_main(capfdbinary, "rm", "gemma3", "--yes")
    assert outcome.code == 0, outcome.err
    assert "gemma-3-4b" not in run_main(capfdbinary, "list").out


def test_the_python_of_the_documentation(llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```py\n(llm\..*?)```", (ROOT / "docs" / "images.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(files)
    for name in ("cat.jpg", "one.png", "two.png"):
        picture(40, 50).save(name)
    before = llm.counts.ended
    exec(code, {"llm": llm})
    assert llm.counts.ended == before + 2


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_the_chat_draws_images_in_a_terminal(files: Path, tmp_path: Path) -> None:
    picture(75, 130).save(tmp_path / "cat.jpg")
    picture(64, 64).save(tmp_path / "dog.png")
    terminal = Terminal(tmp_path)
    try:
        terminal.start("chat", str(files / "model.gguf"), "-c", "512", "-n", "2", "-t", "1")
        terminal.sees("Type a message")
        terminal.press(f"@{tmp_path}/cat.jpg @{tmp_path}/dog.png ?", "Enter")
        wanted = "▀▀▀▀", "dog.png · 4 tokens"

        def is_drawn(screen: str) -> bool:
            words = " ".join(screen.replace("▌", " ").split())  # long paths are broken into lines
            return all(each in words for each in wanted)

        terminal.until(is_drawn, f"{wanted}")
    finally:
        terminal.end()


# -- The server ----------------------------------------------------------------------------------------------------


def test_official_clients_send_images(server: Serving) -> None:
    openai, anthropic, ollama = map(pytest.importorskip, ("openai", "anthropic", "ollama"))
    one, data = picture(75, 130), text_of(file_of(picture(75, 130)))
    before = server.llm.counts.encoded
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        chat = client.chat.completions.create(model="demo", messages=asked(data_url(one)), max_tokens=2)
        parts = [{"type": "input_text", "text": "hm"}, {"type": "input_image", "image_url": data_url(one)}]
        given: Any = [{"role": "user", "content": parts}]
        answer = client.responses.create(model="demo", input=given, max_output_tokens=2)
        again = client.responses.create(
            model="demo", input="and?", previous_response_id=answer.id, max_output_tokens=2
        )
    source = {"type": "base64", "media_type": "image/png", "data": data}
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "hm"}]
        said = client.messages.create(model="demo", messages=[{"role": "user", "content": content}], max_tokens=2)
    with ollama.Client(host=server.url) as client:
        message = {"role": "user", "content": "hm", "images": [file_of(one)]}
        told = client.chat("demo", messages=[message], options={"num_predict": 2})
        assert "vision" in client.show("demo").capabilities
        first = client.generate("demo", "hm", images=[file_of(one)], options={"num_predict": 2})
        assert client.generate("demo", "and?", context=first.context, options={"num_predict": 2}).context
    n_tokens = (
        chat.usage.prompt_tokens,
        answer.usage.input_tokens,
        again.usage.input_tokens,
        said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0),
        told.prompt_eval_count,
    )
    assert min(n_tokens) > N_TOKENS
    assert server.llm.counts.encoded == before + 1  # all images are equal


def test_multimodal_data_and_the_reported_capabilities(server: Serving, llm: LLM) -> None:
    image = picture(64, 64)
    prompt = {"prompt_string": "a <__media__> b", "multimodal_data": [text_of(file_of(image))]}
    body = {"prompt": prompt, "n_predict": 3, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=120).json()
    expected = llm.generate("a <__media__> b", images=[image], max_tokens=3, temperature=0, ignore_eos=True)
    assert answer["content"] == expected.text
    assert httpx.get(f"{server.url}/props").json()["modalities"] == {"vision": True, "audio": False}
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["models"]
    assert listed["capabilities"] == ["completion", "multimodal"]
    for bad, words in (
        ({"prompt": {**prompt, "multimodal_data": ["%"]}}, "multimodal_data[0] is not in base64"),
        ({"prompt": {**prompt, "prompt_string": "<__media__><__media__>"}}, "has 1 images, but the prompt contains"),
        ({"prompt": [1, prompt]}, "accepts only text"),
    ):
        refused = httpx.post(f"{server.url}/completion", json=bad)
        assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True)


@contextlib.contextmanager
def pictures_on_the_web(data: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("Location", "http://localhost/cat.png")
                self.end_headers()
                return
            self.send_response(200 if self.path == "/cat.png" else 404)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client stops reading
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as started:
        thread = threading.Thread(target=lambda: started.serve_forever(poll_interval=0.02))
        thread.start()
        yield f"http://127.0.0.1:{started.server_address[1]}"
        started.shutdown()
        thread.join()


def test_addresses_of_allowed_hosts_are_fetched(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(url: str) -> httpx.Response:
        body = {"messages": asked(url), "max_tokens": 1}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    with pictures_on_the_web(file_of(picture(40, 50))) as url:
        assert "127.0.0.1 is not a public host on the Internet" in post(f"{url}/cat.png").json()["error"]["message"]
        monkeypatch.setattr(web, "is_public", lambda address: True)
        assert post(f"{url}/cat.png").status_code == 200
        for path, words in (("/elsewhere", "localhost is not an allowed host"), ("/dog.png", "404")):
            refused = post(url + path)
            assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True)
    with pictures_on_the_web(bytes(5 << 20)) as url:
        assert "is too large" in post(f"{url}/cat.png").json()["error"]["message"]
    assert "example.org is not an allowed host" in post("http://example.org/x.png").json()["error"]["message"]


@contextlib.contextmanager
def slow_host(beginning: bytes) -> Iterator[tuple[str, threading.Semaphore]]:
    """A host that sends a byte now and then, forever: its address, and a semaphore of ended connections."""
    is_over, ended = threading.Event(), threading.Semaphore(0)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(beginning)
            while not is_over.wait(0.02):
                connection.sendall(b"x")
        ended.release()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x.png", ended
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_slow_hosts_stop_nothing(server: Serving, beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "is_public", lambda address: True)

    def post(url: str, timeout: float = 60) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": asked(url)}, timeout=timeout)

    with slow_host(beginning) as (url, ended), ThreadPoolExecutor() as clients:
        with pytest.raises(httpx.ReadTimeout):  # this client disconnects
            post(url, 0.3)
        assert ended.acquire(timeout=30)
        monkeypatch.setattr(image_urls, "MAX_SECONDS", 0.5)
        errors = [answer.json()["error"]["message"] for answer in clients.map(post, 8 * [url])]
        assert all(f"the image at '{url}' cannot be fetched (" in error and "()" not in error for error in errors)
        for _ in errors:
            assert ended.acquire(timeout=30)


# -- Bad input -----------------------------------------------------------------------------------------------------


def test_any_error_of_a_decoder_is_reported_in_a_sentence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail like a GIF file with colours outside its palette: Pillow raises IndexError."""

    def fail(*_: Any) -> None:
        raise IndexError("index out of range")

    data = file_of(picture(8, 8), "GIF")
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.load", fail)
    monkeypatch.setattr("localllm.models.encoders.isolation._interpreter", lambda: None)  # decodes in this process
    with pytest.raises(UsageError, match=r"cannot be read \(index out of range\): the file is damaged"):
        llm.tokenize_chat(messages(data))


def test_odd_images_are_seen(llm: LLM) -> None:
    """Return data URLs with a false type, of several modes, one pixel, a line, and an animation."""
    base = picture(30, 20)
    modes = [file_of(base.convert(mode), "TIFF") for mode in ("1", "L", "P", "CMYK", "RGBA")]
    deep = file_of(Image.fromarray(np.full((9, 9), 40_000, np.uint16)))
    for data in (*modes, deep, file_of(Image.new("RGB", (1, 1))), file_of(Image.new("RGB", (20_000, 1)))):
        ids = llm.tokenize_chat(asked(f"data:text/plain;base64,{text_of(data)}"))
        assert sum(id_ < 0 for id_ in ids) == N_TOKENS
    frames = [picture(20, 20), picture(20, 21).resize((20, 20))]
    gif = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match="is an animation: the model sees its first frame"):
        llm.tokenize_chat(messages(gif))


def test_many_and_large_images_are_refused_within_bounds(llm: LLM, server: Serving) -> None:
    small = file_of(picture(8, 8))
    with pytest.raises(ContextLengthError):
        llm.chat(messages(*[small] * 1000), **GREEDY)
    body = {"messages": [each for _ in range(1000) for each in asked(f"data:;base64,{text_of(small)}")]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    long = b'{"messages": "' + b"A" * (5 << 20)
    assert httpx.post(f"{server.url}/v1/chat/completions", content=long, timeout=60).status_code == 413
    bomb = file_of(Image.new("1", (20_000, 20_000)))
    with pytest.raises(UsageError, match=r"400,?000,?000 pixels"):
        llm.tokenize_chat(messages(bomb))


def test_images_of_a_long_prompt_do_not_all_hold_their_pixels(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [picture(21 + i, 33) for i in range(4)]
    path = tmp_path / "last.png"
    images[-1].save(path)
    chat = messages(*images[:-1], images[0], path)
    llm.forget()
    expected = llm.chat(chat, **GREEDY).ids
    monkeypatch.setattr(media_encoder, "MAX_HELD_BYTES", 2 * 56 * 56 * 3)
    before = llm.counts.encoded
    others = messages("other", *[picture(50 + i, 33) for i in range(4)])
    llm.chat(others, **GREEDY)
    assert llm.counts.encoded == before + 4
    encoder = llm._encoder_of([Media(None)])
    pieces = [Media(image) for image in (*images[:3], images[0], str(path))]
    _, placed = encoder.prompt(pieces, llm.tokenize)
    assert [len(each.media.source.frames) for each in placed] == [1, 1, 0, 1, 0]
    made = encoder.prepare(images[2])
    released = placed[2].media
    np.testing.assert_array_equal(encoder._prepared(released).frames[0], made.frames[0])
    opened, prepare = threading.Event(), encoder.prepare
    monkeypatch.setattr(encoder, "prepare", lambda *given: opened.wait(60) and prepare(*given))
    work = encoder.encode([released])
    assert [next(work) for _ in range(9)] == [None] * 9  # other requests get steps while a file is reopened
    work.close()
    opened.set()
    monkeypatch.undo()
    picture(90, 90).save(path)
    with pytest.raises(UsageError, match="has changed since it was read"):
        encoder._prepared(placed[4].media)
    assert llm.chat(messages(*images[:-1], images[0], images[-1]), **GREEDY).ids == expected


def test_models_and_templates_without_a_place_for_images_refuse(files: Path) -> None:
    blind = localllm.load(files / "model.gguf", device="reference", context=64, mmproj=False)
    with blind, pytest.raises(LocalLLMError, match="was loaded without an encoder of images"):
        blind.chat(messages(picture(8, 8)))
    template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(ModelError, match="is for Gemma 3, but the model is of the architecture 'llama'"):
        localllm.load(mmproj=files / "mmproj.gguf")  # of the demo model
    deaf = localllm.load(files / "model.gguf", device="reference", context=64, chat_template=template)
    with deaf, pytest.raises(TemplateError, match="has no place for images"):
        deaf.chat(messages(picture(8, 8)))


# -- Encoded once --------------------------------------------------------------------------------------------------

IMAGES = [file_of(picture(20 + i, 40)) for i in range(3)]


def ten_turns(reply: Callable[[list[Any]], str]) -> list[list[Any]]:
    """Evaluate a conversation with three images; return it with its first message edited, a branch, and unchanged."""
    chat: list[Any] = []
    for i in range(10):
        chat += messages(f"turn {i}", *([IMAGES[i // 3]] if i in (0, 3, 6) else []))
        chat.append({"role": "assistant", "content": reply(chat)})
    edited = [*messages("another first one", IMAGES[0]), *chat[1:-1]]
    return [edited, [*chat[:6], *messages("a branch", IMAGES[2], IMAGES[0])], chat[:-1]]


def test_ten_turns_an_edit_a_branch_and_a_restart_encode_each_image_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load: Any = {"device": "cpu", "threads": 1, "context": 512}
    opened: list[Any] = []

    def opens(source: Any, where: str) -> Any:
        opened.append(source)
        return open_image(source, where)

    monkeypatch.setattr("localllm.models.encoders.encoder.open_image", opens)
    with localllm.load(files / "model.gguf", **load) as llm:
        chats = ten_turns(lambda chat: llm.chat(chat, **GREEDY).text)
        replies = [llm.chat(each, **GREEDY).text for each in chats]
        assert llm.counts.encoded == 3
        assert [each for each in opened if isinstance(each, bytes)] == IMAGES
        llm.save_prompts(tmp_path / "prompts")
    with localllm.load(files / "model.gguf", **load) as llm:
        llm.load_prompts(tmp_path / "prompts")
        assert [llm.chat(each, **GREEDY).text for each in chats] == replies
        assert llm.counts.encoded == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_server_that_is_started_again_encodes_none_again(files: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "images.md").read_text("utf-8")
    (command,) = re.findall(r"^localllm serve (.*)$", page, re.MULTILINE)
    paths = {"model.gguf": files / "model.gguf", "mmproj-F16.gguf": files / "mmproj.gguf"}
    shown = [paths.get(word, word) for word in shlex.split(command)]
    flags = ("--port", 0, "-q", "-c", 512, "-t", 1, "-np", 1, "--prompt-cache", tmp_path / "prompts")
    written: list[tuple[list[list[Any]], list[str]]] = []
    for n_encoded in (3, 0):
        with started(*shown, *flags) as (process, url):

            def reply(chat: list[Any], url: str = url) -> str:
                body = {"messages": [as_openai(message) for message in chat]} | GREEDY
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
                return str(answer.json()["choices"][0]["message"]["content"])

            chats = written[0][0] if written else ten_turns(reply)
            written.append((chats, [reply(each) for each in chats]))
            counted = re.findall(
                r"^localllm_pictures_encoded_total{.*} (\d+)\.0$", httpx.get(f"{url}/metrics").text, re.M
            )
            assert counted == [str(n_encoded)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert written[0] == written[1]


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of `messages`, with its images as data URLs."""
    if isinstance(message["content"], str):
        return message
    urls = {data: {"url": f"data:image/png;base64,{text_of(data)}"} for data in IMAGES}
    parts = [
        {"type": "image_url", "image_url": urls[part["image"]]} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return message | {"content": parts}
