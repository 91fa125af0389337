"""Measure what the grammar of tool calls costs: decoding with it and without it, in turn, and the first mask.

    python -m tests.benchmarks.tool_grammar model.gguf -t 2 --rounds 8

Ten tools have 20 properties each.  The reply continues a call inside a string, where every token needs a mask, and
a reply in free text, where the server only searches for the start of a call.  The time of the first mask is the
additional time to the first token of a request whose tools are new and whose prompt is cached.  The exit status is
1 if decoding gets more than 2% slower, or if the median first mask takes more than 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import localllm
from localllm.kernels.cpu.host import cpu_model
from tests.benchmarks.results import even_line

N_TOOLS, N_PROPERTIES = 10, 20
#: Most additional time of decoding, and of the first token in seconds.
MOST_COST, MOST_FIRST_S = 0.02, 0.05

TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Starts of replies: free text, and a string inside a call.
STARTS = {"text": "", "call": '<tool_call>\n{"name": "tool_0", "arguments": {"property_0": "Once upon a time'}

_versions = count()


def tools() -> list[dict[str, Any]]:
    """Return tools whose schemas no earlier request had."""
    version = next(_versions)
    properties = {
        f"property_{i}": {"type": ("string", "integer", "boolean", "number")[i % 4]} for i in range(N_PROPERTIES - 1)
    }
    properties[f"version_{version}"] = {"enum": [f"{version}", None]}
    schema = {"type": "object", "properties": properties, "required": ["property_0"]}
    return [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(N_TOOLS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, default=200, help="tokens of each reply")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    messages = [{"role": "user", "content": "Tell me a long story about a ship."}]

    with (
        localllm.load(arguments.model, threads=arguments.threads, context=4096, chat_template=TEMPLATE) as llm,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")

        def run(start: str, tools: Sequence[Mapping[str, object]], tool_grammar: bool) -> tuple[float, float]:
            """Return seconds per token of decoding, and seconds to the first token."""
            began = time.perf_counter()
            stream = llm.stream_chat(
                messages,
                tools=tools,
                reply_prefix=start,
                tool_grammar=tool_grammar,
                max_tokens=arguments.tokens,
                temperature=0.0,
                ignore_eos=True,
            )
            first = time.perf_counter() - began
            for _ in stream:
                pass
            timings = stream.timings
            return timings.decode_s / max(1, timings.decode_tokens), first + timings.first_token_s

        print(f"{cpu_model()}, {arguments.threads} threads, {arguments.model}")
        print(even_line(["reply", "free ms/token", "grammar", "cost", "first mask ms", "longest"]))
        is_ok = True
        for name, start in STARTS.items():
            run(start, tools(), True)
            pairs = []
            for _ in range(arguments.rounds):
                same = tools()
                pairs.append((run(start, same, False), run(start, same, True)))
            free, held = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
            cost = statistics.median(held[0] / free[0] - 1 for free, held in pairs)
            masks = [held[1] - free[1] for free, held in pairs]
            cells = [f"{free * 1e3:.3f}", f"{held * 1e3:.3f}", f"{cost:+.1%}"]
            print(even_line([name, *cells, f"{statistics.median(masks) * 1e3:.1f}", f"{max(masks) * 1e3:.1f}"]))
            is_ok &= cost <= MOST_COST and statistics.median(masks) <= MOST_FIRST_S
    return int(not is_ok)


if __name__ == "__main__":
    sys.exit(main())
