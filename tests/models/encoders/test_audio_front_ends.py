"""Audio in every front end, with a tiny model that hears; and the accepted file formats."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import localllm
from localllm import LLM
from localllm.convert import MmprojCheckpoint
from localllm.errors import LocalLLMError, TemplateError, UnsupportedArchitectureError, UsageError
from localllm.models.encoders.sounds import RATE, decode_audio, open_audio
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.http_server import Serving, demo, serving

pytest.importorskip("transformers", reason="creates the models that hear")
from tests.models.encoders.test_hearing import GREEDY, made, messages, sound
from tests.models.encoders.test_seeing import TEMPLATE

# -- Files ---------------------------------------------------------------------------------------------------------


def file_of(samples: Any, kind: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(("kind", "bound"), [("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 0.2), ("MP3", 0.2)])
def test_files_become_samples(kind: str, bound: float, tmp_path: Path) -> None:
    samples = sound(1.0)
    data = file_of(samples, kind)
    (tmp_path / "a.bin").write_bytes(data)
    for source in (data, tmp_path / "a.bin"):
        found = open_audio(source)
        assert abs(len(found) - len(samples)) < 2400  # MP3 adds silence at both ends
        assert kind == "MP3" or np.abs(found - samples).max() < bound


def test_rates_and_channels() -> None:
    """Compare with soxr applied to the mean of the channels, as librosa does for transformers."""
    soxr = pytest.importorskip("soxr")
    for rate, n in ((8000, 1), (44_100, 2), (48_000, 6), (RATE, 8)):
        t = np.arange(rate * 3) / rate
        channels = np.stack([0.2 * np.sin(2 * np.pi * 440 * (i + 1) * t) for i in range(n)], axis=1)
        found = open_audio(file_of(channels, rate=rate, subtype="FLOAT"))
        expected = soxr.resample(channels.astype(np.float32).mean(axis=1), rate, RATE, quality="HQ")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    ints = (sound(0.1) * 32767).astype(np.int16)
    np.testing.assert_allclose(open_audio(np.stack([ints, ints], axis=1)), ints / 32768, atol=1e-7)


@pytest.mark.parametrize("n_samples", [0, (1 << 36) - 1])
def test_flac_files_of_unknown_or_too_long_length_are_read(n_samples: int) -> None:
    """Programs that write FLAC to a pipe set the number of samples to 0."""
    data = file_of(sound(0.1), "FLAC")
    expected = open_audio(data)
    header = int.from_bytes(data[18:26], "big") >> 36 << 36 | n_samples
    decoded = open_audio(data[:18] + header.to_bytes(8, "big") + data[26:])
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_wav_files_without_a_length_are_read_to_their_end(length: int, tmp_path: Path) -> None:
    """Programs that write WAV to a pipe cannot know the length."""
    data = file_of(sound(0.1))
    expected = open_audio(data)
    position = data.index(b"data") + 4
    data = data[:position] + length.to_bytes(4, "little") + data[position + 4 :]
    (tmp_path / "a.wav").write_bytes(data)
    for source in (data, tmp_path / "a.wav"):
        np.testing.assert_array_equal(open_audio(source), expected)
    assert (tmp_path / "a.wav").read_bytes() == data


def test_errors_of_audio_have_no_addresses_of_objects() -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(Format not recognised\.\)"):
        open_audio(b"no sound")


def test_bad_audio_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = file_of(np.zeros(0, np.float32))
    for source, words in (
        (tmp_path / "none.wav", "is not there: check the path"),
        (tmp_path, "cannot be read"),
        (b"RIFF????WAVE", "cannot be read"),
        (b"", "cannot be read"),
        (empty, "has no samples"),
        (file_of(np.full(99, np.nan, np.float32), subtype="FLOAT"), "samples that are not numbers"),
        (file_of(sound(0.1), "AIFF"), "is AIFF: give a WAV, MP3, FLAC or OGG file"),
        (file_of(sound(0.1), rate=99), "has 99 samples a second"),
        (np.zeros((2, 2, 2), np.float32), "floats or int16 at 16 kHz"),
        (np.zeros(9, np.uint8), "floats or int16 at 16 kHz"),
        (7, "a path, bytes or an array, not int"),
    ):
        with pytest.raises(UsageError, match=words):
            open_audio(source)
    monkeypatch.setattr("localllm.models.encoders.sounds.MAX_SECONDS", 1)
    for long in (sound(1.1), file_of(sound(1.1)), file_of(sound(3.0), "FLAC")):
        with pytest.raises(UsageError, match="is longer than 1 seconds: cut it into parts"):
            open_audio(long)
    # Without a Python interpreter, as in a frozen program, this process decodes the file.
    monkeypatch.setattr("localllm.models.encoders.isolation._interpreter", lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(UsageError, match=r'pip install "localllm\[audio\]"'):
        decode_audio(empty, "the audio")  # in this process, whose modules were changed


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_mutated_files_are_heard_or_refused(kind: str) -> None:
    data, rng = file_of(sound(0.2), kind), np.random.default_rng(len(kind))
    for number in range(60):
        bad = bytearray(data[: len(data) if number % 3 else int(rng.integers(1, len(data)))])
        for place in rng.integers(0, min(len(bad), 200 if number % 2 else len(bad)), 1 + number % 5):
            bad[place] = int(rng.integers(256))
        with contextlib.suppress(UsageError):
            assert np.isfinite(open_audio(bytes(bad))).all()


# -- Front ends ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a template that renders audio, and of its encoder."""
    folder = tmp_path_factory.mktemp("files")
    written = TEMPLATE.replace("MARKER", "[AUDIO]").replace("'image'", "'audio'")
    (folder / "chat_template.jinja").write_text(written, encoding="utf-8")
    made("voxtral", folder)
    return folder


