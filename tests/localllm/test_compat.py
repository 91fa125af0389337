"""Common programs for llama-cpp-python, with one changed import, on the demo model.

The dicts have the keys of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import compat
from localllm.catalog import find
from localllm.compat import Llama, LlamaGrammar, LlamaPromptLookupDecoding, NotAvailableError, llama_chat_format
from localllm.errors import ClosedError, LocalLLMError, UsageError
from tests.helpers.data import ROOT

DEMO = str(ROOT / "localllm" / "data" / "demo.gguf")
QUESTION = [{"role": "user", "content": "What is localllm?"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    llm = Llama(model_path=DEMO, n_ctx=256, verbose=False)
    yield llm
    llm.close()


def shape(value: Any) -> Any:
    """Return the keys of dicts with the types of their values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value[:1]] if isinstance(value, list) else type(value).__name__


USAGE = {"prompt_tokens": "int", "completion_tokens": "int", "total_tokens": "int"}
HEAD = {"id": "str", "object": "str", "created": "int", "model": "str"}


# -- The snippets --------------------------------------------------------------------------------------------------


def test_text_completion_by_calling_the_model(llm: Llama) -> None:
    output = llm("Q: What is a seed? A: ", max_tokens=8, stop=["Q:", "###"], echo=True, temperature=0)
    choice = {"text": "str", "index": "int", "logprobs": "NoneType", "finish_reason": "str"}
    assert shape(output) == {**HEAD, "choices": [choice], "usage": USAGE}
    assert output["object"] == "text_completion"
    assert output["id"].startswith("cmpl-")
    assert output["model"] == DEMO
    assert output["choices"][0]["text"].startswith("Q: What is a seed? A: ")
    assert output["usage"]["completion_tokens"] == 8
    json.dumps(output)


def test_chat_completion(llm: Llama) -> None:
    output = llm.create_chat_completion(
        messages=[{"role": "system", "content": "You are a helpful assistant."}, *QUESTION], temperature=0
    )
    message = {"role": "str", "content": "str"}
    choice = {"index": "int", "message": message, "logprobs": "NoneType", "finish_reason": "str"}
    assert shape(output) == {**HEAD, "choices": [choice], "usage": USAGE}
    assert (output["object"], output["choices"][0]["finish_reason"]) == ("chat.completion", "stop")
    assert output["id"].startswith("chatcmpl-")
    assert "localllm" in output["choices"][0]["message"]["content"]


