"""Features that only llama.cpp's server has."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm import compat
from localllm.errors import GGUFError
from localllm.llm import LLM
from localllm.openai_format import text_logprobs_json, tokens_json
from localllm.sampling import Choice
from localllm.server import llamacpp
from localllm.server.http import Limits
from localllm.tokenizer.stream import TextOffsets
from tests.helpers.engines import eventually
from tests.helpers.http_server import CALLS_TEMPLATE, TOOLS_TEMPLATE, Serving, demo, scripted, serving

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(server: Serving, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_and_templates(server: Serving) -> None:
    ids = post(server, "/tokenize", content="Once upon")["tokens"]
    assert post(server, "/detokenize", tokens=ids)["content"] == "Once upon"
    controls = [server.llm.tokenizer.bos_id, *ids, server.llm.tokenizer.eos_id]
    names = [server.llm.tokenizer.token_text(id_) for id_ in (controls[0], controls[-1])]
    assert post(server, "/detokenize", tokens=controls)["content"].replace(" ", "") == "Onceupon".join(names)
    assert server.llm.detokenize(controls).strip() == "Once upon"
    pieces = post(server, "/tokenize", content="é", with_pieces=True)["tokens"]
    assert bytes(b for each in pieces for b in _bytes(each["piece"])).decode().strip() == "é"
    prompt = post(server, "/apply-template", messages=[{"role": "user", "content": "Hi"}])["prompt"]
    assert prompt.endswith("<|assistant|>")
    assert "Hi" in prompt
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert post(server, "/apply-template", messages=said)["prompt"] == f"{prompt}Ho"
    whole = post(server, "/apply-template", messages=said, add_generation_prompt=False)["prompt"]
    assert whole == server.llm.chat_template.render(said, add_generation_prompt=False)


def test_parts_of_characters_are_told_apart_in_every_list_of_likely_tokens(server: Serving) -> None:
    llm = server.llm
    tokens = llm.tokenizer
    whole = llm.tokenize("a", add_special=False)[-1]
    parts = [id_ for id_ in range(tokens.n_vocab) if tokens.token_bytes(id_) in (b"\xe2", b"\x96", b"\xf0", b"\xc3")]
    assert len(parts) == 4
    likely = [*parts, tokens.eos_id, whole]
    texts = [*(f"\\x{tokens.token_bytes(id_)[0]:02x}" for id_ in parts), tokens.token_text(tokens.eos_id)]
    texts.append(tokens.token_bytes(whole).decode())
    data = [list(tokens.token_bytes(id_, special=True)) for id_ in likely]
    choice = Choice(parts[0], -1.0, tuple((id_, -1.0 - place) for place, id_ in enumerate(likely)))
    logprobs = text_logprobs_json(tokens, [choice], TextOffsets(tokens))
    assert logprobs["tokens"] == texts[:1]
    assert [*logprobs["top_logprobs"][0]] == texts
    like_llama = compat.Llama.__new__(compat.Llama)
    like_llama.llm = llm
    completion, chat = like_llama._logprobs([choice], 0), like_llama._chat_logprobs([choice])
    assert completion is not None
    assert chat is not None
    assert [*completion["top_logprobs"][0]] == texts
    for rows in (
        [*tokens_json(tokens, [choice])],
        llamacpp._probabilities(llm, [choice], False)["completion_probabilities"],
        chat["content"],
    ):
        assert (rows[0]["token"], rows[0]["bytes"]) == (texts[0], data[0])
        assert [each["token"] for each in rows[0]["top_logprobs"]] == texts
        assert [each["bytes"] for each in rows[0]["top_logprobs"]] == data
    drawn = llamacpp._probabilities(llm, [choice], True)["completion_probabilities"][0]["top_probs"]
    assert [(each["token"], each["bytes"]) for each in drawn] == list(zip(texts, data, strict=True))


def _bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def test_what_is_said_of_the_server(server: Serving) -> None:
    post(server, "/completion", prompt="a", n_predict=1)
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    props = httpx.get(server.url + "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["total_slots"] == 4
    assert httpx.get(server.url + "/lora-adapters").json() == []
    slots = httpx.get(server.url + "/slots").json()
    assert [(slot["model"], slot["is_processing"]) for slot in slots] == [("demo", False)] * 4
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    llm = server.llm
    assert float(values['llamacpp:tokens_predicted_total{model="demo"}']) == llm.counts.generated_tokens > 0
    assert float(values['localllm_cache_usage_ratio{model="demo"}']) == 0
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


def metric(server: Serving, name: str) -> float:
    (line,) = (x for x in httpx.get(server.url + "/metrics").text.splitlines() if x.startswith(f"llamacpp:{name}{{"))
    return float(line.split()[-1])


def test_who_has_a_whole_reply_sees_its_request_at_work_no_more() -> None:
    with serving(demo()) as server:
        for _ in range(10):
            post(server, "/completion", prompt="a b c d", n_predict=2, ignore_eos=True)
            assert metric(server, "requests_processing") == 0


def test_the_first_token_of_a_reply_is_in_no_rate_and_rates_are_since_the_last_look() -> None:
    with serving(demo()) as server:
        reply = post(server, "/completion", prompt="a b c d", n_predict=1, ignore_eos=True)
        assert reply["timings"]["predicted_per_second"] == 0
        server.wait_until_idle()
        assert metric(server, "predicted_tokens_seconds") == 0
        reply = post(server, "/completion", prompt="a b c d", n_predict=9, ignore_eos=True)
        server.wait_until_idle()
        text = httpx.get(server.url + "/metrics").text
        values = {x.split("{")[0]: float(x.split()[1]) for x in text.splitlines() if x.startswith("llamacpp:")}
        assert values["llamacpp:predicted_tokens_seconds"] == pytest.approx(reply["timings"]["predicted_per_second"])
        assert values["llamacpp:tokens_predicted_total"] == 10
        n_prompt = reply["tokens_evaluated"]
        assert values["llamacpp:n_tokens_max"] == n_prompt + 9
        assert values["llamacpp:n_busy_slots_per_decode"] == 1
        assert values["llamacpp:n_decode_total"] == 10
        for name in ("predicted_tokens_seconds", "prompt_tokens_seconds"):
            assert metric(server, name) == 0


def test_a_reply_that_the_context_ended_is_truncated() -> None:
    with serving(demo(context=32)) as server:
        for n, truncated in ((2, False), (-1, True)):
            reply = post(server, "/completion", prompt="Once upon a time", n_predict=n, ignore_eos=True)
            assert (reply["truncated"], reply["stop_type"]) == (truncated, "limit")


def test_named_templates_are_shown() -> None:
    named = {"tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    with serving(demo()) as server:
        server.llm.chat_template.named |= named
        props = httpx.get(server.url + "/props").json()
        assert {name: props[f"chat_template_{name}"] for name in named} == named
        assert props["chat_template"] == server.llm.chat_template.source


def test_a_server_that_loads_its_model_is_not_ready() -> None:
    goes_on = threading.Event()

    def slow(source: str | None, progress: Any, planned: Any) -> LLM:
        progress("weights", 42, 100)
        assert goes_on.wait(60)
        return demo()(source, progress, planned)

    with serving(slow, loads_first=True) as server:
        assert eventually(lambda: server.models.served["demo"].load_progress == 0.42)
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["loading"]) == (503, {"demo": 0.42})
        assert health.json()["error"]["message"] == "Loading model"
        assert httpx.get(server.url + "/slots").status_code == 503
        goes_on.set()
        assert eventually(lambda: httpx.get(server.url + "/health").status_code == 200)
        assert len(httpx.get(server.url + "/slots").json()) == 4


def test_a_model_that_sleeps_is_told_of_and_not_woken() -> None:
    with serving(demo(), loads_first=True, ttl_s=0.01) as server:
        served = server.models.served["demo"]
        assert eventually(lambda: served.last_counts is not None)
        props = httpx.get(server.url + "/props").json()
        assert props["is_sleeping"]
        assert props["default_generation_settings"]["n_ctx"] == 1024
        for path in ("/health", "/metrics", "/v1/models", "/slots"):
            assert httpx.get(server.url + path).status_code == 200
        assert (served.llm, server.models.n_loads) == (None, 1)


def test_one_model_that_cannot_be_loaded_does_not_keep_the_server_from_being_ready() -> None:
    def broken(source: str | None, progress: object) -> LLM:
        raise GGUFError("it is damaged")

    with serving(broken, loads_first=True, names=("demo", "other")) as server:
        assert eventually(lambda: httpx.get(server.url + "/health").status_code == 200)
        assert httpx.post(server.url + "/completion", json={"prompt": "a"}).status_code == 500


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/responses"])
def test_the_first_progress_has_what_the_cache_had(path: str) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 8
    said = {
        "/completion": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }
    body = {**said[path], "n_predict": 2, "stream": True, "return_progress": True}
    with serving(demo()) as server:
        for is_again in (False, True):
            lines = httpx.post(server.url + path, json=body, timeout=60).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            told = [each for each in events if "prompt_progress" in each]
            first, last = told[0]["prompt_progress"], told[-1]["prompt_progress"]
            assert first["processed"] == first["cache"]
            assert (first["cache"] > 0) == is_again
            assert last["processed"] == last["total"]
            assert (told[0]["timings"]["prompt_n"], told[0]["timings"]["prompt_ms"]) == (0, 0)
            assert told[-1]["timings"]["prompt_n"] == last["total"] - last["cache"]
            assert told[-1]["timings"]["prompt_ms"] > 0


def test_infill_is_refused_by_a_model_that_does_not_fill_in(server: Serving) -> None:
    response = httpx.post(server.url + "/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "cannot fill in text" in response.json()["error"]["message"]


def test_slots_are_saved_and_restored(tmp_path: Path) -> None:
    prompt = "Once upon a time there was a little girl who"

    def evaluated(server: Serving) -> int:
        reply = post(server, "/completion", prompt=prompt, n_predict=1)
        return int(reply["tokens_evaluated"]) - int(reply["tokens_cached"])

    with serving(demo(), prompts=tmp_path) as server:
        n = evaluated(server)
        assert n > 5
        saved = post(server, "/slots/1?action=save", filename="a.bin")
        assert saved["n_saved"] == n
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
        assert post(server, "/slots/1?action=erase") == {"id_slot": 1}
        assert evaluated(server) == n
        post(server, "/slots/1?action=erase")
        assert post(server, "/slots/1?action=restore", filename="a.bin")["n_restored"] == n
        assert evaluated(server) == 1
        of_the_store = ("000000001.blocks", "lock")
        for filename in ("", "../a.bin", "/etc/passwd", ".hidden", "a/b", "x" * 200, "é" * 128, "a\0", *of_the_store):
            response = httpx.post(server.url + "/slots/0?action=restore", json={"filename": filename})
            assert response.status_code == 400
        (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-1])
        for filename, message in (("none", "cannot be read"), ("b.bin", "not a complete file")):
            response = httpx.post(server.url + "/slots/0?action=restore", json={"filename": filename})
            assert response.status_code == 400
            assert message in response.text
            assert str(tmp_path) not in response.text
        assert httpx.post(server.url + "/slots/0?action=drop", json={}).status_code == 400
    with serving(demo()) as server:
        assert httpx.post(server.url + "/slots/0?action=save", json={"filename": "a"}).status_code == 501


def test_prompts_outlive_the_server(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "max_tokens": 3, "seed": 1}
    texts, cached = [], []
    for damage in (False, False, True):
        for path in tmp_path.iterdir() if damage else ():
            path.write_bytes(path.read_bytes()[:100])
        with serving(demo(prompt_cache=tmp_path)) as server:
            reply = post(server, "/v1/chat/completions", **chat)
        texts.append(reply["choices"][0]["message"]["content"])
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert texts == texts[:1] * 3
    assert cached == [0, reply["usage"]["prompt_tokens"] - 1, 0]


def test_keys_share_nothing_if_the_cache_is_scoped(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "max_tokens": 3}
    for scope, sharing in (("key", False), ("all", True)):
        load = demo(prompt_cache=tmp_path / scope, cache_scope=scope)
        with serving(load, limits=Limits(api_keys=["one", "two"])) as server:

            def cached(key: str, url: str = server.url) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                reply = httpx.post(f"{url}/v1/chat/completions", json=chat, headers=headers, timeout=300).json()
                return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert cached("one") == 0
            assert (cached("two") > 0) == sharing
            assert cached("one") > 0


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, CALLS_TEMPLATE], ids=["unknown format", "known format"])
def test_schemas_and_forced_calls(template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    with serving(demo(chat_template=template)) as server:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = post(server, "/v1/chat/completions", messages=messages, response_format=form)
        assert json.loads(reply["choices"][0]["message"]["content"])["a"] in (1, 2)
        tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
        choice = {"type": "function", "function": {"name": "add"}}
        reply = post(server, "/v1/chat/completions", messages=messages, tools=[TOOL, tool], tool_choice=choice)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


def test_a_begun_reply_stands_behind_reasoning_that_the_template_opens() -> None:
    template = r"{{ messages[-1].content }}{{ '<think>\n' }}"
    asked = {"role": "user", "content": "a"}
    begun = {
        "text": ({"content": "x"}, "a<think>\n\n</think>\n\nx"),
        "with its reasoning": ({"content": "x", "reasoning_content": "hm"}, "a<think>\nhm\n</think>\n\nx"),
        "reasoning alone": ({"content": "", "reasoning_content": "hm"}, "a<think>\nhm"),
        "with its tags": ({"content": "hm</think>x"}, "a<think>\nhm</think>x"),
        "with both tags": ({"content": "<think>\nhm</think>x"}, "a<think>\nhm</think>x"),
        "within its tags": ({"content": "<think>\nhm"}, "a<think>\nhm"),
    }
    with serving(demo(chat_template=template)) as server:
        for said, expected in begun.values():
            messages = [asked, {"role": "assistant", **said}]
            assert post(server, "/apply-template", messages=messages)["prompt"] == expected
        messages = [asked, {"role": "assistant", "content": "x"}]
        reply = post(server, "/v1/chat/completions", messages=messages, regex="yes")["choices"][0]["message"]
        assert (reply["content"], reply.get("reasoning_content")) == ("yes", None)


def test_a_begun_reply_of_gpt_oss_is_a_message() -> None:
    template = "{{ messages[-1].content }}<|start|>assistant"
    thought, final = "<|channel|>analysis<|message|>hm", "<|channel|>final<|message|>x"
    begun = {
        "text": ({"content": "x"}, final),
        "with its reasoning": (
            {"content": "x", "reasoning_content": "hm"},
            f"{thought}<|end|><|start|>assistant{final}",
        ),
        "reasoning alone": ({"content": "", "reasoning_content": "hm"}, thought),
        "with its header": ({"content": final}, final),
        "nothing": ({"content": ""}, ""),
    }
    with serving(demo(chat_template=template)) as server:
        for said, expected in begun.values():
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", **said}]
            assert post(server, "/apply-template", messages=messages)["prompt"] == f"a<|start|>assistant{expected}"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
        reply = post(server, "/v1/chat/completions", messages=messages, regex="yes")["choices"][0]["message"]
        assert (reply["content"], reply.get("reasoning_content")) == ("yes", None)


@pytest.mark.parametrize("text", [{"grammar": 'root ::= "yes" | "no"'}, {"regex": "yes|no"}])
def test_completions_follow_a_grammar(server: Serving, text: dict[str, str]) -> None:
    assert post(server, "/completion", prompt="Is it?", **text)["content"] in ("yes", "no")
    reply = post(server, "/v1/completions", prompt="Is it?", max_tokens=9, **text)
    assert reply["choices"][0]["text"] in ("yes", "no")


def test_calls_follow_the_schemas_of_their_tools() -> None:
    """The scripted model wants 3, which the schema forbids."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    messages = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    reply = 'Well.<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    with serving(scripted(reply, chat_template=CALLS_TEMPLATE)) as server:

        def call(**more: Any) -> Any:
            body = {"messages": messages, "tools": [TOOL, tool], **more}
            (choice,) = post(server, "/v1/chat/completions", **body)["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "Well."
            return choice["message"]["tool_calls"][0]["function"]

        assert json.loads(call()["arguments"])["a"] in (1, 2)
        assert call(tool_grammar=False) == {"name": "add", "arguments": '{"a": 3}'}


def test_a_reply_ends_after_its_only_call() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    with serving(scripted(f"{call}\n{call} Done.", chat_template=CALLS_TEMPLATE)) as server:
        for parallel, n, text in ((True, 2, "Done."), (False, 1, None)):
            reply = post(server, "/v1/chat/completions", parallel_tool_calls=parallel, **body)
            (choice,) = reply["choices"]
            assert len(choice["message"]["tool_calls"]) == n
            assert choice["message"]["content"] == text
            assert choice["finish_reason"] == "tool_calls"
            assert "warnings" not in reply


def test_calls_of_unknown_tools_are_calls() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    for template in (CALLS_TEMPLATE, TOOLS_TEMPLATE):
        reply = '<tool_call>\n{"name": "lok", "arguments": {"a": 1}}\n</tool_call>'
        with serving(scripted(reply, chat_template=template)) as server:
            (choice,) = post(server, "/v1/chat/completions", tool_grammar=False, **body)["choices"]
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "lok", "arguments": '{"a": 1}'}
            assert choice["finish_reason"] == "tool_calls"


