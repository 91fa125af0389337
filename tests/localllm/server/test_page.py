"""The page at / in a headless Chromium with Playwright, if installed."""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import struct
import threading
import wave
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localllm.catalog import known_models
from localllm.server.http import Limits
from localllm.server.keys import KeyFile
from localllm.tui.chat.conversation import Attachment, CallRecord, Conversation, ReplyStats, Window
from localllm.tui.chat.export import from_json, to_json
from tests.helpers import hostile_chats
from tests.helpers.browser_page import (
    CHROMIUM,
    Open,
    ask,
    check_with_axe,
    exported,
    finished,
    imported,
    kept,
    reload,
    requests_of,
)
from tests.helpers.data import ROOT
from tests.helpers.http_server import FAILS, TOOLS_TEMPLATE, Serving, scripted, serving
from tests.helpers.hub_server import HubServer, Repo, hub_of_this_process
from tests.localllm.server.test_keys import key_file, section

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

#: Numbers of models whose long replies take a while.
ENDLESS = "word " * 700

MARKDOWN = """# A title

Some **strong** text with <b>tags</b>, `code` and a [link](https://example.org/a).

| a | b |
|---|--:|
| 1 | 2 |

```python
def double(n):
    return 2 * n  # twice
```

\\(a_1 * b_1 * c\\)
"""

#: Attacks that a model might write.
HOSTILE = """<script>hacked = 1</script><img src=x onerror="hacked=1"><svg/onload=hacked=1>

<iframe src="javascript:parent.hacked=1"></iframe><form action="https://evil.example"><input name=key></form>

[a](javascript:hacked=1) [b](JaVaScRiPt:hacked=1) [c](data:text/html,<script>hacked=1</script>) <javascript:hacked=1>
[d](vbscript:x) [e]("onclick="hacked=1) [f](https://example.org/" onmouseover="hacked=1)

![p](https://evil.example/leak.png) ![p](x" onerror="hacked=1) ![q](data:image/svg+xml,<svg onload=hacked=1>)

<style>*{display:none}</style><link rel=stylesheet href=https://evil.example/x.css><base href="https://evil.example">

```js" onmouseover="hacked=1
</code></pre><script>hacked=1</script>
```

```html
<img src=x onerror=hacked=1></span><script>hacked=1</script>
```

| <img src=x onerror=hacked=1> | <math><mi xlink:href="javascript:hacked=1"> |
|--|--|
| <b id=messages class=danger style="position:fixed"> | `<img src=x onerror=hacked=1>` |

\\(<img src=x onerror=hacked=1>\\) $$</code><script>hacked=1</script>$$

<a id=chat name=models></a><math><mtext><table><mglyph><style><!--</style>
<img title="--&gt;&lt;img src=1 onerror=hacked=1&gt;">

the end
"""

CALLS = '<think>A sum.</think>Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def script(prompt: str) -> str:
    """Return the reply to a prompt, according to words in the last message."""
    last = prompt.rpartition("user:")[2]
    if last.rstrip().endswith("word"):
        return " and the end."
    if "endless" in last:
        return ENDLESS * 6 if "very" in last else ENDLESS
    if "markdown" in last:
        return MARKDOWN
    if "hostile" in last:
        return HOSTILE
    if "deep" in last:
        return ">" * 1500 + "[" * 300
    if "fails" in last:
        return f"Half a reply{FAILS}"
    if "call" in last:
        return "The sum is 2." if "tool: 2" in prompt else CALLS
    if "ponder" in last:
        return f"<think>{ENDLESS}"
    if "thought" in last:
        return "<think>Hm, **well**.</think>So it is."
    return f"Hello <b>you</b>, turn {prompt.count('user:')}."


@pytest.fixture(scope="module")
def actor() -> Iterator[Serving]:
    loader = scripted(script, chat_template=TOOLS_TEMPLATE.replace("<call ", "<tool_call>"), context=8192)
    with serving(loader, names=("first", "second")) as started:
        yield started


@pytest.fixture
def page(open_page: Open, actor: Serving) -> Any:
    return open_page(actor.url)


def change_settings(page: Any, **values: str) -> None:
    page.click("#open-settings")
    page.locator("#settings details").evaluate("each => { each.open = true }")
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        if name in ("theme", "thinking"):
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#settings button[value=save]")


# -- Chatting --------------------------------------------------------------------------------------------------------


def test_a_chat_goes_on_with_the_model_that_was_picked_and_is_there_after_a_reload(page: Any, actor: Serving) -> None:
    page.click("#model")
    page.fill("#model-search", "sec")
    assert page.locator("#model-list button span:first-child").all_inner_texts() == ["second"]
    page.click("#model-list button")
    for turn in (1, 2):
        ask(page, "Hi", turn)
        page.get_by_text(f"Hello <b>you</b>, turn {turn}.").wait_for()
    assert "prompt tokens cached" in page.locator(".stats").last.inner_text()
    assert "tokens/s" in page.locator(".stats").last.inner_text()
    served = actor.models.served["second"]
    assert served.llm is not None
    assert served.n_users == 0
    reload(page)
    page.get_by_text("turn 2.").wait_for()
    page.locator("#model-name", has_text="second").wait_for()
    page.click("#new")
    assert page.locator(".message").count() == 0
    page.go_back()
    page.get_by_text("turn 2.").wait_for()