def test_streamed_text_is_the_same_text(llm: Llama) -> None:
    whole = llm.create_completion("Once upon a time", max_tokens=24, temperature=0)["choices"][0]
    chunks = list(llm.create_completion("Once upon a time", max_tokens=24, temperature=0, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["text"] == ""
    assert len({chunk["id"] for chunk in chunks}) == 1
    choice = {"text": "str", "index": "int", "logprobs": "NoneType", "finish_reason": "NoneType"}
    assert shape(chunks[0]) == {**HEAD, "choices": [choice]}


@pytest.mark.parametrize("more", [{"echo": True}, {"suffix": " THE END"}, {"echo": True, "suffix": "!"}], ids=str)
def test_echo_and_suffix_are_streamed_too(llm: Llama, more: dict[str, Any]) -> None:
    options = {"max_tokens": 5, "temperature": 0, **more}
    whole = llm("Once upon", **options)["choices"][0]["text"]
    assert "".join(each["choices"][0]["text"] for each in llm("Once upon", stream=True, **options)) == whole


def test_a_model_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []

    def cached(name: Any) -> Path:
        wanted.append(str(name))
        return Path(DEMO)

    monkeypatch.setattr("localllm.compat.find_cached", cached)
    for pattern in ("*q8_0.gguf", "*-Q8_0*", "demo.Q8_0.gguf", None):
        Llama.from_pretrained(repo_id="org/repo", filename=pattern, verbose=False).close()
    assert wanted == ["org/repo:q8_0", "org/repo:Q8_0", "org/repo:demo.Q8_0.gguf", "org/repo"]
    monkeypatch.setattr("localllm.compat.find_cached", find.find_cached)
    monkeypatch.setattr("localllm.compat.pull", lambda name: wanted.append(f"pulled {name}") or Path(DEMO))
    Llama.from_pretrained("no-such/repo", "*Q4_0.gguf").close()
    assert wanted[-1] == "pulled no-such/repo:Q4_0"
    with pytest.raises(NotAvailableError, match="write a name, or a quantisation"):
        Llama.from_pretrained("org/repo", "a*b.gguf")


def test_tools_that_the_model_may_use(llm: Llama) -> None:
    with pytest.warns(UserWarning, match="does not use tools"):
        output = llm.create_chat_completion(QUESTION, tools=[TOOL], tool_choice="auto", max_tokens=4)
    assert output["choices"][0]["message"]["role"] == "assistant"
    with pytest.warns(UserWarning, match="does not use tools"):
        llm.create_chat_completion(QUESTION, functions=[TOOL["function"]], function_call="auto", max_tokens=4)
    llm.create_chat_completion(QUESTION, tools=[TOOL], tool_choice="none", max_tokens=4)


def test_a_tool_that_is_called(llm: Llama) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "temperature": 0}
    with pytest.warns(UserWarning, match="does not use tools"):
        done = llm.create_chat_completion(QUESTION, **asked)["choices"][0]
    with pytest.warns(UserWarning, match="does not use tools"):
        chunks = list(llm.create_chat_completion(QUESTION, stream=True, **asked))
    assert (done["finish_reason"], done["message"]["content"]) == ("tool_calls", None)
    [call] = done["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert set(json.loads(call["function"]["arguments"])) <= {"city"}
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    assert "".join(delta[0]["function"]["arguments"] for delta in deltas if delta) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    with pytest.raises(UsageError, match="'rain', which is none of the tools"):
        llm.create_chat_completion(QUESTION, tools=[TOOL], function_call={"name": "rain"})


def test_a_tool_that_the_model_calls_by_itself(llm: Llama) -> None:
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    forced = LlamaGrammar.from_string(f"root ::= {json.dumps(written)}")
    with pytest.warns(UserWarning, match="does not use tools"):
        done = llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=forced)["choices"][0]
    assert (done["finish_reason"], done["message"]["content"]) == ("tool_calls", None)
    assert done["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    unknown = json.dumps('<tool_call>{"name": "rain", "arguments": {}}</tool_call>')
    grammar = LlamaGrammar.from_string(f"root ::= {unknown}")
    with pytest.warns(UserWarning, match="does not use tools"), pytest.warns(match="there is no tool 'rain'"):
        list(llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=grammar, stream=True))
    [many] = llm.llm.generate_many([QUESTION], grammar=f"root ::= {json.dumps(f'<think>hm</think>{written}')}")
    assert (many.reasoning, many.text) == ("hm", written)  # no tools were passed
    with pytest.warns(UserWarning, match="does not use tools"):
        called = llm.llm.chat(QUESTION, tools=[TOOL], grammar=f"root ::= {json.dumps(written)}").to_dict()
    assert called["tool_calls"] == [{"name": "weather", "arguments": {"city": "Oslo"}}]


def test_answers_that_follow_a_grammar(llm: Llama, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for form in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"schema": schema}},
    ):
        chat = llm.create_chat_completion(QUESTION, response_format=form)
        assert set(json.loads(chat["choices"][0]["message"]["content"])) == {"ok"}
    (tmp_path / "yes.gbnf").write_text('root ::= "yes" | "no"')
    for grammar in (
        LlamaGrammar.from_file(tmp_path / "yes.gbnf"),
        LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False),
        LlamaGrammar.from_json_schema(json.dumps({"enum": ["yes", "no"]})),
    ):
        assert llm("Is it?", grammar=grammar)["choices"][0]["text"].strip('"') in ("yes", "no")
    with pytest.raises(UsageError, match=r"must be a LlamaGrammar, as of from_string"):
        llm("a", grammar='root ::= "a"')


def test_other_imports(llm: Llama) -> None:
    from localllm.compat.llama_grammar import LlamaGrammar as Grammar  # type: ignore[import-not-found]
    from localllm.compat.llama_speculative import LlamaPromptLookupDecoding as Lookup  # type: ignore[import-not-found]

    assert (Grammar, Lookup) == (LlamaGrammar, LlamaPromptLookupDecoding)
    llm.set_cache(compat.LlamaRAMCache())
    assert llm("a", max_tokens=1, logits_processor=compat.LogitsProcessorList([lambda ids, scores: scores]))
    assert llm.metadata["general.architecture"] == "llama"
    assert llm.n_embd() == 256
    for name, hint in (
        ("decode", r"use Llama\.llm\.detokenize"),
        ("tokenizer", r"use Llama\.llm\.tokenizer$"),
        ("xyzzy", "'xyzzy'$"),
    ):
        with pytest.raises(
            AttributeError, match=f"^'Llama' object has no attribute {name!r}.*{hint}" if hint[0] == "u" else hint
        ):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'LlavaHandler'$"):
        compat.LlavaHandler  # noqa: B018


