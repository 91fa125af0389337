"""Text to token ids and back, from the metadata of a GGUF file alone."""

from localllm.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
