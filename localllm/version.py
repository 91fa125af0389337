"""The version of localllm."""

__version__ = "0.2.0.dev0"