def test_drafts_from_the_prompt() -> None:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    llm = Llama(model_path=DEMO, draft_model=draft)
    plain = Llama(model_path=DEMO)
    prompt = "one two three four one two three four one two"
    assert llm(prompt, temperature=0)["choices"][0]["text"] == plain(prompt, temperature=0)["choices"][0]["text"]
    llm.close()
    plain.close()


def test_the_context_window() -> None:
    with Llama(model_path=DEMO, n_ctx=64, n_gpu_layers=-1, n_threads=1, use_mmap=True, n_batch=32) as llm:
        assert llm.n_ctx() == 64
    with pytest.raises(ClosedError):
        llm("a")
    llm = Llama(model_path=DEMO, n_ctx=0)
    assert llm.n_ctx() == 1024
    llm.close()


def test_tokens_are_encoded_and_decoded(llm: Llama) -> None:
    tokens = llm.tokenize(b"Hello world")
    assert tokens[0] == llm.token_bos()
    assert tokens[1:] == llm.tokenize(b"Hello world", add_bos=False)
    assert llm.detokenize(tokens) == b"Hello world"
    assert b"".join(llm.detokenize([token], prev_tokens=tokens[:1]) for token in tokens[1:]) == b"Hello world"
    assert llm.detokenize([llm.token_eos()]) == b""
    end = llm.detokenize([llm.token_eos()], special=True)
    assert llm.tokenize(end, add_bos=False, special=True) == [llm.token_eos()]
    assert llm.detokenize([llm.token_nl()]) == b"\n"
    assert max(tokens) < llm.n_vocab()
    text = llm(tokens, max_tokens=4, temperature=0, echo=True)["choices"][0]["text"]
    assert text == llm("Hello world", max_tokens=4, temperature=0, echo=True)["choices"][0]["text"]


def test_state_saved_and_loaded(llm: Llama) -> None:
    prompt = "localllm runs large language models on the machine that you have."
    llm(prompt, max_tokens=4, temperature=0)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    assert state.n_tokens == llm.n_tokens > 10
    llm.reset()
    assert llm.n_tokens == 0
    llm.load_state(state)
    assert llm.n_tokens == state.n_tokens
    assert llm.llm.generate(prompt, max_tokens=1).usage.cached_tokens >= state.n_tokens - 6


# -- Values and bad input ------------------------------------------------------------------------------------------


