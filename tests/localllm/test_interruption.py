"""Models without references, and Ctrl-C: nothing hangs, and no warning appears."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import localllm
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually, in_engine
from tests.helpers.tiny_models import tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("interruption") / "tiny.gguf")


def n_threads() -> int:
    return sum(thread.name == "localllm-engine" for thread in threading.enumerate())


def start_and_drop(path: Path) -> weakref.ref[object]:
    llm = localllm.load(path, device="reference")
    next(llm.stream("hello", ignore_eos=True))
    return weakref.ref(in_engine(llm, lambda loop: loop.runner))


def test_an_unreferenced_model_ends_its_thread_and_frees_its_memory(tiny: Path) -> None:
    n_before = n_threads()
    runner = start_and_drop(tiny)
    gc.collect()
    assert eventually(lambda: n_threads() == n_before)
    gc.collect()
    assert runner() is None


def test_a_stream_keeps_its_model(tiny: Path) -> None:
    """A reader still receives the rest after the last reference to the model is gone."""

    def start() -> localllm.Stream:
        return localllm.load(tiny, device="reference").stream("hello", max_tokens=100, ignore_eos=True)

    n_before = n_threads()
    stream = start()
    gc.collect()
    assert len(stream.read().ids) == 100
    del stream
    gc.collect()
    assert eventually(lambda: n_threads() == n_before)


def test_a_stream_does_not_keep_the_memory_of_a_closed_model(tiny: Path) -> None:
    llm = localllm.load(tiny, device="reference", draft_model=tiny)
    stream = llm.stream("hello", max_tokens=3, ignore_eos=True)
    stream.read()
    runners = in_engine(llm, lambda loop: [weakref.ref(r) for r in (loop.runner, loop.draft_model.runner)])  # type: ignore[union-attr]
    llm.close()
    gc.collect()
    assert [runner() for runner in runners] == [None, None]
    assert stream.drafts is not None


def process(work: str, path: Path) -> subprocess.Popen[str]:
    """Start Python with a model as ``llm`` and run code."""
    source = f"import signal, threading, localllm\nllm = localllm.load({str(path)!r}, device='reference')\n{work}"
    return subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # the test run may ignore it
expected = llm.generate("hello", temperature=0, max_tokens=5, ignore_eos=True).ids
WAYS = {
    "generate": lambda: llm.generate("hello", ignore_eos=True, processors=(say,)),
    "stream": lambda: list(llm.stream("hello", ignore_eos=True, processors=(say,))),
    "many": lambda: list(llm.generate_many(["hello"] * 3, ignore_eos=True, processors=(say,))),
}
n_said = 0
def say(ids, logits):
    global n_said
    n_said += 1
    if n_said == 2:
        print("writing", flush=True)
    go_on.wait(0.05)
    return logits
go_on = threading.Event()
try:
    WAYS[way]()
except KeyboardInterrupt:
    print("interrupted", flush=True)
go_on.set()
assert llm.generate("hello", temperature=0, max_tokens=5, ignore_eos=True).ids == expected
print("usable", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize("way", ["generate", "stream", "many"])
def test_ctrl_c_interrupts_and_leaves_the_model_usable(tiny: Path, way: str) -> None:
    running = process(f"way = {way!r}\n{INTERRUPTED}", tiny)
    assert running.stdout is not None
    assert running.stdout.readline() == "writing\n"
    running.send_signal(signal.SIGINT)
    said, complaints = running.communicate(timeout=120)
    assert (said, complaints, running.returncode) == ("interrupted\nusable\n", "", 0)
