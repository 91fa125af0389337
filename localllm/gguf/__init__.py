"""Read GGUF files, whose contents are checked before use."""

from localllm.gguf.file import GGUFFile, Metadata, MetadataValue, StringArray, TensorInfo

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "StringArray", "TensorInfo"]
