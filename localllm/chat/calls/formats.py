"""Formats of tool calls, one declaration each.

No two formats conflict, so the parser is built from all declarations and reads every format for every model.
"""

from __future__ import annotations

from typing import Any

from localllm.chat.calls import declaration
from localllm.chat.calls.declaration import Arguments, CallFormat, TaggedArguments
from localllm.chat.calls.json_text import TOKEN_QUOTE
from localllm.chat.thinking import CALL, END_OF_CALL

_JSON = declaration.JSONArguments()
_PYTHON = declaration.PythonArguments()
_MARK = "]<]minimax[>["

#: Calls that are JSON objects.
_CALL = '{"name": "{name}", "arguments": {arguments}}'
_CALL_WITH_PARAMETERS = _CALL.replace('"arguments"', '"parameters"')
_COMMAND_CALL = _CALL_WITH_PARAMETERS.replace('"name"', '"tool_name"')


def _format(models: str, frame: str, call: str, arguments: Arguments = _JSON, **more: Any) -> CallFormat:
    """Declare a format by its text.

    Args:
        frame: the text around the calls, which are "…". "¦" is between the tags and `CallFormat.inside`.
        call: a call, with ``{arguments}`` in place of its arguments.
    """
    before, after = frame.split("…")
    opening, _, first = before.partition("¦")
    last, _, closing = after.rpartition("¦")
    head, tail = call.split("{arguments}")
    return CallFormat(models, head, arguments, tail, opening, closing, (first, last), **more)


def _invoke(models: str, calls: str, prefix: str = "", attributes: str = "", **more: Any) -> CallFormat:
    """Declare a format of XML elements: ``calls``, and ``invoke`` and ``parameter`` with a prefix.

    Values are exact if the tags have attributes.
    """
    begin, end = f'<{prefix}parameter name="{{key}}"{attributes}>', f"</{prefix}parameter>"
    parameter = TaggedArguments(begin, end, "\n", has_line_breaks=not attributes)
    call = f'<{prefix}invoke name="{{name}}">\n{{arguments}}</{prefix}invoke>'
    return _format(models, f"<{calls}>¦\n…\n¦</{calls}>", call, parameter, **more)


