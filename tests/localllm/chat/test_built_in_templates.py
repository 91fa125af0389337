"""Built-in templates compared with llama.cpp's output (``llama_chat_apply_template``, 0.3.36)."""

from __future__ import annotations

import pytest

import localllm
from localllm import TemplateError
from localllm.chat import ChatTemplate
from localllm.chat.built_in_templates import NAMES, built_in

MESSAGES = [
    {"role": "system", "content": " S "},
    {"role": "user", "content": " U "},
    {"role": "assistant", "content": " A "},
    {"role": "user", "content": "Q"},
]
#: llama.cpp's prompts.
EXPECTED = {
    "chatml": (
        "<|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\n A <|im_end|>\n"
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eo"
        "t_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama4": (
        "<|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\nU<|eot|><|header_sta"
        "rt|>assistant<|header_end|>\n\nA<|eot|><|header_start|>user<|header_end|>\n\nQ<|eot|><|header_start|>assis"
        "tant<|header_end|>\n\n"
    ),
    "command-r": (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>U<|END_O"
        "F_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_"
        "TOKEN|>Q<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "phi3": (
        "<|system|>\n S <|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n A <|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|> S <|im_end|><|im_start|>user<|im_sep|> U <|im_end|><|im_start|>assistant<|im_"
        "sep|> A <|im_end|><|im_start|>user<|im_sep|>Q<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
    "zephyr": (
        "<|system|>\n S <|endoftext|>\n<|user|>\n U <|endoftext|>\n<|assistant|>\n A <|endoftext|>\n<|user|>\nQ<|en"
        "doftext|>\n<|assistant|>\n"
    ),
    "granite": (
        "<|start_of_role|>system<|end_of_role|> S <|end_of_text|>\n<|start_of_role|>user<|end_of_role|> U <|end_of_"
        "text|>\n<|start_of_role|>assistant<|end_of_role|> A <|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Q"
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    ),
    "falcon3": "<|system|>\n S \n<|user|>\n U \n<|assistant|>\n A \n<|user|>\nQ\n<|assistant|>\n",
    "chatglm4": "[gMASK]<sop><|system|>\n S <|user|>\n U <|assistant|>\n A <|user|>\nQ<|assistant|>\n",
    "megrez": (
        "<|role_start|>system<|role_end|> S <|turn_end|><|role_start|>user<|role_end|> U <|turn_end|><|role_start|>"
        "assistant<|role_end|> A <|turn_end|><|role_start|>user<|role_end|>Q<|turn_end|><|role_start|>assistant<|ro"
        "le_end|>"
    ),
    "bailing": (
        "<role>SYSTEM</role> S <role>HUMAN</role> U <role>ASSISTANT</role> A <role>HUMAN</role>Q<role>ASSISTANT</ro"
        "le>"
    ),
    "deepseek3": " S \n\n<｜User｜> U <｜Assistant｜> A <｜end▁of▁sentence｜><｜User｜>Q<｜Assistant｜>",
    "mistral-v7": "[SYSTEM_PROMPT]  S [/SYSTEM_PROMPT][INST]  U [/INST]  A </s>[INST] Q[/INST]",
    "mistral-v7-tekken": "[SYSTEM_PROMPT] S [/SYSTEM_PROMPT][INST] U [/INST] A </s>[INST]Q[/INST]",
}


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_llama_cpp(name: str) -> None:
    assert ChatTemplate(built_in(name) or "").render(MESSAGES) == EXPECTED[name]


def test_a_model_is_loaded_with_one_by_its_name() -> None:
    with localllm.load(chat_template="llama3") as llm:
        assert llm.chat_template.source == built_in("llama3")
        assert llm.detokenize(llm.tokenize_chat(MESSAGES)).count("Q") == 1


def test_others_are_no_templates() -> None:
    assert built_in("none") is None
    with pytest.raises(TemplateError):
        ChatTemplate(built_in("llama3") or "").render([{"role": "critic", "content": "x"}])
