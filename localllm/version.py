"""The version of localllm."""

__version__ = "0.3.0"
