"""A process ends soon after its last step, with Python's exit code and nothing on standard error.

Each ending is a separate script.  The default run includes some of each group; CI runs all.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.data import ROOT

#: Processor seconds that an ending may take, which other programs hardly change: more means that it computes a text.
#: The wait of localllm at exit has no time limit in the scripts, so an ending that waits never ends.
END_CPU_S = 1.0
#: Seconds until a process counts as one that never ends.
NEVER_S = 120


@dataclass(frozen=True)
class Ending:
    """A script and its expected ending.

    Attributes:
        script: Python code.  The line BEGIN imports the helpers; without it, this is the first line.  STEP is for
            scripts that import localllm themselves: it marks the last step, like the helper `step()`.
        code: exit code.
        says: further output, as a regular expression.
        complaints: standard error, from Python itself.
        command: Python's arguments; the script is standard input if they do not contain it.
        needs: a required package; without it the test is skipped.
    """

    script: str
    code: int = 0
    says: str = ""
    complaints: str = ""
    command: tuple[str, ...] = ("-c", "{script}")
    needs: str = ""

    @property
    def source(self) -> str:
        lines = textwrap.dedent(self.script).strip() + "\n"
        if not re.search("^(BEGIN|STEP)$", lines, re.MULTILINE):
            lines = "BEGIN\n" + lines
        lines = lines.replace("BEGIN\n", "from tests.helpers.ending_script import *\n")
        return lines.replace("STEP\n", "import os; print('step', sum(os.times()[:4]), flush=True)\n")


#: Work of a process before its end.
WRITING = {
    "a stream abandoned early": """
        llm = load(); keep = busy(llm)
        for chunk in llm.stream('Hello'): break
        """,
    "a stream abandoned early, reference": """
        llm = load(device='reference')
        for chunk in llm.stream('Hello'): break
        """,
    "a stream read in part": "llm = load(); stream = llm.stream('Hello', ignore_eos=True); next(stream)",
    "a stream that nobody reads": "llm = load(); stream = llm.stream('Hello', ignore_eos=True)",
    "a stream that has paused": "llm = load(); stream = fill(llm.stream('Hello', ignore_eos=True))",
    "a prompt being evaluated": "llm = load(); stream = llm.stream('Once upon a time there was ' * 90)",
    "a processor": """
        llm = load(); keep = busy(llm)
        stream = llm.stream('Hello', ignore_eos=True, processors=(lambda ids, logits: logits,)); next(stream)
        """,
    "many texts": """
    llm = load(); texts = llm.generate_many(['Once upon a time ' * 190, *'abc' * 3], ignore_eos=True); next(texts)
    """,
    "drafts by a model": """
        llm = load(draft_model=DEMO)
        stream = llm.stream('Hi', speculate='draft', ignore_eos=True)
        stream.deliver_at_end(); time.sleep(0.02)
        """,
    "a schema": """
        llm = load(); keep = busy(llm)
        for chunk in llm.stream('Hi', json_schema=NUMBERS): break
        """,
    "a text that is whole": "llm = load(); write(llm)",
    "closed": "llm = load(); keep = busy(llm); llm.close()",
    "both dropped": "llm = load(); keep = busy(llm); del llm, keep",
    "asyncio, a task left": """
        llm = load()
        async def main():
            asyncio.create_task(llm.agenerate('Hello', ignore_eos=True)); await asyncio.sleep(0.02)
        run(main)
        """,
    "asyncio, the stream kept": """
        llm = load()
        async def main():
            global stream
            stream = llm.stream('Hello', ignore_eos=True)
            await anext(stream)
        run(main)
        """,
}

#: The end of the script: its lines, and the exit code.
LAST_STEPS: Mapping[str, tuple[str, int]] = {
    "end of script": ("step()", 0),
    "sys.exit": ("step(); sys.exit(3)", 3),
    "exception": ("quiet(); step(); raise ValueError('a fault of the user')", 1),
    "ctrl-c": ("ctrl_c()", -signal.SIGINT),
}

#: Holders of the model, and of open streams.
HELD = {
    "in a ContextVar": """
        import contextvars
        var = contextvars.ContextVar('llm'); var.set(load()); keep = busy(var.get())
        """,
    "in a thread-local of a daemon": """
        local = threading.local(); begun = threading.Event()
        def work():
            local.llm = load(); local.keep = busy(local.llm); begun.set(); time.sleep(99)
        threading.Thread(target=work, daemon=True).start(); begun.wait()
        """,
    "in a generator in a set": """
        def work():
            with load() as llm:
                keep = busy(llm)
                yield
        sys.texts = {texts := work()}; next(texts)
        """,
    "in a frozen heap": """
        import gc
        llm = load(); keep = busy(llm); gc.freeze(); gc.disable()
        """,
    "by an object that closes it": """
        class Bot:
            def __init__(self): self.llm = load(); self.keep = busy(self.llm)
            def __del__(self): self.llm.close()
        bot = Bot()
        """,
}

#: Functions that Python calls at exit, registered after importing localllm: models still work.
HANDLERS = {
    "generate": ("print(write(llm))", "5\n"),
    "an earlier stream": ("print(len(next(begun).ids))", "1\n"),
    "generate_many": ("print(len(list(llm.generate_many(['a', 'b'], max_tokens=2))))", "2\n"),
    "score": ("print(len(llm.score('Hello', [' you'])))", "1\n"),
    "save_prompts": ("print(llm.save_prompts('saved') >= 0)", "True\n"),
    "close": ("llm.close(); refused(lambda: write(llm))", "ClosedError\n"),
    "forget": ("llm.forget(); print(write(llm))", "5\n"),
    "asyncio": ("print(len(run(lambda: llm.agenerate('Hello', max_tokens=4, ignore_eos=True)).ids))", "4\n"),
    "a thread": ("t = threading.Thread(target=lambda: print(write(llm))); t.start(); t.join()", "5\n"),
    "load": ("other = load(); print(write(other)); other.keep = busy(other)", "5\n"),
}

#: The same, registered before importing localllm: models have stopped.
LATE_HANDLERS = {
    "generate": "refused(lambda: write(llm))",
    "an earlier stream": "refused(lambda: next(begun))",
    "score": "refused(lambda: llm.score('Hello', [' you']))",
    "load_prompts": "refused(lambda: llm.load_prompts('saved'))",
    "forget": "refused(llm.forget)",
    "asyncio": "refused(lambda: run(lambda: llm.agenerate('Hello')))",
    "load": "refused(load)",
    "a thread": "t = threading.Thread(target=refused, args=(lambda: write(llm),)); t.start(); t.join()",
    "close": "llm.close(); refused(lambda: write(llm))",
}

#: At exit, a thread, a child or another interpreter's loop uses the model.
OTHERS = {
    "handler between import and load": Ending(
        """
        import localllm, atexit
        atexit.register(lambda: (time.sleep(0.05), print(write(llm)), step()))
        BEGIN
        llm = load(); keep = busy(llm)
        """,
        says="5\n",
    ),
    "handler before import of names alone": Ending(
        """
        import atexit
        atexit.register(lambda: (refused(lambda: write(llm)), step()))
        from localllm import load
        llm = load(threads=2)
        BEGIN
        keep = busy(llm)
        """,
        says="ClosedError\n",
    ),
    "handler that joins a daemon": Ending("""
        import atexit
        atexit.register(lambda: (done.set(), step(), reader.join()))
        BEGIN
        llm = load(); done, begun = threading.Event(), threading.Event()
        def read():
            while not done.is_set():
                for chunk in llm.stream('Hello', ignore_eos=True): begun.set()
        reader = threading.Thread(target=read, daemon=True); reader.start(); begun.wait()
        """),
    "finalizer": Ending(
        """
        import weakref
        class Bot: pass
        llm = load(); keep = busy(llm); bot = Bot()
        weakref.finalize(bot, lambda: (print(write(llm)), step()))
        """,
        says="5\n",
    ),
    "handler that exits": Ending("""
        quiet()
        def leave():
            write(llm); step()
            raise SystemExit(5)
        sys.unraisablehook = lambda *_: None
        atexit.register(leave); llm = load(); keep = busy(llm)
        """),
    "object that generates when it goes": Ending(
        r"""
        class Bot:
            def __init__(self): self.llm = load(); self.keep = busy(self.llm)
            def __del__(self):
                try: write(self.llm)
                except ClosedError: os.write(1, b'closed\n')
        bot = Bot(); step()
        """,
        says="closed\n",
    ),
    "ctrl-c while it ends": Ending("""
        from localllm.kernels import process
        def interrupt(ids, logits):
            begun.set()
            if process.engines.is_over: signal.raise_signal(signal.SIGINT); time.sleep(0.01); step()
            return logits
        signal.signal(signal.SIGINT, signal.default_int_handler); begun = threading.Event(); llm = load()
        atexit.register(time.sleep, 0.01)
        stream = llm.stream('Hello', ignore_eos=True, processors=(lambda *a: (time.sleep(0.05), interrupt(*a))[1],))
        stream.deliver_at_end(); begun.wait()
        """),
    "a processor that never returns": Ending("""
        from localllm.kernels import process
        process.END_S = 0.2; begun = threading.Event()
        def stuck(ids, logits): begun.set(); time.sleep(99)
        llm = load(); atexit.register(lambda: llm.close())
        stream = llm.stream('Hello', processors=(stuck,)); begun.wait(); step()
        """),
    "a daemon reads": Ending(
        """
        llm = load(); begun = threading.Event()
        def read():
            while True:
                for chunk in llm.stream('Hello', ignore_eos=True): begun.set()
        threading.Thread(target=read, daemon=True).start(); begun.wait(); step(); sys.exit(3)
        """,
        code=3,
    ),
    "a daemon tokenizes": Ending("""
        llm = load(); keep = busy(llm); begun = threading.Event()
        def work():
            while True: llm.tokenize('Hello ' * 4000); begun.set()
        threading.Thread(target=work, daemon=True).start(); begun.wait(); step()
        """),
    "a daemon evaluates": Ending("""
        from localllm.evaluate import perplexity
        llm = load(); begun = threading.Event()
        def work():
            while True:
                perplexity(llm, 'Once upon a time ' * 400, context=32, progress=lambda *_: begun.set())
        threading.Thread(target=work, daemon=True).start(); begun.wait(); step()
        """),
    "a daemon quantizes": Ending("""
        import numpy as np
        from localllm.quant.encode import quantize
        from localllm.quant.types import GGMLType
        rows = np.ones((4096, 256), np.float32); begun = threading.Event()
        def work():
            while True: quantize(rows, GGMLType.Q8_0, threads=2); begun.set()
        threading.Thread(target=work, daemon=True).start(); begun.wait(); step()
        """),
    "a daemon's event loop": Ending("""
        llm = load(); begun = threading.Event()
        async def read():
            while True:
                async for chunk in llm.stream('Hello', ignore_eos=True): begun.set()
        threading.Thread(target=run, args=(read,), daemon=True).start(); begun.wait(); step()
        """),
    "a thread continues after the script": Ending(
        """
        llm = load()
        def work():
            time.sleep(0.1)
            print(sum(write(llm) for _ in range(4)), flush=True)
            keep.append(busy(llm)); step()
        keep = []; threading.Thread(target=work).start()
        """,
        says="20\n",
    ),
    "a thread exits": Ending("""
        llm = load(); keep = busy(llm)
        def work():
            write(llm)
            sys.exit(3)
        t = threading.Thread(target=work); t.start(); t.join(); step()
        """),
    "a pool": Ending("""
        from concurrent.futures import ThreadPoolExecutor
        llm = load(); pool = ThreadPoolExecutor(3)
        futures = [pool.submit(write, llm) for _ in range(9)]; keep = busy(llm)
        futures[-1].add_done_callback(lambda _: step())
        """),
    "closed while a thread reads": Ending("""
        llm = load(); begun = threading.Event()
        def read():
            with contextlib.suppress(ClosedError):
                while True:
                    for chunk in llm.stream('Hello', ignore_eos=True): begun.set()
        threading.Thread(target=read).start(); begun.wait(); llm.close(); step()
        """),
    "ctrl-c in a stream": Ending(
        """
        llm = load()
        with interruptible():
            while True:
                for chunk in llm.stream('Hello', ignore_eos=True): pass
        """,
        code=-signal.SIGINT,
    ),
    "ctrl-c in generate_many": Ending(
        """
        llm = load()
        with interruptible():
            list(llm.generate_many(['Hello'] * 99, ignore_eos=True))
        """,
        code=-signal.SIGINT,
    ),
    "ctrl-c in asyncio": Ending(
        """
        llm = load()
        async def read():
            while True:
                async for chunk in llm.stream('Hello', ignore_eos=True): pass
        with interruptible(): run(read)
        """,
        code=-signal.SIGINT,
    ),
    "ctrl-c in close": Ending(
        """
        llm = load()
        with interruptible():
            while True: keep = busy(llm); llm.close(); llm = load()
        """,
        code=-signal.SIGINT,
    ),
    "uvloop in a daemon": Ending(
        """
        import uvloop
        llm = load(); begun = threading.Event()
        async def read():
            while True:
                async for chunk in llm.stream('Hello', ignore_eos=True): begun.set()
        threading.Thread(target=lambda: uvloop.run(read()), daemon=True).start(); begun.wait(); step()
        """,
        needs="uvloop",
    ),
    "fork, the child ends with the parent's model": Ending("""
        llm = load(); keep = busy(llm)
        if child := os.fork(): os.waitpid(child, 0)
        step()
        """),
    "fork, the child has its own": Ending(
        """
        llm = load(); keep = busy(llm)
        child = os.fork()
        if not child: own = load(); keep = busy(own)
        if not child: step(); sys.exit()
        code = os.waitpid(child, 0)[1]; step(); sys.exit(code or 4)
        """,
        code=4,
    ),
    "multiprocessing, spawn": Ending(
        """
        import multiprocessing
        def work():
            global own, keep
            own = load(); keep = busy(own)
        if __name__ == '__main__':
            child = multiprocessing.get_context('spawn').Process(target=work)
            child.start(); child.join(); step(); sys.exit(child.exitcode)
        """,
        command=("{file}",),
    ),
    "a pool of processes": Ending(
        """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        def work(i):
            global own, keep
            own = load(); keep = busy(own)
            return write(own)
        if __name__ == '__main__':
            with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
                print(pool.submit(work, 1).result())
            step()
        """,
        says="5\n",
        command=("{file}",),
    ),
    "a file": Ending("llm = load(); keep = busy(llm); step()", command=("{file}",)),
    "standard input": Ending("llm = load(); keep = busy(llm); step()", command=("-",)),
    "development mode": Ending(
        "llm = load(); keep = busy(llm); step()", command=("-X", "dev", "-W", "error", "-c", "{script}")
    ),
    "import alone": Ending("""
        import localllm
        STEP
        """),
    "the REPL": Ending(
        """
        import sys; sys.ps1 = sys.ps2 = ''
        BEGIN
        llm = load(); keep = busy(llm)
        for chunk in keep[0]: break

        step()
        """,
        complaints="\n",
        command=("-q", "-i", "-c", "import sys; sys.ps1 = sys.ps2 = ''"),
    ),
    "IPython": Ending(
        "llm = load(); keep = busy(llm); step()",
        command=("-m", "IPython", "--no-banner", "--quick", "--HistoryManager.enabled=False", "-c", "{script}"),
        needs="IPython",
    ),
    "Jupyter": Ending(
        r"""
        from jupyter_client import KernelManager
        import os, psutil, time
        manager = KernelManager(transport='ipc')
        manager.start_kernel(); client = manager.client(); client.start_channels(); client.wait_for_ready()
        client.execute_interactive('from tests.helpers.ending_script import *\nllm = load(); keep = busy(llm)')
        spent = sum(psutil.Process(manager.provisioner.process.pid).cpu_times()[:2]); client.shutdown()
        print('step', spent + sum(os.times()[:4]), flush=True)
        while manager.provisioner.process.poll() is None: time.sleep(0.01)
        code = manager.provisioner.process.poll(); client.stop_channels(); manager.cleanup_resources()
        raise SystemExit(code)
        """,
        needs="ipykernel",
    ),
    "pytest": Ending(
        """
        import pytest
        @pytest.fixture(scope='session')
        def llm(): return load()
        def test_it(llm):
            global keep
            keep = busy(llm)
            assert write(llm) == 5; atexit.register(step)
        """,
        says=".*1 passed.*",
        command=("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "{file}"),
    ),
}


def table() -> Iterator[tuple[str, Ending]]:
    def lines(*parts: str) -> str:
        return "\n".join(textwrap.dedent(part).strip() for part in parts)

    for name, script in WRITING.items():
        for last, (step, code) in LAST_STEPS.items():
            yield f"{name}, {last}", Ending(lines(script, step), code)
    for name, script in HELD.items():
        yield f"held {name}", Ending(lines(script, "step()"))
    begin = "llm = load(); keep = busy(llm); begun = llm.stream('Hello', ignore_eos=True, max_tokens=100)"
    for name, (use, says) in HANDLERS.items():
        yield f"handler: {name}", Ending(lines(f"@atexit.register\ndef use():\n    {use}; step()", begin), says=says)
    for name, use in LATE_HANDLERS.items():
        script = lines(f"import atexit\n@atexit.register\ndef use():\n    {use}; step()", "BEGIN", begin)
        yield f"late handler: {name}", Ending(script, says="ClosedError\n")
    yield from OTHERS.items()


ENDINGS = dict(table())

#: The endings of the default run.
IN_PLAIN_RUN = {
    name.strip()
    for name in """
    a stream abandoned early, end of script | a stream read in part, ctrl-c | many texts, exception
    drafts by a model, sys.exit | a schema, end of script | both dropped, end of script
    asyncio, the stream kept, end of script | held in a ContextVar | held in a generator in a set
    handler: generate | late handler: an earlier stream | late handler: close
    handler between import and load | handler that joins a daemon | a daemon reads | a daemon tokenizes
    a daemon evaluates | a daemon quantizes
    a thread continues after the script | ctrl-c in generate_many | fork, the child has its own | the REPL