def test_the_command_of_the_documentation(
    llm: LLM, files: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    page = (ROOT / "docs" / "audio.md").read_text("utf-8")
    (command,) = re.findall(r"`localllm (generate .*--audio [^`]*)`", page)
    monkeypatch.chdir(files)
    Path("talk.wav").write_bytes(file_of(sound(1.2)))
    more = ["-n", "4", "--temp", "0", "--ignore-eos", "-c", "512", "-t", "1", "-q"]
    outcome = run_main(capfdbinary, *shlex.split(command), *more)
    content = [{"type": "audio", "audio": "talk.wav"}, {"type": "text", "text": "What do they say?"}]
    expected = llm.chat([{"role": "user", "content": content}], **GREEDY)
    assert (outcome.code, outcome.out.rstrip("\n")) == (0, expected.text)
    plain = llm.generate("<__media__>What do they say?", audio=["talk.wav"], **GREEDY)
    outcome = run_main(capfdbinary, *shlex.split(command), "--no-chat", *more)
    assert (outcome.code, outcome.out.rstrip("\n")) == (0, plain.text)


def test_inspect_shows_what_an_encoder_is_for(files: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "inspect", files / "mmproj.gguf")
    assert "an encoder of audio for Voxtral (voxtral): 380 tokens of 48 values for 30 seconds of" in outcome.out
    assert (
        "MB, 380 tokens for 30 seconds of audio"
        in run_main(capfdbinary, "inspect", files / "model.gguf", "--plan").out
    )


def test_old_names_of_accepted_media_are_deprecated(llm: LLM) -> None:
    with pytest.warns(DeprecationWarning, match="use LLM.accepts_images") as caught:
        assert not llm.sees
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="use LLM.accepts_audio"):
        assert llm.hears


