"""Coding agents that ``localllm launch`` starts: how each is installed, and which settings connect it to a server.

Each agent is one declaration.  Strings in it may contain the fields of `Connection` in braces, such as ``{url}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Key for servers that require none, because many agents reject an empty key.
NO_KEY = "localllm"

#: Share of the context for a reply, for agents whose settings have a limit.
_REPLY_SHARE = 4


@dataclass(frozen=True)
class Connection:
    """The server of an agent, its model, and the folder that contains the files of `Agent.files`."""

    url: str  # such as http://127.0.0.1:8080
    model: str  # the model's name at the server
    key: str
    context: int  # tokens
    folder: str

    def fill(self, value: Any) -> Any:
        """Return a value with the fields in its strings.  A string that is only a field becomes the field's value."""
        fields = asdict(self) | {
            "quoted_model": json.dumps(self.model, ensure_ascii=False),
            "reply": self.context // _REPLY_SHARE,
            "prompt": self.context - self.context // _REPLY_SHARE,
        }
        pattern = re.compile(rf"\{{({'|'.join(fields)})\}}")

        def filled(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {filled(name): filled(item) for name, item in value.items()}
            if isinstance(value, str):
                only = pattern.fullmatch(value)
                return fields[only[1]] if only else pattern.sub(lambda match: str(fields[match[1]]), value)
            return [filled(item) for item in value] if isinstance(value, Sequence) else value

        return filled(value)


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Mappings in ``environment`` and ``files`` are written as JSON, which is also valid YAML.
    """

    title: str
    program: str | None  # its executable; None if its settings are printed instead
    install: str  # a command line, or an address
    context: int  # smallest sensible context in tokens: the prompt, some files, and replies
    environment: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)  # contents by name, in a folder that is removed afterwards
    arguments: Sequence[str] = ()  # arguments before the user's
    settings: Any = None  # printed for the user to copy
    uses_tools: bool = True  # whether the model's chat template must support tools


AGENTS = {
    "codex": Agent(
        "Codex",
        "codex",
        "npm install -g @openai/codex",
        16_384,
        environment={"LOCALLLM_API_KEY": "{key}"},
        arguments=(
            *("-c", "model={quoted_model}"),
            *("-c", "model_context_window={context}"),
            *("-c", 'model_provider="localllm"'),
            "-c",
            'model_providers.localllm={ name = "localllm", base_url = "{url}/v1", wire_api = "responses", '
            'env_key = "LOCALLLM_API_KEY" }',
        ),
    ),
    "opencode": Agent(
        "opencode",
        "opencode",
        "npm install -g opencode-ai",
        16_384,
        environment={
            "OPENCODE_CONFIG_CONTENT": {
                "provider": {
                    "localllm": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "localllm",
                        "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
                        "models": {"{model}": {"limit": {"context": "{context}", "output": "{reply}"}}},
                    }
                },
                "model": "localllm/{model}",
                "small_model": "localllm/{model}",
            }
        },
    ),
    "qwen-code": Agent(
        "Qwen Code",
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        32_768,
        environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{model}"},
        arguments=("--auth-type", "openai"),
    ),
    "pi": Agent(
        "pi",
        "pi",
        "npm install -g @earendil-works/pi-coding-agent",
        8_192,
        environment={
            "PI_LOCALLLM": {
                "baseUrl": "{url}/v1",
                "apiKey": "{key}",
                "api": "openai-completions",
                "models": [
                    {
                        "id": "{model}",
                        "name": "{model}",
                        "reasoning": False,
                        "input": ["text"],
                        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                        "contextWindow": "{context}",
                        "maxTokens": "{reply}",
                    }
                ],
            }
        },
        files={
            "localllm.ts": "export default (pi) => pi.registerProvider('localllm', "
            "JSON.parse(process.env.PI_LOCALLLM));\n"
        },
        arguments=("-e", "{folder}/localllm.ts", "--provider", "localllm", "--model", "{model}"),
    ),
    "cline": Agent(
        "Cline",
        "cline",
        "npm install -g cline",
        16_384,
        environment={"CLINE_PROVIDER_SETTINGS_PATH": "{folder}/providers.json"},
        files={
            "providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "apiKey": "{key}",
                            "baseUrl": "{url}/v1",
                            "model": "{model}",
                        },
                        "updatedAt": "2026-01-01T00:00:00.000Z",  # required
                    }
                },
            }
        },
    ),
    "continue": Agent(
        "Continue",
        "cn",
        "npm install -g @continuedev/cli",
        16_384,
        files={
            "config.yaml": {
                "name": "localllm",
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {
                        "name": "{model}",
                        "provider": "openai",
                        "model": "{model}",
                        "apiBase": "{url}/v1",
                        "apiKey": "{key}",
                        "roles": ["chat", "edit", "apply"],
                        "capabilities": ["tool_use"],
                        "defaultCompletionOptions": {"contextLength": "{context}", "maxTokens": "{reply}"},
                    }
                ],
            }
        },
        arguments=("--config", "{folder}/config.yaml"),
    ),
    "aider": Agent(
        "aider",
        "aider",
        "pip install aider-chat",
        8_192,
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}"},
        files={
            "metadata.json": {
                "openai/{model}": {
                    "max_input_tokens": "{context}",
                    "max_output_tokens": "{reply}",
                    "litellm_provider": "openai",
                    "mode": "chat",
                }
            }
        },
        arguments=("--model", "openai/{model}", "--model-metadata-file", "{folder}/metadata.json"),
        uses_tools=False,
    ),
    "copilot": Agent(
        "Copilot CLI",
        "copilot",
        "npm install -g @github/copilot",
        32_768,
        environment={
            "COPILOT_PROVIDER_BASE_URL": "{url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "{prompt}",
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "{reply}",
            "COPILOT_MODEL": "{model}",
        },
    ),
    "crush": Agent(
        "Crush",
        "crush",
        "npm install -g @charmland/crush",
        16_384,
        environment={"CRUSH_GLOBAL_CONFIG": "{folder}", "CRUSH_GLOBAL_DATA": "{folder}", "LOCALLLM_API_KEY": "{key}"},
        files={
            "crush.json": {
                "providers": {
                    "localllm": {
                        "name": "localllm",
                        "type": "openai-compat",
                        "base_url": "{url}/v1",
                        "api_key": "$LOCALLLM_API_KEY",
                        "models": [
                            {
                                "id": "{model}",
                                "name": "{model}",
                                "context_window": "{context}",
                                "default_max_tokens": "{reply}",
                            }
                        ],
                    }
                },
                "models": {
                    "large": {"model": "{model}", "provider": "localllm"},
                    "small": {"model": "{model}", "provider": "localllm"},
                },
            }
        },
    ),
    "goose": Agent(
        "goose",
        "goose",
        "https://block.github.io/goose/docs/getting-started/installation",
        16_384,
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": "{model}",
            "GOOSE_CONTEXT_LIMIT": "{context}",
            "OPENAI_HOST": "{url}",
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": "{key}",
        },
    ),
    "zed": Agent(
        "Zed",
        None,
        "https://zed.dev/download",
        16_384,
        settings={
            "language_models": {
                "llama.cpp": {
                    "api_url": "{url}",
                    "auto_discover": False,
                    "available_models": [{"name": "{model}", "max_tokens": "{context}", "supports_tools": True}],
                }
            }
        },
    ),
    "claude": Agent(
        "Claude Code",
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        32_768,
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": "{model}" for name in ("OPUS", "SONNET", "HAIKU")},
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{reply}",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # its value changes with each request, which empties the cache
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
}