def test_the_page_needs_nothing_from_elsewhere(server: Serving) -> None:
    response = httpx.get(server.url + "/", headers={"Accept": "text/html"})
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", response.text.partition("<script>")[0])
    assert response.text.count("<script") == response.text.count("</script") == 1


def test_a_program_that_looks_for_ollama_finds_it(server: Serving) -> None:
    assert httpx.get(server.url + "/").text.startswith("Ollama is running")
    assert httpx.head(server.url + "/").status_code == 200
    for path in ("/api/v0/models", "/v1/models"):
        (listed,) = httpx.get(server.url + path).json()["data"]
        assert listed["id"] == "demo"
    assert (listed["meta"]["n_ctx_train"], listed["meta"]["ftype"]) == (1024, "Q8_0")


def test_a_wrong_method_is_told_the_right_one(server: Serving) -> None:
    response = httpx.get(server.url + "/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
    assert httpx.put(server.url + "/v1/responses/a").headers["allow"] == "GET, DELETE"


def test_fields_that_nothing_reads_are_told() -> None:
    said: list[str] = []
    with serving(demo(), log=said.append) as server:
        body = {"prompt": "a", "options": {"num_predict": 1, "num_ctx": 9, "top_k": 3}, "color": 1, "stream": False}
        response = httpx.post(server.url + "/api/generate", json=body, timeout=60)
        assert response.headers["x-ignored-fields"] == "num_ctx, color"
        httpx.post(server.url + "/api/generate", json=body, timeout=60)
        assert "x-ignored-fields" not in httpx.post(server.url + "/tokenize", json={"content": "a"}).headers
    assert [line for line in said if "ignored" in line] == [
        "a request has num_ctx, which is ignored: give -c to localllm serve",
        "a request has color, which is ignored",
    ]


def test_headers_say_how_urgent_a_request_is() -> None:
    with serving(scripted("word " * 500)) as server:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": False}

        def ask(**headers: str) -> httpx.Response:
            return httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)

        reply = ask(**{"X-Timeout": "0.001", "X-Priority": "background"}).json()
        assert reply["usage"]["completion_tokens"] < 500
        assert reply["choices"][0]["finish_reason"] == "length"
        for wrong in ({"X-Timeout": "soon"}, {"X-Timeout": "nan"}, {"X-Priority": "first"}):
            assert ask(**wrong).status_code == 400
