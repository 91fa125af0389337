"""llama.cpp's tests of its server, run against ``localllm serve``."""