""".replace("\n", "|").split("|")
} - {""}


#: Endings that start threads in functions that Python calls at exit.
IN_NEW_THREADS = {"handler: a thread", "handler: load", "late handler: a thread"}


def test_the_table() -> None:
    assert len(ENDINGS) >= 80
    assert set(ENDINGS) >= IN_PLAIN_RUN | IN_NEW_THREADS


def children_cpu_s() -> float:
    """Return the processor seconds of all ended children; 0 on Windows, which does not count them."""
    return sum(os.times()[2:4])


def run(ending: Ending, folder: Path) -> tuple[int, str, str, float]:
    """Run a script; return exit code, standard output and error, and processor seconds after its last step."""
    file = folder / "test_script.py"
    file.write_text(ending.source, encoding="utf-8")
    command = [part.replace("{script}", ending.source).replace("{file}", str(file)) for part in ending.command]
    before = children_cpu_s()
    running = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        # Some versions of Python warn of every fork with running threads.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:This process:DeprecationWarning"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        source = None if "{" in str(ending.command) else ending.source
        said, complaints = running.communicate(source, timeout=NEVER_S)
    except subprocess.TimeoutExpired:
        running.kill()
        said, complaints = running.communicate()
        complaints += "the process does not end"
    steps = [float(cpu_s) for cpu_s in re.findall(r"^step ([\d.]+)$", said, re.MULTILINE)]
    said = re.sub(r"^step [\d.]+\n", "", said, flags=re.MULTILINE)
    assert steps, f"the last step is missing: {said}{complaints}"
    return running.returncode, said, complaints, children_cpu_s() - before - steps[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_PLAIN_RUN else pytest.mark.ci) for name in ENDINGS]
)
def test_a_process_ends(name: str, tmp_path: Path) -> None:
    ending = ENDINGS[name]
    if ending.needs and find_spec(ending.needs) is None:
        pytest.skip(f"needs {ending.needs}")
    if os.name == "nt" and ("fork" in ending.script or ending.code == -signal.SIGINT):
        pytest.skip("needs forks and signals")
    if sys.version_info[:2] == (3, 12) and name in IN_NEW_THREADS:
        pytest.skip("Python 3.12 starts no thread at exit")
    code, said, complaints, cpu_s = run(ending, tmp_path)
    assert (code, complaints) == (ending.code, ending.complaints)
    assert re.fullmatch(ending.says, said, re.DOTALL)
    assert cpu_s < END_CPU_S