#: By name. The parser tries heads in this order.
FORMATS = {
    "hermes": _format("Hermes 2 and 3, Qwen 2.5 and 3", "<tool_call>¦\n…\n¦</tool_call>", _CALL, repeats=True),
    "qwen coder": _format(
        "Qwen 3 Coder, 3.5 and 3.6, Nemotron 3",
        "<tool_call>¦\n…\n¦</tool_call>",
        "<function={name}>\n{arguments}</function>",
        TaggedArguments("<parameter={key}>\n", "\n</parameter>", "\n"),
        repeats=True,
    ),
    "nemotron 2": _format("Nemotron 2", "<TOOLCALL>¦[…]¦</TOOLCALL>", _CALL, between=", "),
    "minimax m1": _format("MiniMax M1", "<tool_calls>¦\n…\n¦</tool_calls>", _CALL),
    "hunyuan a13b": _format("Hunyuan A13B, Jamba, Apriel", "<tool_calls>¦[…]¦</tool_calls>", _CALL, between=", "),
    "minimax m2": _invoke("MiniMax M2", "minimax:tool_call"),
    "minimax m3": _format(
        "MiniMax M3",
        f"{_MARK}<tool_call>¦\n…\n¦{_MARK}</tool_call>",
        f'{_MARK}<invoke name="{{name}}">{{arguments}}{_MARK}</invoke>',
        declaration.NestedArguments(_MARK),
        is_control=True,
    ),
    "deepseek v3": _format(
        "DeepSeek V3 and R1",
        "<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        is_control=True,
    ),
    "deepseek v3.1": _format(
        "DeepSeek V3.1",
        "<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        between="",
        is_control=True,
    ),
    **{
        f"deepseek {version}": _invoke(
            f"DeepSeek {version.upper()}", f"｜DSML｜{calls}", "｜DSML｜", ' string="{is_string}"', is_control=True
        )
        for version, calls in (("v3.2", "function_calls"), ("v4", "tool_calls"))
    },
    "hunyuan 3": _format(
        "Hunyuan 3",
        "<tool_calls:opensource>¦\n…\n¦</tool_calls:opensource>",
        "<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}</tool_call:opensource>",
        TaggedArguments(
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>",
            "\n",
            has_line_breaks=False,
        ),
    ),
    "muse glimmer": _invoke("Muse Glimmer", "atem:function_calls", "atem:"),
    "seed": _format(
        "Seed OSS",
        "<seed:tool_call>¦\n…\n¦</seed:tool_call>",
        "<function={name}>\n{arguments}</function>",
        TaggedArguments("<parameter={key}>", "</parameter>", "\n"),
        repeats=True,
    ),
    "minicpm 5": _format(
        "MiniCPM 5",
        "…",
        '<function name="{name}">{arguments}</function>',
        TaggedArguments('<param name="{key}">', "</param>"),
    ),
    "command": _format(
        "Command A and R7B, North",
        "<|START_ACTION|>¦[\n    …\n]¦<|END_ACTION|>",
        '{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}',
        between=",\n    ",
        is_control=True,
    ),
    **{
        f"command r+{variant}": _format(
            "Command R and R+", f"Action:{space}```json\n¦[\n…\n]¦```", _COMMAND_CALL, between=",\n"
        )
        for variant, space in (("", "\n"), (", on one line", " "))
    },
    "apertus": _format(
        "Apertus", "<|tools_prefix|>¦[…]¦<|tools_suffix|>", '{"{name}": {arguments}}', between=", ", is_control=True
    ),
    "solar": _format(
        "Solar",
        "<|tool_calls|>…<|calls|>",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
        between="",
        is_control=True,
    ),
    "gigachat 3": _format("GigaChat 3", "<|function_call|>…", _CALL, repeats=True, is_control=True),
    "gigachat 3 of 2025": _format(
        "GigaChat 3 of 2025",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n…<|message_sep|>",
        _CALL,
        between="",
        repeats=True,
    ),
    "kimi": _format(
        "Kimi K2",
        "<|tool_calls_section_begin|>…<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        between="",
        is_control=True,
    ),
    "mistral": _format("Mistral", "[TOOL_CALLS]¦[…]¦", _CALL, between=", ", is_control=True),
    **{
        name: _format(models, "[TOOL_CALLS]…", call, between="", repeats=True, is_control=True)
        for name, models, call in (
            ("mistral small", "Mistral Small 3.2", "{name}[CALL_ID]{id}[ARGS]{arguments}"),
            ("ministral", "Ministral, Magistral, Devstral", "{name}[ARGS]{arguments}"),
        )
    },
    "gemma": _format(
        "Gemma 4",
        "<|tool_call>…<tool_call|>",
        "call:{name}{arguments}",
        declaration.JSONArguments(TOKEN_QUOTE),
        between="",
        repeats=True,
        is_control=True,
    ),
    "phi 4 mini": _format("Phi 4 mini", "<|tool_call|>¦[…]¦<|/tool_call|>", _CALL, between=",", is_control=True),
    "granite 3": _format("Granite 3", "<|tool_call|>¦[…]¦", _CALL, between=",", is_control=True),
    "internlm 2.5": _format(
        "InternLM 2.5",
        "<|action_start|><|plugin|>¦\n…<|action_end|>",
        _CALL_WITH_PARAMETERS,
        between="",
        repeats=True,
        is_control=True,
    ),
    "firefunction": _format("FireFunction", "functools[…]¦", _CALL, between=", "),
    "lfm2": _format(
        "LFM2",
        "<|tool_call_start|>¦[…]¦<|tool_call_end|>",
        "{name}{arguments}",
        _PYTHON,
        between=", ",
        is_control=True,
    ),
    "minicpm 3": _format(
        "MiniCPM 3",
        "<|tool_call_start|>¦\n```python\n…\n```\n¦<|tool_call_end|>",
        "{name}{arguments}",
        _PYTHON,
        is_control=True,
    ),
    "olmo 3": _format("OLMo 3", "<function_calls>…</function_calls>", "{name}{arguments}", _PYTHON),
    **{
        f"glm {version}": _format(
            f"GLM {version}",
            f"<tool_call>…{space}¦</tool_call>",
            f"{{name}}{space}{{arguments}}",
            TaggedArguments(
                f"<arg_key>{{key}}</arg_key>{space}<arg_value>", "</arg_value>", space, has_line_breaks=False
            ),
            between=space,
            repeats=True,
        )
        for version, space in (("4.6", "\n"), ("4.7", ""))
    },
    "llama 3": _format(
        "Llama 3",
        "<|python_tag|>…",
        '{"type": "function", "name": "{name}", "parameters": {arguments}}',
        between="; ",
        is_control=True,
    ),
    "llama 3.1": _format("Llama 3.1", "…", "<function={name}>{arguments}</function>"),
    "gpt-oss": _format("gpt-oss", "…", f"{CALL}functions.{{name}}<|message|>{{arguments}}{END_OF_CALL}", between=""),
    "llama 3, bare": _format("Llama 3.2", "…", _CALL_WITH_PARAMETERS),
    "described": _format("Models whose chat template has no tools, which a system message describes", "…", _CALL),
    "llama 4": _format("Llama 4", "¦[…]¦", "{name}{arguments}", _PYTHON, between=", "),
    "chatglm": _format("ChatGLM 3, GLM-4 9B", "…", "{name}\n{arguments}"),
}

#: The format that `localllm.chat.rendering.described_tools` describes.
DESCRIBED = FORMATS["described"]


# -- Tables of the parser ------------------------------------------------------------------------------------------

_ALL = tuple(FORMATS.values())
#: Opening tags and their closing tags; a tag that is its own closing tag ends at the next one or with the reply.
TAGS = {format_.opening or format_.tag_of_head: format_.end for format_ in reversed(_ALL) if not format_.is_bare}
#: Opening tags that are a part of the call.
TAGS_IN_CALLS = {format_.tag_of_head for format_ in _ALL} - {""}
#: Opening tags that also end reasoning.
CONTROL_TAGS = tuple(dict.fromkeys(format_.opening for format_ in _ALL if format_.is_control))
#: The format whose calls have the tool's name as their only key.
NAMED_TAG = FORMATS["apertus"].opening
#: Starts of calls that have tags.
BEGINNINGS = tuple(dict.fromkeys(format_.before_name for format_ in _ALL if format_.before_name))
#: Ends of calls, without JSON's brackets.
_TAILS = [format_.tail.strip().removeprefix("```") for format_ in _ALL if format_.tail.strip() not in ("", "}")]
ENDS = tuple(dict.fromkeys([*_TAILS, "```python", "```", "<|tool_call_end|>"]))
#: Formats of arguments between tags, by the first tag.
TAGGED = {f.arguments.key_tag: f.arguments for f in _ALL if isinstance(f.arguments, TaggedArguments)}
