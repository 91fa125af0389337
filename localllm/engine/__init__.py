"""Runs requests for tokens and logits on a model.

`request` defines a request, `scheduler` chooses the tokens of each step, `cache` manages cached tokens, and `engine`
contains the thread that runs all requests. The engine handles token ids only, not text.
"""