def test_markdown_is_shown_with_code_that_can_be_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "markdown", 1)
    reply = page.locator(".assistant .markdown").last
    assert reply.locator("h1").inner_text() == "A title"
    assert "<b>tags</b>" in reply.inner_text()
    assert reply.locator("td").last.get_attribute("align") == "right"
    assert reply.locator(".hljs-keyword").first.inner_text() == "def"
    assert reply.locator("[data-math]").inner_text() == "\\(a_1 * b_1 * c\\)"
    link = reply.locator("a")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == ("https://example.org/a", "noopener noreferrer")
    reply.get_by_label("Copy code").click()
    reply.get_by_text("Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == "def double(n):\n    return 2 * n  # twice"


def test_thinking_is_folded(page: Any) -> None:
    ask(page, "thought", 1)
    thinking = page.locator("details.thinking:not([hidden])")
    assert not thinking.get_by_text("Hm").is_visible()
    thinking.locator("summary").click()
    assert thinking.locator("strong").inner_text() == "well"
    assert page.locator(".assistant .markdown").last.inner_text() == "So it is."


def test_a_reader_ends_the_thinking(page: Any, actor: Serving) -> None:
    ask(page, "ponder")
    page.get_by_role("button", name="Answer now").click()
    page.locator(".assistant .content > .markdown", has_text="word word").wait_for()
    assert not page.get_by_role("button", name="Answer now").is_visible()
    page.click("#send")
    actor.wait_until_idle()


def test_a_reply_is_stopped_and_continued(page: Any, actor: Serving) -> None:
    bodies = requests_of(page)
    ask(page, "endless")
    page.get_by_text("word word").wait_for()
    page.click("#send")
    page.locator(".stats", has_text="stopped").wait_for()
    actor.wait_until_idle()
    assert page.get_attribute("#send", "aria-label") == "Send"
    page.get_by_label("Continue").click()
    page.get_by_text("and the end.").wait_for()
    finished(page, 1)
    assert page.locator(".message.assistant").count() == 1
    begun = bodies[1]["messages"][-1]
    assert (begun["role"], bodies[1]["continue_final_message"]) == ("assistant", True)
    assert page.locator(".assistant .markdown").last.inner_text().startswith(begun["content"][:20])


def test_editing_and_regenerating_make_branches(page: Any) -> None:
    ask(page, "One", 1)
    ask(page, "Two", 2)
    page.locator(".message.user").first.get_by_label("Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Other")
    page.keyboard.press("Enter")
    page.locator(".message.user", has_text="Other").wait_for()
    finished(page, 1)
    assert page.locator(".message").count() == 2
    page.get_by_label("Regenerate").click()
    page.locator(".assistant .branches", has_text="2/2").wait_for()
    finished(page, 1)
    page.locator(".user").get_by_label("Previous branch").click()
    page.locator(".message.user", has_text="Two").wait_for()
    assert page.locator(".message").count() == 4
    page.locator(".user").get_by_label("Next branch").click()
    page.locator(".assistant .branches", has_text="2/2").wait_for()


def test_a_reply_is_edited(page: Any) -> None:
    bodies = requests_of(page)
    ask(page, "One", 1)
    page.get_by_label("Edit reply").click()
    page.get_by_role("textbox", name="Edit").fill("I was **edited**.")
    page.get_by_role("button", name="Keep").click()
    page.locator("strong", has_text="edited").last.wait_for()
    ask(page, "Two", 2)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "I was **edited**."}


@pytest.mark.filterwarnings("ignore:this chat template has no switch for thinking")
def test_settings_hold_for_one_chat(page: Any) -> None:
    bodies = requests_of(page)
    change_settings(page, system="Be brief.", temperature="0.25", max_tokens="5", stop="x\ny", thinking="false")
    ask(page, "Hi")
    page.locator(".stats", has_text="maximum length").wait_for()
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.25, "max_tokens": 5, "stop": ["x", "y"]}
    assert {name: bodies[0][name] for name in wanted} == wanted
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    reload(page)
    page.locator("#marks", has_text="system prompt · no thinking").wait_for()
    page.click("#new")
    ask(page, "Hi", 1)
    assert len(bodies[1]["messages"]) == 1
    assert "temperature" not in bodies[1]
    page.click("#open-settings")
    page.locator("#settings details").evaluate("each => { each.open = true }")
    page.fill("#settings [name=json_schema]", "[1")
    page.click("#settings button[value=save]")
    assert page.locator("#settings .error").inner_text() == "The JSON schema is not a JSON object."


