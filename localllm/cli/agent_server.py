"""The server of ``localllm launch``: a running server, or a new server that ends with the agent."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from localllm.cli.local_server import KEY_VARIABLE, RefusedRequestError, address_of, ask
from localllm.console import StatusLine, say, warn
from localllm.errors import LocalLLMError, UsageError
from localllm.files import private_opener
from localllm.shell import kill_tree, own_group

#: Hosts where a server can be started.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

#: Seconds that a running server may take to connect, and to list its models.
_CONNECT_SECONDS, _LIST_SECONDS = 5.0, 60.0

#: Seconds between two questions to a starting server, and until a process that does not stop is killed.
_POLL_SECONDS, _STOP_SECONDS = 0.2, 15.0

_ERROR = "localllm: error: "


def running_models(arguments: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return the models that the server at ``--url`` lists; None if a server can be started there.

    Raises:
        LocalLLMError: another program uses the port, the server requires a key, or no server answers on another
            machine.
    """
    address = address_of(arguments)
    host, port = address.hostname or "", address.port or {"http": 80, "https": 443}[address.scheme]
    is_here = host in _LOOPBACK
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        if is_here and address.scheme == "http":
            return None
        is_here = False
    try:
        models: list[dict[str, Any]] = ask(arguments, "/v1/models", seconds=_LIST_SECONDS)["data"]
        is_ours = bool(models) and all(model["owned_by"] == "localllm" for model in models)
    except (KeyError, TypeError):
        is_ours = False
    except LocalLLMError as error:
        if not is_here or (isinstance(error, RefusedRequestError) and error.status == 401):
            raise
        is_ours = False
    if not is_ours:
        raise UsageError(
            f"another program answers at {arguments.url}: stop it, or choose another port with "
            f"--url http://{host}:{port + 1}"
        )
    return models


def selected_model(arguments: argparse.Namespace, models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of the model that -m names, or the first entry."""
    if arguments.model is None:
        return models[0]
    names = {_key(name): model for model in models for name in (*model.get("aliases", ()), model["id"])}
    for name in (arguments.model, Path(arguments.model).name):
        if (model := names.get(_key(name))) is not None:
            return model
    raise UsageError(
        f"the server at {arguments.url} does not serve the model {arguments.model!r:.80}: stop this server, or start "
        "another one with --url http://127.0.0.1:PORT"
    )


def _key(name: str) -> str:
    return name.casefold().removesuffix(":latest").removesuffix(".gguf")


def server_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of ``localllm serve`` for the address, the model and the context."""
    address = address_of(arguments)
    context = [] if arguments.context is None else ["-c", str(arguments.context)]
    port = address.port or 80
    return ["serve", "-m", arguments.model, *context, "--host", address.hostname or "", "--port", str(port)]


@contextlib.contextmanager
def started_server(arguments: argparse.Namespace, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block.  The block starts when its model is loaded.

    Raises LocalLLMError with the server's error if it cannot load the model.  ``log``: file for its messages.
    """
    environment = dict(os.environ)
    if arguments.api_key:  # not on the command line, which other users can read
        environment[KEY_VARIABLE] = arguments.api_key
    command = [sys.executable, "-m", "localllm", *server_flags(arguments), "--grace", "1"]
    with (
        open(log, "wb", opener=private_opener) as output,
        running(  # in its own group, because Ctrl-C is for the agent
            command, kill_tree, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, **own_group()
        ) as process,
    ):
        _wait_until_loaded(arguments, process, log)
        yield process
        if _has_ended(process):
            warn(f"the server ended before the agent: {_last_message(log)}")


def _wait_until_loaded(arguments: argparse.Namespace, process: subprocess.Popen[bytes], log: Path) -> None:
    say(f"starting localllm {' '.join(server_flags(arguments))} (messages: {log})")
    start = time.monotonic()
    with StatusLine() as status:
        while not _has_ended(process):
            with contextlib.suppress(LocalLLMError):  # it does not listen yet, or its model is not loaded
                ask(arguments, "/health")
                return
            status.show(f"loading the model: {time.monotonic() - start:.0f} s")
            time.sleep(_POLL_SECONDS)
    raise LocalLLMError(f"the server could not start: {_last_message(log)}")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    with delayed_signals():
        return process.poll() is not None


def _last_message(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").split("\n")
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (errors or [line for line in lines if line.strip()] or ["it gave no reason"])[-1]


@contextlib.contextmanager
def running(
    command: Sequence[str], kill: Callable[[subprocess.Popen[bytes]], None], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and stop it at the end of the block.

    ``kill`` ends a process that does not stop.  ``options`` are keywords of Popen.
    """
    process = None
    try:
        with delayed_signals():
            process = subprocess.Popen(command, **options)
        yield process
    finally:
        if process is not None:
            with delayed_signals():
                _stop(process, kill)


def _stop(process: subprocess.Popen[bytes], kill: Callable[[subprocess.Popen[bytes]], None]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        kill(process)
        process.wait()


#: Signals of this system that end ``localllm launch``.
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay the signals that end the program until the end of the block.

    If a handler raises an exception within `subprocess.Popen.poll`, the process's lock may never be released.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in this process.  Child processes that are started in the block receive it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
