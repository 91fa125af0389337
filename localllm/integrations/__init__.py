"""localllm inside other programs: what they load by name, and what serves it on several machines."""
