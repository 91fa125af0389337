"""Converts text to token ids and back, using only the metadata of a GGUF file."""

from localllm.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
