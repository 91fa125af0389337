"""The command ``localllm``."""
