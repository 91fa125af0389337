"""llama.cpp's own tests of its server, run against ``localllm serve``."""