def test_replies_follow_a_schema(page: Any) -> None:
    change_settings(page, json_schema='{"type": "object", "properties": {"n": {"type": "integer"}}}')
    ask(page, "Hi", 1)
    assert json.loads(page.locator(".assistant pre").inner_text()) == {"n": 3}
    assert page.locator(".hljs-number").inner_text() == "3"


def test_tool_calls_are_shown_and_take_results(page: Any) -> None:
    bodies = requests_of(page)
    change_settings(page, tools=json.dumps(TOOLS))
    ask(page, "call it", 1)
    page.get_by_text("Tool add").wait_for()
    assert json.loads(page.locator(".call pre").inner_text()) == {"a": 1}
    page.get_by_label("Result of add").fill("2")
    page.get_by_role("button", name="Send result").click()
    page.get_by_text("The sum is 2.").wait_for()
    call, result = bodies[1]["messages"][-2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (call["reasoning_content"], call["content"]) == ("A sum.", "Well.")
    assert (result["role"], result["content"]) == ("tool", "2")


# -- Files -----------------------------------------------------------------------------------------------------------

#: A red pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)

PUT = """([kind, data, type = "image/png"]) => {
    const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), each => each.charCodeAt(0));
    transfer.items.add(new File([bytes], `${kind}.${type.slice(6)}`, {type}));
    const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true})
        : new DragEvent("drop", {dataTransfer: transfer, bubbles: true});
    document.getElementById("text").dispatchEvent(event);
}"""


def takes(page: Any, *modalities: str) -> list[dict[str, Any]]:
    """Make the page believe that the model sees or hears; record and answer chat completions."""
    page.route("**/props?*", lambda route: route.fulfill(json={"modalities": dict.fromkeys(modalities, True)}))
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        chunk = {"choices": [{"delta": {"content": "Red."}, "finish_reason": "stop"}], "timings": {"predicted_n": 1}}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    reload(page)
    return bodies


def test_images_come_by_file_paste_and_drop_where_the_model_sees(page: Any) -> None:
    photo = io.BytesIO()
    Image.new("RGB", (30, 20)).save(photo, "JPEG")
    file = {"name": "file.jpg", "mimeType": "image/jpeg", "buffer": photo.getvalue()}
    ask(page, "Hi", 1)
    page.set_input_files("#file", file)
    page.locator("#notice", has_text="file.jpg is not attached: first does not accept images.").wait_for()

    bodies = takes(page, "vision")
    page.locator("#attach[title='Attach files and images']").wait_for()
    page.set_input_files("#file", file)
    for n, kind in enumerate(("paste", "drop"), 2):
        page.locator("#attached img").nth(n - 2).wait_for()
        page.evaluate(PUT, [kind, base64.b64encode(PNG).decode()])
    page.locator("#attached img").nth(2).wait_for()
    page.get_by_label("Remove drop.png").click()
    ask(page, "Which colour?", 2)
    first, second, text = bodies[0]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "Which colour?"}
    assert first["image_url"]["url"].startswith("data:image/jpeg;base64,/9j/")
    assert second["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    reload(page)
    page.locator(".user .pictures img").nth(1).wait_for()
    read = from_json(exported(page, "json"))  # like the terminal's chat
    assert [each.picture[:4] for each in read.path()[2].attachments] == [b"\xff\xd8\xff\xe0", b"\x89PNG"]
    imported(page, to_json(read))
    page.locator("#chats a").nth(1).wait_for()
    page.locator(".user .pictures img").nth(1).wait_for()
    assert "![paste.png](data:image/png;base64,iVBOR" in exported(page, "markdown")


def wav(seconds: float, rate: int = 16000, n_channels: int = 1) -> bytes:
    """Return an audio file: 440 Hz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(n_channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        samples = [int(9000 * math.sin(2 * math.pi * 440 * i / rate)) for i in range(int(seconds * rate))]
        writer.writeframes(b"".join(struct.pack("<h", each) * n_channels for each in samples))
    return file.getvalue()


def sound_of(part: dict[str, Any]) -> tuple[int, int, float]:
    """Return the channels, the rate and the seconds of an audio part in WAV."""
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"], validate=True))) as read:
        assert any(read.readframes(read.getnframes()))
        return read.getnchannels(), read.getframerate(), read.getnframes() / read.getframerate()


def test_audio_comes_by_file_drop_and_microphone_where_the_model_hears(page: Any) -> None:
    small = wav(0.5)
    file = {"name": "talk.wav", "mimeType": "audio/wav", "buffer": small}
    ask(page, "Hi", 1)
    page.set_input_files("#file", file)
    page.locator("#notice", has_text="talk.wav is not attached: first does not accept audio.").wait_for()
    assert not page.locator("#record").is_visible()

    bodies = takes(page, "audio")
    page.locator("#attach[title='Attach files and audio']").wait_for()
    page.set_input_files("#file", {**file, "name": "bad.wav", "buffer": b"none"})
    page.locator("#notice", has_text="bad.wav is not attached: this browser cannot read the audio.").wait_for()
    page.set_input_files("#file", {"name": "red.png", "mimeType": "image/png", "buffer": PNG})
    page.locator("#notice", has_text="red.png is not attached: first does not accept images.").wait_for()
    page.set_input_files("#file", file)
    page.locator("#attached", has_text="talk.wav").wait_for()
    page.evaluate(PUT, ["drop", base64.b64encode(wav(30, 44100, 2)).decode(), "audio/wav"])
    page.locator("#attached", has_text="drop.wav").wait_for()
    page.get_by_label("Record audio").click()
    page.get_by_label("Stop recording").wait_for()
    page.wait_for_timeout(1200)  # it beeps once a second
    page.get_by_label("Stop recording").click()
    page.locator("#attached", has_text="recording.wav").wait_for()
    page.get_by_label("Record audio").wait_for()
    ask(page, "What is it?", 2)
    first, second, third, text = bodies[0]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert base64.b64decode(first["input_audio"]["data"]) == small
    assert sound_of(second) == (1, 16000, pytest.approx(30, abs=0.01))  # from 5 MB, like from 1
    assert sound_of(third)[:2] == (1, 16000)
    assert sound_of(third)[2] > 0.5
    reload(page)
    page.locator(".user audio").nth(2).wait_for()
    assert page.locator(".user audio").first.evaluate(PLAYS) == pytest.approx(0.5, abs=0.01)
    read = from_json(exported(page, "json"))  # like the terminal's chat
    assert [each.is_sound for each in read.path()[2].attachments] == [True] * 3
    imported(page, to_json(read))
    page.locator("#chats a").nth(1).wait_for()
    page.locator(".user audio").nth(2).wait_for()
    assert "\n[talk.wav](data:audio/wav;base64,UklGR" in exported(page, "markdown")
    takes(page, "vision")
    page.locator("#attach[title='Attach files and images']").wait_for()
    assert not page.locator("#record").is_visible()


#: Seconds of audio that the browser can play.
PLAYS = """async sound => {
    if (!sound.duration) await new Promise(resolve => sound.addEventListener("loadedmetadata", resolve));
    return sound.duration;
}"""


def test_texts_are_attached(page: Any) -> None:
    bodies = requests_of(page)
    page.set_input_files("#file", [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"some ``` text\n"}])
    page.locator("#attached", has_text="a.txt").wait_for()
    page.set_input_files("#file", [{"name": "b.bin", "mimeType": "", "buffer": b"\xff\0"}])
    page.locator("#notice", has_text="b.bin is not attached: it is not text, an image or audio.").wait_for()
    ask(page, "Read it", 1)
    assert bodies[0]["messages"][0]["content"] == "File `a.txt`:\n````\nsome ``` text\n````\n\nRead it"


# -- Chats -----------------------------------------------------------------------------------------------------------


def test_chats_are_found_by_what_was_said(page: Any) -> None:
    for text in ("About apples", "About pears"):
        ask(page, text, 1)
        page.click("#new")
    page.fill("#search", "PEARS")
    page.locator("#chats a", has_text="About apples").wait_for(state="detached")
    page.click("#chats a")
    page.locator(".message.user", has_text="About pears").wait_for()
    page.fill("#search", "nothing such")
    page.get_by_text("No chat matches.").wait_for()


def test_chats_are_renamed_and_deleted(page: Any) -> None:
    ask(page, "Hi", 1)
    page.once("dialog", lambda dialog: dialog.accept("A better title"))
    page.click("#chat-menu")
    page.click("[data-do=rename]")
    page.locator("#chats a", has_text="A better title").wait_for()
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chat-menu")
    page.click("[data-do=delete]")
    page.get_by_text("Chats appear here.").wait_for()
    ask(page, "very endless")  # still running after the deletion, also on a slow machine
    page.get_by_text("word word").wait_for()
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#chat-menu")
    page.click("[data-do=delete]")
    kept(page, "The reply ended.")
    reload(page)
    page.get_by_text("Chats appear here.").wait_for()


def test_the_terminal_s_chat_takes_exported_chats_and_gives_them_back(page: Any) -> None:
    change_settings(page, system="Be brief.", temperature="0.5")
    ask(page, "thought", 1)
    page.get_by_label("Regenerate").click()
    page.locator(".assistant .branches", has_text="2/2").wait_for()
    finished(page, 1)
    read = from_json(exported(page, "json"))
    assert (read.title, read.system, read.settings) == ("thought", "Be brief.", {"temperature": 0.5})
    user, reply = read.path()
    assert (reply.thinking, reply.content, len(read.children(user.id))) == ("Hm, **well**.", "So it is.", 2)
    assert reply.stats is not None
    assert reply.stats.new_tokens > 0
    assert "## Assistant" in exported(page, "markdown")

    mine = Conversation(title="From the terminal", system="Be kind.")
    mine.add("user", "A question")
    mine.add("assistant", "[THINK]I see[/THINK]An answer", state="stopped")
    imported(page, to_json(mine))
    page.locator("#chats a", has_text="From the terminal").wait_for()
    page.locator(".assistant .markdown", has_text="An answer").wait_for()
    page.locator("details.thinking:not([hidden]) summary").click()
    page.get_by_text("I see").wait_for()
    page.get_by_label("Continue").wait_for()


def test_all_chats_are_exported_and_imported(open_page: Open, actor: Serving) -> None:
    page = open_page(actor.url)
    for text in ("One", "Two"):
        ask(page, text, 1)
        page.click("#new")
    text = exported(page, "all")
    other = open_page(actor.url)
    imported(other, text)
    other.get_by_text("2 chats are imported.").wait_for()
    assert sorted(other.locator("#chats a").all_inner_texts()) == ["One", "Two"]
    imported(other, text.replace('"user"', '"system"'))
    other.locator("#notice", has_text="it.messages[0].role is none of assistant, user").wait_for()


#: Files that the terminal's chat rejects and a browser accepts: JavaScript allows half a character.
TAKEN = {"half a character", r'arguments {"a": "\u'}

READ = """text => {
    try { return [null, JSON.stringify(readChats(text)[0].exported)]; }
    catch (error) { return [error.message, null]; }
}"""


def test_the_page_refuses_the_files_that_the_terminal_s_chat_refuses(page: Any) -> None:
    for name, (text, _) in hostile_chats.HOSTILE.items():
        if isinstance(text, str) and name not in TAKEN:
            complaint, _ = page.evaluate(READ, text)
            assert complaint, name
            assert len(complaint) < 500


def test_the_page_reads_what_the_terminal_s_chat_writes(page: Any) -> None:
    chat = Conversation(title="Kitchen", settings={"temperature": 0.5, "max_tokens": None, "json_schema": {"a": 1}})
    question = chat.add("user", "How long?", attachments=(Attachment("a.md", "x", 5),))
    calls = (CallRecord("add", '{"a": 1}', "2"),)
    reply = chat.add("assistant", "Eight.", stats=ReplyStats(5, 3, 2, 0.5, 9.0, "M"), calls=calls)
    chat.update(reply.id, window=Window(question.id, "cooking"))
    complaint, values = page.evaluate(READ, to_json(chat))
    assert complaint is None
    read = from_json(values)
    assert [(m.text, m.stats, m.calls, m.attachments) for m in read.messages] == [
        (m.text, m.stats, m.calls, m.attachments) for m in chat.messages
    ]
    assert (read.title, read.settings) == (chat.title, chat.settings)


def test_nothing_in_a_file_takes_the_place_of_messages(page: Any) -> None:
    mine = json.loads(to_json(Conversation(title="Mine")))
    imported(page, json.dumps(mine | {"settings": {"messages": [{"role": "user", "content": "evil"}]}}))
    page.locator("#notice", has_text="it.settings has an unknown messages").wait_for()
    bodies = requests_of(page)
    page.evaluate("""() => { chat.settings = {messages: [], model: "evil", stream: false, temperature: .5}; }""")
    ask(page, "Hi", 1)
    assert bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert (bodies[0]["model"], bodies[0]["stream"], bodies[0]["temperature"]) == ("first", True, 0.5)


def test_the_edit_box_sends_with_the_key_of_the_composer(page: Any) -> None:
    ask(page, "One", 1)
    page.locator(".message.user").get_by_label("Edit").click()
    box = page.get_by_role("textbox", name="Edit")
    box.fill("Other")
    box.press("Shift+Enter")
    page.keyboard.type("line")
    assert box.input_value() == "Other\nline"
    box.press("Enter")
    page.locator(".user .branches", has_text="2/2").wait_for()
    finished(page, 1)
    assert page.locator(".message.user").inner_text().startswith("Other\nline")


@pytest.mark.parametrize("path", ["/llm/", "/llm"])
def test_the_page_works_below_a_prefix(open_page: Open, path: str) -> None:
    with serving(scripted(script), names=("first",), limits=Limits(prefix="/llm")) as prefixed:
        page = open_page(prefixed.url + path)
        ask(page, "Hi", 1)
        page.get_by_text("turn 1.").wait_for()
        ask(page, "thought", 2)
        reload(page)
        page.get_by_text("turn 1.").wait_for()


def test_a_client_s_key_is_enough_for_the_page(browser: Any, tmp_path: Path) -> None:
    path = key_file(tmp_path, section("mine", models=["second"]))
    with serving(scripted(script), names=("first", "second"), limits=Limits(keys=KeyFile(path))) as locked:
        page = browser.new_page()
        page.goto(f"{locked.url}/#key=mine")
        page.locator("#model-name", has_text="second").wait_for()
        ask(page, "Hi", 1)
        page.get_by_text("turn 1.").wait_for()
        assert not any(page.locator(".error").all_inner_texts())
        page.close()


# -- Markdown that is expensive to draw ------------------------------------------------------------------------------

#: Milliseconds of ten redraws of a growing text.
DRAW = """text => {
    const element = document.createElement("div"), begun = performance.now();
    for (let i = 0; i < 10; i++) showMarkdown(element, text + "x".repeat(i), true);
    return performance.now() - begun;
}"""


@pytest.mark.parametrize(
    "part", ["\\[ ", "$$a", "\\[ \n", "$$a\n", "\\( ", "\\[ \n\n", "*a* ", "[a](", "![", "- a\n", ">", "|"]
)
def test_markdown_is_drawn_in_a_bounded_time(page: Any, part: str) -> None:
    assert page.evaluate(DRAW, part * (20_000 // len(part))) < 60_000  # about a second


def test_a_table_of_millions_of_cells_stays_text(page: Any) -> None:
    table = "|a" * 1000 + "|\n" + "|-" * 1000 + "|\n" + "|\n" * 8000
    assert page.evaluate(DRAW, table) < 60_000


FORMULAS = {
    "\\[ x_1 * y_1 * z \\]": ["\\[ x_1 * y_1 * z \\]"],
    "a \\(x_1\\) b $$y_2$$": ["\\(x_1\\)", "$$y_2$$"],
    "a\n\\[\nx\n\\]\nb": ["\\[\nx\n\\]"],
    "$$\nx\n\ny\n$$": ["$$\nx\n\ny\n$$"],
    "it costs $$5": [],
    "\\[ open": [],
    "\\( x\ny \\)": [],
    f"\\[ {'x' * 3000} \\]": [],
}

SHOW = """text => {
    const element = document.createElement("div");
    showMarkdown(element, text);
    return [...element.querySelectorAll("[data-math]")].map(each => each.textContent);
}"""


@pytest.mark.parametrize(("text", "formulas"), FORMULAS.items())
def test_formulas(page: Any, text: str, formulas: list[str]) -> None:
    assert page.evaluate(SHOW, text) == formulas


#: The HTML of a text that arrived in chunks, and of the complete text.
STREAM = """([text, lengths]) => {
    const one = document.createElement("div"), other = document.createElement("div");
    for (const length of lengths) showMarkdown(one, text.slice(0, length), true);
    showMarkdown(one, text);
    showMarkdown(other, text);
    return [one.innerHTML, other.innerHTML];
}"""


@pytest.mark.parametrize(
    "text", [MARKDOWN * 3, "- a\n- b\n\n  c\n\n1. d\n\n\n    code\n\ntext [a] b\n\n> q\nr\n\n[a]: http://b.c\n"]
)
def test_a_text_in_pieces_is_drawn_as_a_whole_one(page: Any, text: str) -> None:
    for step in (1, 3, 7, 50):
        one, other = page.evaluate(STREAM, [text, list(range(0, len(text), step))])
        assert one == other


def test_a_browser_that_keeps_nothing_has_chats_as_long_as_the_page(page: Any) -> None:
    page.add_init_script("indexedDB.open = () => { throw new DOMException('', 'SecurityError') }")
    reload(page)
    page.locator("#notice", has_text="This browser keeps no chats").wait_for()
    ask(page, "One", 1)
    page.click("#new")
    ask(page, "Two", 1)
    page.locator("#chats a", has_text="One").click()
    page.locator(".message.user", has_text="One").wait_for()


def test_two_tabs_show_the_same_chat(page: Any) -> None:
    ask(page, "One", 1)
    other = page.context.new_page()
    other.goto(page.url)
    other.locator(".message.user", has_text="One").wait_for()
    ask(other, "Two", 2)
    page.get_by_text("turn 2.").wait_for()


def test_a_thousand_messages(page: Any) -> None:
    chat = Conversation(title="Long")
    for number in range(500):
        chat.add("user", f"Question {number}")
        chat.add("assistant", f"Answer **{number}**\n\n```python\nprint({number})\n```")
    imported(page, to_json(chat))
    page.locator("strong", has_text="499").wait_for()
    assert page.locator(".message").count() == 60
    page.get_by_role("button", name="Show earlier messages (940)").click()
    assert page.locator(".message").count() == 120
    change_settings(page, max_tokens="3")
    bodies = requests_of(page)
    ask(page, "And now?")
    page.locator(".assistant .error", has_text="context").wait_for()
    assert len(bodies[0]["messages"]) == 1001
    page.get_by_role("button", name="Leave out").click()
    page.locator(".stats", has_text="maximum length").wait_for()
    assert len(bodies[-1]["messages"]) < 600
    assert page.locator(".assistant .error p").count() == 0
    page.fill("#search", "question 7\n")
    page.locator("#chats small", has_text="question 7").wait_for()


# -- Servers that fail -----------------------------------------------------------------------------------------------


def test_an_error_is_shown_and_the_rest_of_the_chat_goes_on(page: Any) -> None:
    ask(page, "fails")
    page.locator(".error", has_text="see the server's log").wait_for()
    page.get_by_text("Half a reply").wait_for()
    page.get_by_label("Regenerate").wait_for()
    ask(page, "Hi", 2)
    page.get_by_text("turn 2.").wait_for()


class Wire:
    """Forwards connections to a server until it is cut."""

    def __init__(self, port: int) -> None:
        self._to, self._open = port, list[socket.socket]()
        self.port = 0
        self.mend()

    def mend(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def cut(self) -> None:
        for each in (self._listening, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                ends = listening.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._open += ends
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


def test_a_server_that_dies_in_the_middle_of_a_reply(open_page: Open, actor: Serving) -> None:
    wire = Wire(actor.port)
    page = open_page(f"http://127.0.0.1:{wire.port}")
    ask(page, "very endless")  # still running at the cut, also on a slow machine
    page.get_by_text("word word").wait_for()
    wire.cut()
    page.locator(".error", has_text="The connection to the server ended before the reply did.").wait_for()
    page.locator("#notice", has_text="The server does not answer.").wait_for()
    assert page.locator(".assistant .markdown").last.inner_text().startswith("word word")
    wire.mend()
    page.locator("#notice").wait_for(state="hidden")
    page.get_by_label("Continue").click()
    page.get_by_text("and the end.").wait_for()
    kept(page, "The reply is complete.")
    reload(page)
    page.get_by_text("and the end.").wait_for()
    assert not any(page.locator(".error").all_inner_texts())
    wire.cut()


def test_a_key_is_asked_for_or_comes_in_the_address(browser: Any) -> None:
    with serving(scripted(script), limits=Limits(api_keys=("k 1",))) as locked:
        page = browser.new_page()
        page.goto(locked.url)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.locator("#key-dialog .error", has_text="not accepted").wait_for()
        page.fill("#key", "k 1")
        page.press("#key", "Enter")
        ask(page, "Hi", 1)
        page.close()
        page = browser.new_page()
        page.goto(f"{locked.url}/#key=k%201")
        ask(page, "Hi", 1)
        assert "k%201" not in page.url
        page.close()
        page = browser.new_page()  # the address without the key first, then with it in the same tab
        page.goto(locked.url)
        page.locator("#key-dialog").wait_for()
        page.goto(f"{locked.url}/#key=k%201")
        page.locator("#key-dialog").wait_for(state="hidden")
        ask(page, "Hi", 1)
        assert "k%201" not in page.url
        page.close()


def test_loading_shows_its_progress(browser: Any) -> None:
    goes_on, load = threading.Event(), scripted(script)

    def slow(source: str | None, progress: Any, planned: Any) -> Any:
        progress("weights", 42, 100)
        goes_on.wait(30)
        return load(source, progress, planned)

    with serving(slow) as server:
        page = browser.new_page()
        page.goto(server.url)
        ask(page, "Hi")
        page.get_by_text("Loading the model, 42 %").wait_for()
        page.locator("#model-state", has_text="loading 42 %").wait_for()
        assert page.locator("#load-progress").get_attribute("value") == "0.42"
        goes_on.set()
        page.get_by_text("turn 1.").wait_for()
        page.locator("#load-progress").wait_for(state="hidden")
        page.close()


# -- Hostile output --------------------------------------------------------------------------------------------------

INSIDE = """() => {
    const all = [...document.querySelectorAll("#messages *")];
    const written = [...document.querySelectorAll("#messages .markdown *")];
    return {
        hacked: typeof hacked,
        tags: [...new Set(all.map(each => each.localName))],
        attributes: [...new Set(all.flatMap(each => each.getAttributeNames()))],
        links: all.filter(each => each.href && each.localName === "a").map(each => new URL(each.href).protocol),
        classes: [...new Set(written.flatMap(each => [...each.classList]))],
    };
}"""


def test_hostile_markdown_stays_text(page: Any) -> None:
    ask(page, "hostile", 1)
    page.get_by_text("the end").wait_for()
    page.wait_for_timeout(200)
    found = page.evaluate(INSIDE)
    assert found["hacked"] == "undefined"
    forbidden = {"script", "iframe", "form", "input", "style", "link", "base", "math", "img", "object", "meta"}
    assert not forbidden & set(found["tags"])
    assert not [name for name in found["attributes"] if name.startswith("on") or name == "style"]
    assert set(found["links"]) <= {"https:", "http:", "mailto:"}
    assert "danger" not in found["classes"]
    assert page.locator("#messages").count() == 1
    assert page.evaluate("() => getComputedStyle(document.body).display") == "grid"


def test_markdown_that_is_nested_without_end_is_shown_as_it_is(page: Any) -> None:
    ask(page, "deep", 1)
    assert "[[[[" in page.locator(".assistant .markdown").last.inner_text()


def test_scripts_that_are_not_the_page_s_do_not_run(page: Any) -> None:
    blocked = """() => { const element = document.createElement("script"); %s; document.body.append(element); }"""
    with pytest.raises(playwright.Error, match="TrustedScript"):
        page.evaluate(blocked % "element.text = 'hacked = 1'")
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        page.evaluate("() => { document.body.innerHTML = '<img src=x onerror=hacked=1>' }")
    assert page.evaluate("() => typeof hacked") == "undefined"


# -- Downloads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(known_models, "available_bytes", lambda: 10**10)
    with hub_of_this_process(tmp_path / "home", monkeypatch) as server:
        demo = (ROOT / "localllm" / "data" / "demo.gguf").read_bytes()
        for name in ("unsloth/SmolLM2-135M-Instruct-GGUF", "someone/smollm2-tuned-GGUF"):
            server.repos[name] = Repo({f"{name.rpartition('/')[2]}-Q8_0.gguf": demo}, about={"downloads": 1234})
        yield server


def test_models_are_searched_downloaded_and_deleted(open_page: Open, hub: HubServer) -> None:
    with serving(scripted(script), names=("first",), may_pull=True) as server:
        page = open_page(server.url)
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#model")
        page.locator("#download-list", has_text="qwen3.5:4b").wait_for()
        page.fill("#model-search", "smollm2")
        rows = page.locator("#download-list li")
        page.locator("#download-list", has_text="someone/smollm2-tuned-GGUF").wait_for()
        assert "1,234 downloads in a month" in rows.last.inner_text()
        repo = hub.repos["unsloth/SmolLM2-135M-Instruct-GGUF"]
        repo.waits = True
        page.get_by_label("Download smollm2:135m", exact=True).click()
        page.locator("#download-list progress").wait_for()
        page.locator("#download-list", has_text="MB of").wait_for()
        check_with_axe(page, "a download")
        page.get_by_text("Stop", exact=True).click()
        page.locator("#download-list", has_text="stopped: the downloaded part is kept").wait_for()
        repo.waits = False
        hub.is_ending.set()
        page.get_by_label("Download smollm2:135m", exact=True).click()
        page.get_by_label("Delete smollm2:135m").wait_for()
        assert page.get_by_label("Download smollm2:135m", exact=True).count() == 0
        page.get_by_label("Delete smollm2:135m").click()
        page.get_by_label("Download smollm2:135m", exact=True).wait_for()
        assert list(server.models.served) == ["first"]


def test_models_are_unloaded(page: Any, actor: Serving) -> None:
    ask(page, "Hi", 1)
    page.click("#model")
    page.get_by_label("Unload first").click()
    page.get_by_label("Unload first").wait_for(state="detached")
    assert actor.models.served["first"].llm is None
    assert not page.locator("#downloads").is_visible()


# -- Looks, keys and accessibility -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing(open_page: Open, actor: Serving, width: int) -> None:
    pytest.importorskip("axe_playwright_python")
    page = open_page(actor.url, viewport={"width": width, "height": 800})
    check = partial(check_with_axe, page)
    check("empty")
    ask(page, "markdown", 1)
    ask(page, "thought", 2)
    page.locator("details.thinking:not([hidden]) summary").click()
    check("chat")
    page.locator(".message.user").first.get_by_label("Edit").click()
    check("editing")
    page.get_by_role("textbox", name="Edit").press("Escape")
    change_settings(page, tools=json.dumps(TOOLS), system="Be brief.")
    ask(page, "call it", 3)
    check("tools")
    for button, dialog in (("#open-settings", "#settings"), ("#model", "#models")):
        page.click(button)
        page.locator(dialog).wait_for()
        check(dialog)
        page.keyboard.press("Escape")
    page.click("#chat-menu")
    check("menu")
    page.keyboard.press("Escape")
    if width < 700:
        page.click("#open-sidebar")
        page.locator("#chats a").wait_for()
        page.wait_for_timeout(300)
        check("sidebar")


def test_the_theme_is_kept(page: Any) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"
    change_settings(page, theme="dark")
    dark = page.evaluate(paper)
    reload(page)
    assert page.evaluate(paper) == dark
    change_settings(page, theme="light")
    assert page.evaluate(paper) != dark


def test_the_keyboard_is_enough(page: Any, actor: Serving) -> None:
    page.keyboard.type("endless")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("text")
    page.keyboard.press("Enter")
    page.get_by_text("word word").wait_for()
    page.keyboard.press("Escape")
    page.locator(".stats", has_text="stopped").wait_for()
    actor.wait_until_idle()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("() => document.activeElement.value") == "endless\ntext"
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    assert page.evaluate("() => document.activeElement.id") == "search"
    page.keyboard.press("Control+Shift+o")
    assert page.evaluate("() => document.activeElement.id") == "text"
    page.keyboard.press("Control+m")
    page.locator("#models").wait_for()
    page.keyboard.press("Escape")
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("?")
    page.locator("#keys").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "text"


def test_on_a_phone_the_chats_are_in_a_drawer(open_page: Open, actor: Serving) -> None:
    page = open_page(actor.url, viewport={"width": 390, "height": 780}, has_touch=True)
    ask(page, "Hi", 1)
    assert not page.locator("#sidebar").is_visible()
    page.click("#open-sidebar")
    page.click("#new")
    page.locator("#sidebar").wait_for(state="hidden")
    page.click("#open-sidebar")
    page.click("#chats a")
    page.get_by_text("turn 1.").wait_for()
