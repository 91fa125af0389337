"""Run large language models on the machine you have."""
