"""Formats of tool calls, one declaration each.

No two formats conflict, so the parser is built from all declarations and reads every format for every model.
"""

from __future__ import annotations

from typing import Any

from localllm.chat.calls.declaration import (
    CallFormat,
    JSONArguments,
    NestedArguments,
    PythonArguments,
    TaggedArguments,
)
from localllm.chat.calls.json_text import TOKEN_QUOTE
from localllm.chat.thinking import CALL, END_OF_CALL

_JSON = JSONArguments()
_PYTHON = PythonArguments()
_PARAMETER = TaggedArguments('<parameter name="{key}">', "</parameter>", "\n")
_DSML = TaggedArguments('<｜DSML｜parameter name="{key}" string="{is_string}">', "</｜DSML｜parameter>", "\n")
_MARK = "]<]minimax[>["


def _call(key: str = "arguments", name: str = "name", more: str = "") -> str:
    return f'{{{more}"{name}": "{{name}}", "{key}": '


def _json(models: str, opening: str, closing: str = "", head: str = _call(), **more: Any) -> CallFormat:
    """A format whose calls are JSON objects."""
    return CallFormat(models, head, _JSON, "}", opening, closing, **more)


_LIST: dict[str, Any] = {"inside": ("[", "]"), "between": ", "}
_LINES = ("\n", "\n")

