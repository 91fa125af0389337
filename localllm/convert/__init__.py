"""From Hugging Face's checkpoints to GGUF files."""

from localllm.convert.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
