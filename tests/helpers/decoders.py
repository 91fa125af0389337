"""Decoders for tests, which worker processes import."""

from __future__ import annotations

import os
import time

from localllm.models.encoders.isolation import Decoded


def worker_pid(source: bytes, where: str) -> Decoded:
    return Decoded({"pid": os.getpid()}, source)


def sleep(source: bytes, where: str) -> Decoded:
    """Take a minute."""
    time.sleep(60)
    return Decoded({}, b"")


def crash(source: bytes, where: str) -> Decoded:
    """End the process, as a fault of a decoder in C does."""
    os.abort()


def use_memory(source: bytes, where: str, n_bytes: int) -> Decoded:
    """Take memory."""
    return Decoded({}, bytearray(n_bytes)[:1])