#: By name. The parser tries heads in this order.
FORMATS = {
    "hermes": _json("Hermes 2 and 3, Qwen 2.5 and 3", "<tool_call>", "</tool_call>", inside=_LINES, repeats=True),
    "qwen coder": CallFormat(
        "Qwen 3 Coder, 3.5 and 3.6, Nemotron 3",
        "<function={name}>\n",
        TaggedArguments("<parameter={key}>\n", "\n</parameter>", "\n"),
        "</function>",
        "<tool_call>",
        "</tool_call>",
        _LINES,
        repeats=True,
    ),
    "nemotron 2": _json("Nemotron 2", "<TOOLCALL>", "</TOOLCALL>", **_LIST),
    "minimax m1": _json("MiniMax M1", "<tool_calls>", "</tool_calls>", inside=_LINES),
    "hunyuan a13b": _json("Hunyuan A13B, Jamba, Apriel", "<tool_calls>", "</tool_calls>", **_LIST),
    "minimax m2": CallFormat(
        "MiniMax M2",
        '<invoke name="{name}">\n',
        _PARAMETER,
        "</invoke>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _LINES,
    ),
    "minimax m3": CallFormat(
        "MiniMax M3",
        f'{_MARK}<invoke name="{{name}}">',
        NestedArguments(_MARK),
        f"{_MARK}</invoke>",
        f"{_MARK}<tool_call>",
        f"{_MARK}</tool_call>",
        _LINES,
        is_control=True,
    ),
    "deepseek v3": CallFormat(
        "DeepSeek V3 and R1",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        _JSON,
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        is_control=True,
    ),
    "deepseek v3.1": CallFormat(
        "DeepSeek V3.1",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        _JSON,
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        between="",
        is_control=True,
    ),
    **{
        f"deepseek {version}": CallFormat(
            f"DeepSeek {version.upper()}",
            '<｜DSML｜invoke name="{name}">\n',
            _DSML,
            "</｜DSML｜invoke>",
            f"<｜DSML｜{tag}>",
            f"</｜DSML｜{tag}>",
            _LINES,
            is_control=True,
        )
        for version, tag in (("v3.2", "function_calls"), ("v4", "tool_calls"))
    },
    "hunyuan 3": CallFormat(
        "Hunyuan 3",
        "<tool_call:opensource>{name}<tool_sep:opensource>\n",
        TaggedArguments(
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>",
            "\n",
            has_line_breaks=False,
        ),
        "</tool_call:opensource>",
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        _LINES,
    ),
    "muse glimmer": CallFormat(
        "Muse Glimmer",
        '<atem:invoke name="{name}">\n',
        TaggedArguments('<atem:parameter name="{key}">', "</atem:parameter>", "\n"),
        "</atem:invoke>",
        "<atem:function_calls>",
        "</atem:function_calls>",
        _LINES,
    ),
    "seed": CallFormat(
        "Seed OSS",
        "<function={name}>\n",
        TaggedArguments("<parameter={key}>", "</parameter>", "\n"),
        "</function>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        _LINES,
        repeats=True,
    ),
    "minicpm 5": CallFormat(
        "MiniCPM 5", '<function name="{name}">', TaggedArguments('<param name="{key}">', "</param>"), "</function>"
    ),
    "command": _json(
        "Command A and R7B, North",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _call("parameters", "tool_name", '"tool_call_id": "{number}", '),
        inside=("[\n    ", "\n]"),
        between=",\n    ",
        is_control=True,
    ),
    **{
        f"command r+{variant}": _json(
            "Command R and R+",
            f"Action:{space}```json\n",
            "```",
            _call("parameters", "tool_name"),
            inside=("[\n", "\n]"),
            between=",\n",
        )
        for variant, space in (("", "\n"), (", on one line", " "))
    },
    "apertus": _json(
        "Apertus",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        '{"{name}": ',
        inside=("[", "]"),
        between=", ",
        is_control=True,
    ),
    "solar": CallFormat(
        "Solar",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
        _JSON,
        "<|tool_call:end|>",
        "<|tool_calls|>",
        "<|calls|>",
        between="",
        is_control=True,
    ),
    "gigachat 3": _json("GigaChat 3", "<|function_call|>", repeats=True, is_control=True),
    "gigachat 3 of 2025": _json(
        "GigaChat 3 of 2025",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "<|message_sep|>",
        between="",
        repeats=True,
    ),
    "kimi": CallFormat(
        "Kimi K2",
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        _JSON,
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        between="",
        is_control=True,
    ),
    "mistral": _json("Mistral", "[TOOL_CALLS]", is_control=True, **_LIST),
    "mistral small": CallFormat(
        "Mistral Small 3.2",
        "{name}[CALL_ID]{id}[ARGS]",
        _JSON,
        opening="[TOOL_CALLS]",
        between="",
        repeats=True,
        is_control=True,
    ),
    "ministral": CallFormat(
        "Ministral, Magistral, Devstral",
        "{name}[ARGS]",
        _JSON,
        opening="[TOOL_CALLS]",
        between="",
        repeats=True,
        is_control=True,
    ),
    "gemma": CallFormat(
        "Gemma 4",
        "call:{name}",
        JSONArguments(TOKEN_QUOTE),
        opening="<|tool_call>",
        closing="<tool_call|>",
        between="",
        repeats=True,
        is_control=True,
    ),
    "phi 4 mini": _json(
        "Phi 4 mini", "<|tool_call|>", "<|/tool_call|>", inside=("[", "]"), between=",", is_control=True
    ),
    "granite 3": _json("Granite 3", "<|tool_call|>", inside=("[", "]"), between=",", is_control=True),
    "internlm 2.5": _json(
        "InternLM 2.5",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        _call("parameters"),
        inside=("\n", ""),
        between="",
        repeats=True,
        is_control=True,
    ),
    "firefunction": _json("FireFunction", "functools[", inside=("", "]"), between=", "),
    "lfm2": CallFormat(
        "LFM2", "{name}", _PYTHON, "", "<|tool_call_start|>", "<|tool_call_end|>", ("[", "]"), ", ", is_control=True
    ),
    "minicpm 3": CallFormat(
        "MiniCPM 3",
        "{name}",
        _PYTHON,
        "",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        ("\n```python\n", "\n```\n"),
        is_control=True,
    ),
    "olmo 3": CallFormat("OLMo 3", "{name}", _PYTHON, "", "<function_calls>", "</function_calls>"),
    **{
        f"glm {version}": CallFormat(
            f"GLM {version}",
            "{name}" + space,
            TaggedArguments(
                f"<arg_key>{{key}}</arg_key>{space}<arg_value>", "</arg_value>", space, has_line_breaks=False
            ),
            "",
            "<tool_call>",
            "</tool_call>",
            ("", space),
            space,
            repeats=True,
        )
        for version, space in (("4.6", "\n"), ("4.7", ""))
    },
    "llama 3": _json(
        "Llama 3",
        "<|python_tag|>",
        "",
        _call("parameters", more='"type": "function", '),
        between="; ",
        is_control=True,
    ),
    "llama 3.1": CallFormat("Llama 3.1", "<function={name}>", _JSON, "</function>"),
    "gpt-oss": CallFormat("gpt-oss", f"{CALL}functions.{{name}}<|message|>", _JSON, END_OF_CALL, between=""),
    "llama 3, bare": _json("Llama 3.2", "", "", _call("parameters")),
    "described": _json("Models whose chat template has no tools, which a system message describes", ""),
    "llama 4": CallFormat("Llama 4", "{name}", _PYTHON, inside=("[", "]"), between=", "),
    "chatglm": CallFormat("ChatGLM 3, GLM-4 9B", "{name}\n", _JSON),
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
