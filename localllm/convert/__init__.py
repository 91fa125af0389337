"""From Hugging Face's checkpoints to GGUF files."""

from localllm.convert.checkpoint import Checkpoint
from localllm.convert.mmproj import MmprojCheckpoint

__all__ = ["Checkpoint", "MmprojCheckpoint"]