def test_models_and_templates_without_audio_refuse(llm: LLM, files: Path) -> None:
    assert (llm.accepts_audio, llm.accepts_images) == (True, False)
    with pytest.raises(UsageError, match="has no encoder of images, so the model does not accept images"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": np.zeros((8, 8, 3), np.uint8)}]}])
    load: Any = {"device": "reference", "context": 64}
    with (
        localllm.load(files / "model.gguf", mmproj=False, **load) as deaf,
        pytest.raises(LocalLLMError, match="was loaded without an encoder of audio"),
    ):
        deaf.chat(messages(sound(0.1)))
    with (
        localllm.load(files / "model.gguf", chat_template="{{ messages[0].role }}", **load) as mute,
        pytest.raises(TemplateError, match="has no place for audio"),
    ):
        mute.chat(messages(sound(0.1)))
    with pytest.raises(UsageError, match="audio has 1 audio clips, but the prompt contains 2 times <__media__>"):
        llm.generate("<__media__> <__media__>", audio=[sound(0.1)])
    with pytest.raises(UnsupportedArchitectureError, match="whose encoder of images or audio localllm does not"):
        MmprojCheckpoint(_folder_of(files, {"model_type": "llama", "audio_config": {}}))


def _folder_of(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps(values))
    return folder / "other"


# -- The server ----------------------------------------------------------------------------------------------------


def test_official_clients_send_audio(server: Serving, llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    wav = file_of(sound(1.5))
    data, before = base64.b64encode(wav).decode(), server.llm.counts.encoded
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    given: Any = [{"role": "user", "content": [part, {"type": "text", "text": "Transcribe audio to text"}]}]
    options: Any = {"temperature": 0, "max_tokens": 4}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        chat = client.chat.completions.create(model="demo", messages=given, **options)
        answer = client.responses.create(model="demo", input=given, temperature=0, max_output_tokens=4)
        again = client.responses.create(model="demo", input="?", previous_response_id=answer.id, max_output_tokens=2)
        create = partial(client.audio.transcriptions.create, model="demo", extra_body={"max_tokens": 4})
        heard, text = create(file=("a.wav", wav)), create(file=("a.wav", wav), response_format="text")
        events = list(create(file=("a.wav", wav), stream=True))
        other = create(file=("a.wav", wav), language="de", prompt="What\r\n is it", temperature=0.5)
        with pytest.raises(openai.BadRequestError, match="response_format is 'srt', but json and text"):
            create(file=("a.wav", wav), response_format="srt")
        with pytest.raises(openai.BadRequestError, match="the audio in file cannot be read"):
            create(file=("a.wav", wav[:20]))
    expected = llm.chat(messages(wav, "Transcribe audio to text"), max_tokens=4, temperature=0).text
    assert chat.choices[0].message.content == answer.output_text == heard.text == text.rstrip("\n") == expected
    assert "".join(each.delta for each in events[:-1]) == events[-1].text == expected
    assert other.usage.input_tokens > again.usage.input_tokens - 80 > 0
    items = httpx.get(f"{server.url}/v1/responses/{again.id}/input_items").json()["data"]
    assert items[0]["content"][0] == part
    assert server.llm.counts.encoded == before + 1  # all audio is equal


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_of_the_documentation(server: Serving, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "audio.md").read_text("utf-8")
    (command,) = re.findall(r"`(curl [^`]*)`", page)
    (tmp_path / "talk.wav").write_bytes(file_of(sound(0.4)))
    words = shlex.split(command.replace("http://127.0.0.1:8080", server.url))
    done = subprocess.run([*words, "-s", "-F", "max_tokens=2"], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout)["usage"]["output_tokens"] <= 2


def test_multimodal_data_and_the_reported_capabilities(server: Serving, llm: LLM) -> None:
    wav = file_of(sound(0.9), "FLAC")
    prompt = {"prompt_string": "a <__media__> b", "multimodal_data": [base64.b64encode(wav).decode()]}
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=120).json()
    assert answer["content"] == llm.generate("a <__media__> b", audio=[wav], **GREEDY).text
    assert httpx.get(f"{server.url}/props").json()["modalities"] == {"vision": False, "audio": True}
    shown = httpx.post(f"{server.url}/api/show", json={"model": "demo"}).json()
    assert shown["capabilities"][:2] == ["completion", "audio"]
    refused = httpx.post(f"{server.url}/api/generate", json={"prompt": "a", "images": [prompt["multimodal_data"][0]]})
    assert "has no encoder of images, so the model does not accept images" in refused.json()["error"]


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "multipart/form-data; boundary=x", "the form is cut off"),
        (b"--x\r\n\r\n", "multipart/form-data", "the form is cut off"),
        (
            b"--x\r\nContent-Disposition: form-data; name=prompt\r\n\r\na\r\n--x--",
            "multipart/form-data; boundary=x",
            "file",
        ),
        (b'{"file": "%"}', "application/json", "file"),
        (b'{"file": "eA=="}', "application/json", "the audio in file cannot be read"),
    ],
)
def test_bad_forms_are_refused(server: Serving, content: bytes, kind: str, words: str) -> None:
    pytest.importorskip("soundfile")
    headers = {"content-type": kind}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", content=content, headers=headers)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


def test_models_that_do_not_hear_refuse_in_every_api(files: Path) -> None:
    data = base64.b64encode(b"RIFF    WAVE").decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    chat = [{"role": "user", "content": [part]}]
    with serving(demo()) as started:
        for path, body in {
            "/v1/chat/completions": {"messages": chat},
            "/v1/responses": {"input": chat},
            "/v1/messages": {"messages": chat, "max_tokens": 1},
            "/api/chat": {"messages": chat},
            "/completion": {"prompt": {"prompt_string": "", "multimodal_data": [data]}},
            "/v1/audio/transcriptions": {"file": data},
        }.items():
            answer = httpx.post(started.url + path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "was loaded without an encoder of audio" in answer.text, (path, answer.text)
