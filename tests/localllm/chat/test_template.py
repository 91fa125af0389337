"""Chat templates from files, invalid messages and templates, and the ids of a chat."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localllm.chat import CHATML, ChatTemplate, TemplateSource, encode_chat
from localllm.errors import TemplateError
from localllm.gguf import GGUFFile
from localllm.tokenizer import Tokenizer
from tests.helpers.data import shared_data
from tests.helpers.vocabularies import CONTROL, FakeFile, bpe_metadata, spm_metadata, tiny_spm_pieces

CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Ås"}}}
SHORT = [{"role": "user", "content": "Hi there"}]


def test_whether_a_template_reads_a_variable() -> None:
    assert ChatTemplate("{% if tools %}{{ tools|tojson }}{% endif %}").reads("tools")
    assert ChatTemplate("{% macro f() %}{{ tools }}{% endmacro %}").reads("tools")
    assert not ChatTemplate("{{ messages[0].tools }}{{ 'tools' }}").reads("tools")
    assert not ChatTemplate(CHATML).reads("tools")


def test_the_templates_own_words_reach_the_user() -> None:
    source = shared_data("templates/google-gemma-2-2b-it.jinja").read_text(encoding="utf-8")
    with pytest.raises(TemplateError, match="refuses these messages: Conversation roles must alternate user/ass"):
        ChatTemplate(source).render([{"role": "assistant", "content": "a"}, *SHORT])


LOOP = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ x }}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(LOOP + "{{ bos_token }}{{ eos_token }}{{ tools }}", bos_token="<B>", eos_token="<E>")
    assert template.render(SHORT, x=7) == "[user:Hi there]7><B><E>None"
    assert template.render(SHORT, add_generation_prompt=False) == "[user:Hi there]<B><E>None"
    assert not template.is_fallback
    assert template.source.startswith(LOOP)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hello"], "message 0 is not a mapping"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"role": 1, "content": "x"}], "message 0 has no 'role'"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant"}],
            r"message 1 \(role 'assistant'\) has no 'content'",
        ),
        ([{"role": "user", "content": None}], r"message 0 \(role 'user'\) has no 'content'"),
        ([{"role": "user", "content": 5}], "neither a string nor a list"),
        ([{"role": "user", "content": b"x"}], "neither a string nor a list"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages holds a object"),
    ],
)
def test_malformed_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(LOOP).render(messages)


def test_a_role_that_a_template_says_nothing_of_is_a_warning() -> None:
    judge = [{"role": "judge", "content": "x"}]
    with pytest.warns(UserWarning, match="says nothing of the role 'judge', which the model may not know"):
        ChatTemplate(LOOP).render(judge)
    assert ChatTemplate("{% if messages[0].role == 'judge' %}!{% endif %}").render(judge) == "!"


def test_an_assistant_message_with_tool_calls_needs_no_content() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.name }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == "weather"


def test_messages_nested_without_end_are_refused() -> None:
    endless: dict[str, Any] = {"role": "user", "content": "x"}
    endless["again"] = endless
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate(LOOP).render([endless])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", r"is not valid \(line 1\)"),
        ("\n{{ a", r"is not valid \(line 2\)"),
        ("{% for %}", "is not valid"),
        ("{{ 1|nofilter }}", "No filter named 'nofilter'"),
    ],
)
def test_a_broken_template_says_where(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_template_that_fails_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template failed on these messages: "):
        ChatTemplate(source).render(SHORT)


def test_one_template_renders_in_many_threads() -> None:
    template = ChatTemplate("{% for i in range(n) %}{{ n }},{% endfor %}")
    results: dict[int, str] = {}

    def work(n: int) -> None:
        results[n] = template.render([], n=n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}," * n for n in range(16)}


# --- from a file, and to ids

CHAT_TOKENS = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<bos>", CONTROL)]


def chat_file(template: str | None, **changes: Any) -> FakeFile:
    metadata = bpe_metadata([], CHAT_TOKENS, bos_token_id=258, eos_token_id=257, **changes)
    return FakeFile(metadata if template is None else {**metadata, "tokenizer.chat_template": template})


def template_of(file: Any, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.compile(TemplateSource.of_file(file), tokenizer)


def test_the_template_of_a_file() -> None:
    file = chat_file("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    template = template_of(file, Tokenizer.from_gguf(file))
    assert template.render(SHORT) == "<bos>Hi there<|im_end|>"
    with pytest.raises(TemplateError, match="chat_template is not a string"):
        template_of(chat_file(5), Tokenizer.from_gguf(file))  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match=r"chat template of tiny\.gguf is not valid"):
        template_of(chat_file("{% if %}"), Tokenizer.from_gguf(file))


def test_templates_named_for_a_use_are_used_for_it() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.rag": "{{ documents[0] }}"}
    metadata["tokenizer.chat_template.tool_use"] = "{{ bos_token }}{{ tools[0].name }}"
    file = FakeFile(spm_metadata(tiny_spm_pieces()) | metadata)
    template = template_of(file, Tokenizer.from_gguf(file))
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat) == template.render(chat, tools=[], documents=[]) == "plain"
    assert template.render(chat, tools=[{"name": "now"}]) == "<s>now"
    assert template.render(chat, documents=["a page"]) == "a page"
    assert [template.reads(name) for name in ("tools", "documents", "messages")] == [True, True, False]
    broken = FakeFile(file.metadata | {"tokenizer.chat_template.rag": "{% if %}"})
    template = template_of(broken, Tokenizer.from_gguf(file))
    assert template.render(chat) == "plain"
    with pytest.raises(TemplateError, match="called 'rag' is not valid"):
        template.render(chat, documents=["a page"])


def test_a_file_without_template_gets_chatml_and_says_so() -> None:
    file = chat_file(None)
    tokenizer = Tokenizer.from_gguf(file)
    template = template_of(file, tokenizer)
    assert (template.is_fallback, template.source) == (True, CHATML)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == text
    ids = encode_chat(tokenizer, template, messages)
    assert ids.count(256) == 3  # the markers are tokens, not letters
    assert tokenizer.decode(ids, special=True) == text


@pytest.mark.parametrize("source", [CHATML, "{% for m in messages %}{{ m.content + m.role }}{% endfor %}"])
def test_parts_of_text_are_joined_and_others_refused(source: str) -> None:
    template = ChatTemplate(source)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = template.render([{"role": "user", "content": "ab"}])
    assert template.render([{"role": "user", "content": parts}]) == joined
    assert template.render([{"role": "user", "content": ["a", parts[1]]}]) == joined
    for part, words in (
        ({"type": "video"}, "message 0 has a part of type 'video'"),
        ({"type": "input_audio"}, "the audio of message 0 is missing"),
        ({"type": "input_audio", "input_audio": {"data": "eA=="}}, "these messages have audio"),
        (5, "a part of message 0 has no text"),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "these messages have images"),
    ):
        with pytest.raises(ValueError, match=f"^{words}") as raised:
            template.render([{"role": "user", "content": [*parts, part]}])
        assert isinstance(raised.value, TemplateError)


def test_calls_are_words_where_a_template_knows_none() -> None:
    template = ChatTemplate(CHATML)
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    result = {"role": "tool", "content": "noon"}
    for message in (
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ):
        text = template.render([message, result])
        assert '<|im_start|>assistant\n{"name": "f", "arguments": {"a": 1}}<|im_end|>' in text
        assert "<|im_start|>user\nResult of f: noon<|im_end|>" in text


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_there_is_one_bos_whoever_writes_it(writes_bos: bool, add_bos: bool) -> None:
    source = ("{{ bos_token }}" if writes_bos else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = chat_file(source, add_bos_token=add_bos, add_eos_token=True)
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_chat(tokenizer, template_of(file, tokenizer), SHORT)
    assert ids == [258] * (writes_bos or add_bos) + tokenizer.encode("Hi there", add_special=False)


def test_one_bos_with_sentencepiece() -> None:
    pieces = tiny_spm_pieces([("▁", -1.0), ("h", -2.0), ("▁h", -3.0)])
    file = FakeFile({**spm_metadata(pieces), "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_chat(tokenizer, template_of(file, tokenizer), [{"role": "user", "content": "h"}])
    assert [tokenizer.token_text(token) for token in ids] == ["<s>", "▁h"]


def test_the_template_of_a_real_vocabulary() -> None:
    with GGUFFile.open(shared_data("vocab/ggml-vocab-phi-3.gguf")) as file:
        tokenizer = Tokenizer.from_gguf(file)
        template = template_of(file, tokenizer)
    ids = encode_chat(tokenizer, template, SHORT)
    user, end, assistant = 32_010, 32_007, 32_001
    hi = tokenizer.encode("Hi there", add_special=False)
    assert ids == [1, user, *hi, end, assistant]
