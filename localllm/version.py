"""The version of localllm."""

__version__ = "0.4.0"
