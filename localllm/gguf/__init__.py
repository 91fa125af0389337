"""GGUF files: what is in one, checked before it is believed."""

from localllm.gguf.file import GGUFFile, Metadata, MetadataValue, StringArray, TensorInfo

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "StringArray", "TensorInfo"]