def test_logprobs(llm: Llama) -> None:
    """Completions and chats, complete and streamed, have the same logprobs, which match the logits."""
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    found = llm("Hello", logprobs=2, **options)["choices"][0]["logprobs"]
    chunks = list(llm("Hello", logprobs=2, stream=True, **options))
    for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        streamed = [each for c in chunks for each in (c["choices"][0]["logprobs"] or {key: []})[key]]
        assert streamed == found[key]
        assert len(found[key]) == 4
    text = llm("Hello", echo=True, **options)["choices"][0]["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    logits = llm.llm.logits(llm.tokenize(b"Hello"), last=1)[0].astype(np.float64)
    expected = float(logits.max() - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    assert found["token_logprobs"][0] == pytest.approx(expected, abs=1e-5)
    assert found["top_logprobs"][0][found["tokens"][0]] == found["token_logprobs"][0]

    chat = llm.create_chat_completion(QUESTION, logprobs=True, top_logprobs=2, **options)["choices"][0]["logprobs"]
    entry = {"token": "str", "bytes": ["int"], "logprob": "float"}
    assert shape(chat) == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": "NoneType"}
    assert [len(each["top_logprobs"]) for each in chat["content"]] == [2] * 4


def test_options_have_llama_cpp_pythons_meaning(llm: Llama) -> None:
    def text(**options: Any) -> str:
        return str(llm("Once upon a time", **{"max_tokens": 12, **options})["choices"][0]["text"])

    assert text(seed=3, temperature=1.0) == text(
        seed=3, temperature=1.0, logits_processor=[lambda ids, scores: scores]
    )
    assert text(temperature=-1) == text(top_k=1) == text(temperature=0, tfs_z=1.0, grammar=None, stop=None)
    first = llm.tokenize(text(temperature=0).encode(), add_bos=False)[0]
    assert text(temperature=0) != text(temperature=0, logit_bias={str(first): -1e9})
    assert text(temperature=0, suffix="END").endswith("END")
    assert text(mirostat_mode=2, mirostat_tau=1.0, seed=1) == text(mirostat_mode=2, mirostat_tau=1.0, seed=1)
    for unlimited in (None, 0, -1):
        chat = llm.create_chat_completion(QUESTION, max_tokens=unlimited, temperature=0)
        assert chat["choices"][0]["finish_reason"] == "stop"
    assert llm("a", max_tokens=1, model="mine")["model"] == "mine"


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_includes_those_of_the_prompt(llm: Llama, stream: bool) -> None:
    prompt = "Once upon a time"
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    if stream:
        pieces = [chunk["choices"][0] for chunk in llm(prompt, stream=True, **options)]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        found = {key: [each for part in told for each in part[key]] for key in told[0]}
        text = "".join(piece["text"] for piece in pieces)
    else:
        choice = llm(prompt, **options)["choices"][0]
        found, text = choice["logprobs"], choice["text"]
    ids = llm.tokenize(text.encode())
    expected = log_softmax(llm.llm.logits(ids))
    assert ids[0] == llm.token_bos()
    assert text.startswith(prompt)
    assert "".join(found["tokens"]).lstrip() == text
    assert len(found["tokens"]) == len(ids) - 1
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    np.testing.assert_allclose(
        found["token_logprobs"][1:], [expected[i, ids[i + 1]] for i in range(1, len(ids) - 1)], atol=1e-3
    )
    for at, top in enumerate(found["top_logprobs"][1:], 1):
        assert max(top.values()) == pytest.approx(expected[at].max(), abs=1e-3)


def test_criteria_end_texts(llm: Llama) -> None:
    prompt = llm.tokenize(b"Once upon a time")
    ids = list(llm.llm.generate(prompt, max_tokens=8, temperature=0).ids)
    seen: list[int] = []

    def after_three(tokens: np.ndarray, logits: np.ndarray) -> bool:
        seen.append(int(logits.argmax()))
        return len(tokens) == len(prompt) + 3

    ends = compat.StoppingCriteriaList([lambda tokens, logits: False, after_three])
    done = llm(prompt, max_tokens=8, temperature=0, stopping_criteria=ends)
    assert (done["choices"][0]["text"], done["choices"][0]["finish_reason"]) == (llm.llm.detokenize(ids[:3]), "stop")
    assert seen == ids[:4]
    assert list(llm.generate(prompt, temp=0, stopping_criteria=ends)) == ids[:3]


def test_tokens_one_by_one() -> None:
    with Llama(DEMO, n_ctx=128, logits_all=True) as llm:
        prompt = llm.tokenize(b"What is localllm?")
        expected = list(llm.llm.generate(prompt, max_tokens=6, temperature=0).ids)
        llm.eval(prompt[:2])
        llm.eval(prompt[2:])
        np.testing.assert_allclose(llm.scores, llm.llm.logits(prompt), atol=1e-4)
        assert (llm.n_tokens, list(llm.eval_tokens), llm.input_ids.tolist()) == (len(prompt), prompt, prompt)
        assert len(llm.eval_logits) == len(prompt)
        written = []
        for _ in range(6):
            written.append(llm.sample(temp=0, top_k=1))
            llm.eval(written[-1:])
        assert written == expected
        assert list(llm.eval_tokens) == [*prompt, *expected]
        tokens = llm.generate(prompt, temp=0)
        assert [next(tokens) for _ in range(6)] == expected
        with pytest.raises(NotAvailableError, match="of all tokens"):
            llm.scores  # noqa: B018
        sent = llm.tokenize(b" a dog", add_bos=False)
        after = list(llm.llm.generate([*prompt, *expected[:1], *sent], max_tokens=2, temperature=0).ids)
        tokens = llm.generate(prompt, temp=0)
        assert [next(tokens), tokens.send(sent), next(tokens)] == [expected[0], *after]
        llm.reset()
        assert (llm.n_tokens, llm.scores.shape) == (0, (0, llm.n_vocab()))
        whole = list(
            llm.generate(
                llm.tokenize(b"Say yes. Answer:"), temp=0, grammar=LlamaGrammar.from_string('root ::= "yes"')
            )
        )
        assert llm.detokenize(whole[:-1]) == b"yes"
        assert whole[-1] == llm.token_eos()


def test_tokens_that_cannot_be_evaluated_change_nothing(llm: Llama) -> None:
    llm.reset()
    llm.eval([1, 5, 6])
    following = llm.sample(temp=0)
    for wrong in ([-1], [5] * (llm.n_ctx() + 1)):
        with pytest.raises(ValueError):
            llm.eval(wrong)
        assert llm.n_tokens == 3
        assert llm.sample(temp=0) == following


def test_a_processor_may_be_a_function_alone(llm: Llama) -> None:
    def only_newlines(ids: Any, logits: Any) -> Any:
        wanted = np.full_like(logits, -np.inf)
        wanted[llm.token_nl()] = 0
        return wanted

    said = llm("Once", max_tokens=3, temperature=0, logits_processor=only_newlines)
    assert said["choices"][0]["text"].strip() == ""


def test_formats_of_a_programs_own() -> None:
    from localllm.compat import llama_chat_format as formats

    @formats.register_chat_format("shouted")
    def shouted(*, messages: Any, **more: Any) -> formats.ChatFormatterResponse:
        return formats.ChatFormatterResponse(messages[-1]["content"].upper(), stop="@@")

    with pytest.raises(UsageError, match="there is a chat format 'shouted' already"):
        formats.register_chat_format("shouted")(shouted)
    jinja = formats.Jinja2ChatFormatter("{{ bos_token }}{{ messages[0].content | upper }}", "</s>", "<s>")
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    with Llama(DEMO, chat_format="shouted") as llm, Llama(DEMO, chat_handler=jinja.to_chat_handler()) as other:
        expected = llm("WHAT IS LOCALLLM?", **options)["choices"][0]["text"]
        for each in (llm, other):
            answer = each.create_chat_completion(QUESTION, **options)
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
        chunks = list(llm.create_chat_completion(QUESTION, stream=True, **options))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected

    def echo(*, llama: Llama, messages: Any, temperature: float = 0.2, **more: Any) -> Any:
        return {"said": messages, "temperature": temperature, "stream": more["stream"]}

    with Llama(DEMO, chat_handler=echo) as llm:
        assert llm.create_chat_completion(QUESTION, temperature=0.5) == {
            "said": QUESTION, "temperature": 0.5, "stream": False
        }  # fmt: skip


def test_openais_objects(llm: Llama) -> None:
    pytest.importorskip("openai")
    whole = llm.create_chat_completion_openai_v1(QUESTION, temperature=0)
    chunks = llm.create_chat_completion_openai_v1(QUESTION, temperature=0, stream=True)
    assert "localllm" in whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


TYPED = """
from typing import reveal_type
from localllm.compat import Llama
from localllm.compat.llama_types import CreateCompletionResponse

llm = Llama("model.gguf", n_ctx=512, n_gpu_layers=-1, verbose=False)
done: CreateCompletionResponse = llm("a", max_tokens=3, temperature=0.5)
reveal_type(done["choices"][0]["text"])
for chunk in llm.create_chat_completion([{"role": "user", "content": "a"}], stream=True):
    reveal_type(chunk["choices"][0]["delta"])
reveal_type(llm.create_chat_completion([{"role": "user", "content": "a"}])["usage"]["total_tokens"])
flag = bool(done)
llm("a", stream=flag)
llm("a", temprature=1)
"""


def test_type_checkers_see_signatures(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "program.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert lines[0].removeprefix("note: Revealed type is ") in ('"str"', '"builtins.str"'), done.stdout
    assert "ChatCompletionStreamResponseDelta" in lines[1]
    assert "int" in lines[2]
    assert lines[3].startswith('error: Unexpected keyword argument "temprature"')


def test_the_seed_of_the_model() -> None:
    def texts(seed: int) -> list[str]:
        llm = Llama(DEMO, seed=seed)
        found = [llm("Once upon a time", temperature=2.0, min_p=0.0)["choices"][0]["text"] for _ in range(3)]
        llm.close()
        return found

    assert texts(5) == texts(5)
    assert len(set(texts(5))) == 3
    assert texts(-1) != texts(-1)


def test_leaving_a_stream_stops_it(llm: Llama) -> None:
    chunks = llm("Once upon a time", max_tokens=None, stream=True)
    next(chunks)
    chunks.close()
    assert llm("a", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("lora_path", "x.gguf"),
        ("vocab_only", True),
        ("rope_freq_base", 1e6),
        ("kv_overrides", {"a": 1}),
        ("type_k", 3),
        ("type_v", 7),
    ],
)
def test_unsupported_arguments_of_the_constructor_fail_before_loading(keyword: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{keyword} is .* but here ") as raised:
        Llama("missing.gguf", **{keyword: value})
    assert isinstance(raised.value, UsageError)


def test_other_values_of_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.compat.gpu_memory", lambda device: 0)
    with pytest.warns(UserWarning, match="chat_format 'llama-2' has no effect"):
        Llama(DEMO, chat_format="llama-2", rope_freq_base=0.0, vocab_only=False).close()
    llm = Llama(DEMO, chat_format="chatml", type_k=8, type_v=8)
    assert llm.llm.info.cache_type == "q8_0"
    assert "<|im_start|>" in llm.llm.detokenize(llm.llm.tokenize_chat(QUESTION))
    llm.close()
    with pytest.raises(FileNotFoundError):
        Llama("missing.gguf")
    with pytest.warns(UserWarning, match="n_gpu_layers=35 has no effect: no GPU") as caught:
        Llama(DEMO, n_gpu_layers=35).close()
    assert caught[0].filename == __file__
    for wrong in ({"n_ctx": "x"}, {"n_threads": 0}, {"n_gpu_layers": "all"}):
        with pytest.raises(UsageError, match=f"^{next(iter(wrong))} is "):
            Llama(DEMO, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'n_thread': did you mean 'n_threads'"):
        Llama(DEMO, n_thread=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format is .* but must have type 'text', "),
        ({"response_format": "json"}, "response_format is 'json', but must be a mapping, as"),
        ({"tools": [{"x": 1}], "tool_choice": {"name": "f"}}, "tool 0 is not a function with a name"),
        ({"tools": [TOOL], "tool_choice": {"name": "f"}}, "tool_choice names 'f', which is none of the tools"),
        ({"tools": [TOOL], "tool_choice": "Auto"}, "tool_choice is 'Auto', but must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": "x"}},
            "json_schema is 'x', but must be a mapping",
        ),
        ({"tools": [TOOL], "tool_choice": {"function": "f"}}, "tool_choice names 'f', which is none of the tools"),
        ({"tools": ["f"], "tool_choice": {"name": "f"}}, "tools must be a list of mappings"),
        ({"top_k": "all"}, "top_k is 'all', but must be"),
        ({"temperature": float("nan")}, "temperature is nan, but must be"),
        ({"max_tokens": "many"}, "max_tokens is 'many', but must be"),
        ({"logit_bias": "none"}, "logit_bias is 'none', but must be"),
        ({"mirostat_mode": 1}, "mirostat_mode is 1, but must be"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice is 'required': name the function"),
        ({"tfs_z": 0.5}, "tfs_z is not available"),
    ],
)
def test_unsupported_options_of_a_chat(llm: Llama, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.create_chat_completion(QUESTION, **options)


def test_other_unsupported_features(llm: Llama) -> None:
    for call in (llm.embed, llm.create_embedding):
        with pytest.raises(UsageError, match="cannot compute vectors of texts"):
            call("text")
    with pytest.raises(NotAvailableError, match="logits_all=True"):
        llm.scores  # noqa: B018
    with pytest.raises(UsageError, match="chat_handler is 7, but must be an image encoder"):
        Llama("missing.gguf", chat_handler=7)  # type: ignore[arg-type]
    for bad in ({"temprature": 1}, {"stream_options": {}}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            llm("a", **bad)
    with pytest.raises(UsageError, match=r"must be bytes: give text\.encode"):
        llm.tokenize("text")  # type: ignore[arg-type]
    for value in ({"top_k": "all"}, {"mirostat_mode": 1}, {"seed": "x"}, {"stop": [1]}):
        with pytest.raises(LocalLLMError):
            llm("a", **value)


HANDLERS = ["MTMD", "Llava15", "Llava16", "Obsidian", "Moondream", "NanoLlava", "Llama3VisionAlpha", "MiniCPMv26"]
HANDLERS += ["Qwen25VL", "Gemma4"]


@pytest.mark.parametrize("name", HANDLERS)
def test_chat_handlers_have_llama_cpp_pythons_names(name: str) -> None:
    handler = getattr(llama_chat_format, f"{name}ChatHandler")
    assert handler is getattr(compat, f"{name}ChatHandler")
    assert handler(clip_model_path="mmproj.gguf").clip_model_path == "mmproj.gguf"
