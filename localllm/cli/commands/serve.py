"""``localllm serve``: serve models to other programs over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.catalog.hub_names import DEMO, HubName
from localllm.cli.argument_types import model_file, on_or_off, whole
from localllm.cli.commands.generate import describe, generation_options
from localllm.cli.defaults import (
    apply_settings,
    chat_template,
    load_options,
    model_file as find_model,
    template_variables,
)
from localllm.cli.local_server import KEY_VARIABLE
from localllm.cli.parser import LEFT_OUT, Command, flag, parser_of, several
from localllm.cli.presets import apply_preset, ollama_preset, read_presets
from localllm.cli.shared_flags import ENDING, LORA, MEDIA, PRESETS, RUNNING, SAMPLING, STEERING, options
from localllm.console import say, warn
from localllm.errors import LocalLLMError, UsageError, path_text
from localllm.files import expanded, private_folder, read_text
from localllm.options.declared import CheckedOptions, LoadOptions
from localllm.options.settings import Settings, load_settings, settings_path, skills_folder

if TYPE_CHECKING:
    from localllm.inspection.steering import Steering
    from localllm.llm import LLM
    from localllm.loading.progress import LoadPlan
    from localllm.options.types import LoadProgress
    from localllm.server.app import App
    from localllm.server.http import Limits
    from localllm.server.models import Loader, Models, Preset
    from localllm.server.page_tools import PageTools
    from localllm.server.stats import Stats
    from localllm.server.tracing import Tracing

#: Seconds that a thread may run while other threads wait.
_SWITCH_S = 0.0005

#: Addresses that only this machine can reach.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Name of the file, next to the settings file, with the key of the page's tools.
_PAGE_KEY = "page-key"


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM.  With a key file, SIGHUP does not end the start either."""
    if arguments.keys is None or not hasattr(signal, "SIGHUP"):
        return _serve(arguments)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server handles it
    try:
        return _serve(arguments)
    finally:
        signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        import msgspec  # noqa: F401

        from localllm.server.app import App
        from localllm.server.logs import logging_to_stderr
        from localllm.server.monitor import Monitoring
        from localllm.server.sockets import inherited
        from localllm.server.stats import Stats
    except ModuleNotFoundError as error:
        raise UsageError(f'serve needs {error.name}, which is not installed: pip install "localllm[serve]"') from None

    _check_flags(arguments)
    with nullcontext() if arguments.log_format is None else logging_to_stderr(arguments.log_format):
        sockets = inherited()
        limits, stats, tracing = _limits(arguments, sockets), Stats(), _tracing()
        models, loads_first = _models(arguments, stats)
        app = App(
            models,
            limits,
            _folder("--responses", arguments.responses),
            loads_first=loads_first,
            has_slots=arguments.slots,
            may_pull=arguments.allow_pull,
            page_tools=_page_tools(arguments, limits),
            monitoring=Monitoring(arguments.metrics_per_key, arguments.log_prompts, tracing),
        )
        # Python's default of 5 ms per thread that renders or tokenizes would delay each step several times.
        sys.setswitchinterval(_SWITCH_S)
        _listen(arguments, app, limits, stats, sockets)
    if app.load_error is not None:
        raise app.load_error.__cause__ or app.load_error
    return 0


def _tracing() -> Tracing | None:
    """Return what creates traces, if OpenTelemetry's environment variables configure it."""
    variables = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or not any(map(os.environ.get, variables)) or os.environ.get(variables[0]) == "none":
        return None
    try:
        from localllm.server.tracing import Tracing, provider_from

        return Tracing(provider_from(os.environ))
    except ModuleNotFoundError as error:
        named = next(name for name in variables if os.environ.get(name))
        warn(f'{named} is set, but traces need {error.name}, which is not installed: pip install "localllm[otel]"')
    except UsageError as error:
        warn(str(error))
    return None


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.lora or arguments.draft_model or arguments.mmproj:
        flag = "--lora" if arguments.lora else "--draft-model" if arguments.draft_model else "--mmproj"
        if len(arguments.models) + len(arguments.downloads) != 1:
            raise UsageError(f"{flag} needs exactly one model: name one with -m FILE")
    if arguments.prefix and not re.fullmatch(r"(/[\w.~-]+)+", arguments.prefix, re.ASCII):
        rule = (
            "it starts with '/', does not end with '/', and consists of letters, digits, '/', '_', '-', '.' and '~'"
        )
        raise UsageError(f"--api-prefix {arguments.prefix!r:.80} is not the start of paths: {rule}")
    for address in arguments.trusted_proxies:
        _check_proxy(address)
    if arguments.log_prompts and arguments.log_format is None:
        raise UsageError("--log-prompts needs --log-format: add --log-format text or --log-format json")
    if (arguments.ssl_key is None) != (arguments.ssl_certificate is None):
        raise UsageError("--ssl-key-file and --ssl-cert-file need each other: add the missing flag")
    chat_template(arguments)  # reports an invalid template before a model is loaded


def _check_proxy(address: str) -> None:
    """Raise UsageError unless a string is an address, a network in the form 10.0.0.0/8, or "unix"."""
    import ipaddress

    try:
        if address != "unix":
            ipaddress.ip_network(address)
    except ValueError:
        raise UsageError(
            f"--trusted-proxy {address!r:.80} is no address, network (10.0.0.0/8) or unix: correct it"
        ) from None


def _models(arguments: argparse.Namespace, stats: Stats) -> tuple[Models, bool]:
    """Return the models of the server, and whether the first model is loaded immediately.  Applies the settings."""
    from localllm.server.models import Models, Preset

    as_given = deepcopy(arguments)
    settings, load = _loader(arguments, stats)
    presets = _Presets(as_given, settings, stats)
    requested: list[dict[str, Any]] = [{"model": name} for name in arguments.models]
    requested += [vars(arguments) | {"model": name, "download": True} for name in arguments.downloads]
    served = dict[str, str | Preset | None]()
    for request in requested:
        name = request["model"]
        section = presets.sections.get(name) or ollama_preset(name)
        served |= sources([request], settings) if section is None else {name: presets.model(name, section)}
    if not requested:
        served |= {name: presets.model(name, section) for name, section in presets.sections.items()}
        if arguments.presets is None:
            served |= {name: source for name, source in sources([], settings).items() if name not in served}
            served |= _ollama(presets.sections, presets.options_of, load)
    models = Models(
        served,
        load,
        ttl_s=arguments.ttl,
        aliases=_split_commas(arguments.aliases),
        tags=_split_commas(arguments.tags),
        takes_any_name=len(served) == 1,
        adapters=_adapters(arguments),
        prompts=None if arguments.prompt_cache is None else expanded(arguments.prompt_cache),
        context=arguments.context,
        has_media_file=arguments.mmproj is not None,
        steering=_steering(arguments),
        log=(lambda line: None) if arguments.quiet else say,
    )
    return models, bool(requested or presets.sections)


class _Presets:
    """The sections of a presets file, and the models that they describe."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings, stats: Stats) -> None:
        """``arguments``: the command line, without settings and presets."""
        self.sections = read_presets(arguments.presets)
        self._arguments, self._settings, self._stats = arguments, settings, stats

    def model(self, name: str, section: Mapping[str, Any], *, is_again: bool = False) -> Preset:
        """Return a model.  A faulty section is reported, and read again when the model is requested."""
        from localllm.server.models import Preset

        listed = dict[str, Any]()
        try:
            arguments = self._arguments_of(name, section)
            listed |= {
                "ttl_s": arguments.ttl,
                "aliases": _split_commas(arguments.aliases),
                "tags": _split_commas(arguments.tags),
                "system": section.get("system", ""),
                "group": section.get("group"),
            }
            chat_template(arguments)
            _, load = _loader(arguments, self._stats)
            listed |= {"context": arguments.context, "has_media_file": arguments.mmproj is not None}
            (source,) = sources([{"model": section["model"]}], self._settings).values()
        except LocalLLMError as error:
            if is_again or len(self.sections) == 1:
                raise
            warn(f"the model {name} is not available: {error}")
            return Preset(str(section["model"]), partial(self._load_again, name, section), **listed)
        return Preset(source, load, adapters=_adapters(arguments), **listed)

    def options_of(self, name: str, section: Mapping[str, Any]) -> tuple[Loader, int | None]:
        """Return a function that loads a model, and its context."""
        arguments = self._arguments_of(name, section)
        return _loader(arguments, self._stats)[1], arguments.context

    def _arguments_of(self, name: str, section: Mapping[str, Any]) -> argparse.Namespace:
        arguments = deepcopy(self._arguments)
        arguments.aliases, arguments.tags, arguments.ttl = [], [], None
        apply_preset(parser_of("serve"), arguments, section, name)
        return arguments

    def _load_again(
        self, name: str, section: Mapping[str, Any], source: str | None, progress: LoadProgress, planned: LoadPlan
    ) -> LLM:
        """Load a model whose section was faulty when the server started: its files may be there now."""
        section = read_presets(self._arguments.presets).get(name, section)
        usable = self.model(name, section, is_again=True)
        return usable.load(usable.source, progress, planned)


def _steering(arguments: argparse.Namespace) -> dict[str, Steering]:
    if arguments.steering is None:
        return {}
    from localllm.inspection.steering import read_folder

    return read_folder(arguments.steering)


def _adapters(arguments: argparse.Namespace) -> dict[str, float]:
    return {str(path): scale for path, scale in arguments.lora}


def _ollama(
    names: Container[str], options_of: Callable[[str, dict[str, Any]], tuple[Loader, int | None]], load: Loader
) -> dict[str, Preset]:
    """Return Ollama's models.  Names with the same file and options become aliases of one model.

    Args:
        names: names to omit.
        options_of: returns the loader and the context of a model by its name and options.
        load: loads models without options.
    """
    from localllm.catalog.other_programs import ollama_models
    from localllm.server.models import Preset

    groups: dict[str, list[str]] = {}
    models = {name: model for name, model in sorted(ollama_models().items()) if name not in names}
    for name, model in models.items():
        groups.setdefault(json.dumps([str(model.path), model.options]), []).append(name)
    presets: dict[str, Preset] = {}
    for name, *aliases in groups.values():
        options = models[name].options
        try:
            loader, context = options_of(name, options) if options else (load, None)
        except LocalLLMError as error:
            warn(f"the options of Ollama's model {name} are ignored: {error}")
            loader, context = load, None
        system = options.get("system", "")
        presets[name] = Preset(str(models[name].path), loader, aliases=aliases, system=system, context=context)
    return presets


def _loader(arguments: argparse.Namespace, stats: Stats) -> tuple[Settings, Loader]:
    """Return the settings and a function that loads models with these options.  Applies the settings."""
    if arguments.context and arguments.parallel and not arguments.unified:  # as in llama-server
        arguments.context = max(1, arguments.context // arguments.parallel)
    settings = apply_settings(arguments, skip=("model",))
    defaults = generation_options(arguments, settings)
    defaults.pop("adapters", None)  # requests name their adapters
    CheckedOptions.of(defaults)

    def load_model(source: str | None, progress: LoadProgress, planned: LoadPlan) -> LLM:
        from localllm.llm import load
        from localllm.loading.progress import CompileNotice

        notice = CompileNotice(say)

        def report(stage: str, n_done: int, total: int) -> None:
            progress(stage, n_done, total)
            notice(stage, n_done, total)

        options = load_options(arguments, source, max_waiting=arguments.max_queue)
        llm = load(source, **options, progress=report, planned=planned)
        llm.template_variables = template_variables(arguments)
        llm.defaults |= defaults
        llm.prepare_grammars()
        if not arguments.quiet:
            describe(llm.info, verbose=True) if arguments.verbose else say(str(llm.info))
        if arguments.stats:
            stats.measure(llm)
        return llm

    return settings, load_model


def _page_tools(arguments: argparse.Namespace, limits: Limits) -> PageTools | None:
    """Return the tools of the page; None without ``--page-tools`` and ``--page-folder``.

    They are the tools of the table ``[tools]`` of the settings file, and tools for the files of the folders.
    """
    if not arguments.page_tools and not arguments.page_folders:
        return None
    from localllm.agent_tools.toolbox import Toolbox
    from localllm.server.local_network import stored_key
    from localllm.server.page_tools import PageTools

    folders: dict[str, Path] = {}
    for given in arguments.page_folders:
        folder = expanded(given).resolve()
        if not folder.is_dir():
            raise UsageError(f"--page-folder {path_text(given)} is not a folder: name a folder")
        if folders.setdefault(path_text(folder.name or folder), folder) != folder:
            raise UsageError(f"--page-folder: two folders have the name {folder.name!r:.80}: leave one out")
    settings = load_settings()
    if not settings.tools and not folders:
        raise UsageError(
            "--page-tools needs tools: add the table [tools] to the settings file, or name a folder with "
            "--page-folder DIR"
        )
    key = None if limits.keys is not None else stored_key(_PAGE_KEY, "use a key file (--keys)")
    return PageTools(Toolbox(settings.tools, skills=skills_folder()), folders, key)


def _limits(arguments: argparse.Namespace, sockets: Sequence[socket.socket]) -> Limits:
    """Return the limits of access; with ``--lan``, other devices of the network need a key.

    ``sockets``: sockets that systemd has opened, in place of ``--host`` and ``--port``.
    """
    from localllm.server.http import Limits
    from localllm.server.keys import KeyFile
    from localllm.server.sockets import UNIX, host_of

    keys, names = _api_keys(arguments), list(arguments.hosts)
    log = (lambda line: None) if arguments.quiet else say
    file = None if arguments.keys is None else KeyFile(expanded(arguments.keys), log)
    if file is not None and keys:
        raise UsageError(f"--keys replaces --api-key, --api-key-file and {KEY_VARIABLE}: remove them")
    if arguments.lan:
        from localllm.server.local_network import stored_key

        arguments.host = arguments.host if arguments.host not in _LOOPBACK else "0.0.0.0"
        names.append("*.local")  # phones use this name of the machine
        keys = keys or ([stored_key("lan-key", "give --api-key KEY")] if file is None else [])
    hosts = [host_of(opened) for opened in sockets] or _hosts(arguments)
    hosts = [host for host in hosts if not host.startswith(UNIX)]
    if not {*hosts} <= {*_LOOPBACK} and not keys and file is None:
        shown = ",".join(hosts)
        warn(f"everyone who can reach {shown} can use this server: add --api-key KEY to require a key")
    return Limits(
        api_keys=keys,
        hosts=[*names, *hosts],
        origins=arguments.origins,
        max_body=arguments.max_body << 20,
        read_timeout_s=arguments.read_timeout,
        image_hosts=arguments.image_hosts,
        keys=file,
        prefix=arguments.prefix,
    )


def _hosts(arguments: argparse.Namespace) -> list[str]:
    return [host.strip() for host in arguments.host.split(",")]


def _listen(
    arguments: argparse.Namespace, app: App, limits: Limits, stats: Stats, inherited: Sequence[socket.socket]
) -> None:
    from localllm.server.local_network import invitation
    from localllm.server.uvicorn_server import Server, end_if_busy

    with ExitStack() as sockets:
        listening = [*inherited] or _opened(arguments, sockets)
        tls = (arguments.ssl_key, arguments.ssl_certificate)
        server = Server(app, grace_s=arguments.grace, tls=tls, trusted_proxies=arguments.trusted_proxies)
        url = _url(arguments, listening[0])
        key = None if app.page_tools is None else app.page_tools.key
        page_url = None if key is None else f"{_local_url(arguments, listening)}/#tools={_shown_key(arguments, key)}"
        say(f"listening on {url} (Ctrl-C stops the server)")
        if arguments.lan and limits.api_keys and arguments.log_format is None:  # the invitation contains the key
            say(invitation(url, limits.api_keys[0]))
        if page_url is not None:
            say(f"the page with tools: {page_url}")
        with stats.shown(app.models) if arguments.stats else nullcontext():
            server.run(sockets=listening)
    if app.monitoring.tracing is not None:
        app.monitoring.tracing.close()
    end_if_busy(0 if app.load_error is None else 1)


def _opened(arguments: argparse.Namespace, sockets: ExitStack) -> list[socket.socket]:
    """Return a listening socket for each host.  With port 0, all addresses use the same free port."""
    from localllm.server.sockets import UNIX, listen, listen_unix

    listening, port = list[socket.socket](), arguments.port
    for host in _hosts(arguments):
        if host.startswith(UNIX):
            listening.append(sockets.enter_context(listen_unix(expanded(host.removeprefix(UNIX)))))
        else:
            listening.append(sockets.enter_context(listen(host, port)))
            port = listening[-1].getsockname()[1]
    return listening


def _url(arguments: argparse.Namespace, listening: socket.socket) -> str:
    from localllm.server.local_network import lan_address
    from localllm.server.sockets import UNIX, host_of

    host = host_of(listening)
    if host.startswith(UNIX):
        return host
    host = (lan_address() or host) if host == "0.0.0.0" else host  # the address that other devices can use
    scheme, port = "http" if arguments.ssl_key is None else "https", listening.getsockname()[1]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{arguments.prefix}"


def _shown_key(arguments: argparse.Namespace, key: str) -> str:
    """Return the key of the page for the terminal. In a log, which other people may read, only its place is shown."""
    path = settings_path()
    if arguments.log_format is None or path is None:
        return key
    return f"KEY, with the KEY in {path_text(path.parent / _PAGE_KEY)}"


def _local_url(arguments: argparse.Namespace, listening: Sequence[socket.socket]) -> str:
    """Return the address of the page on this machine.  Raises UsageError if the server listens on no such address."""
    from localllm.server.http import is_localhost
    from localllm.server.sockets import host_of

    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}
    for each in listening:
        if (host := host_of(each)) in local or is_localhost(host):
            scheme = "http" if arguments.ssl_key is None else "https"
            return f"{scheme}://{local.get(host, host)}:{each.getsockname()[1]}{arguments.prefix}"
    raise UsageError("--page-tools needs an address of this machine, such as --host 127.0.0.1, or --keys FILE")


def _api_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the API keys of the flags, the environment and the file.

    A source without keys is an error, because a server without keys is open to everyone.
    """
    sources = [("--api-key", text.split(",")) for text in arguments.api_keys]
    if KEY_VARIABLE in os.environ:
        sources.append((f"the environment variable {KEY_VARIABLE}", os.environ[KEY_VARIABLE].split(",")))
    if arguments.key_file is not None:
        lines = read_text(arguments.key_file, "the file of API keys").splitlines()
        name = f"--api-key-file {path_text(arguments.key_file)}"
        sources.append((name, [line for line in lines if not line.lstrip().startswith("#")]))
    keys = []
    for name, words in sources:
        new_keys = [key for word in words if (key := word.strip())]
        if not new_keys:
            raise UsageError(f"{name} contains no key: add one, or remove it")
        keys += new_keys
    return keys


def _split_commas(values: Sequence[str]) -> list[str]:
    """Return the words of a flag that may occur several times and contain several words separated by commas."""
    return [word.strip() for words in values for word in words.split(",") if word.strip()]


def sources(models: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, str | None]:
    """Return the paths of the models to serve, by name.  The first is the default.

    Args:
        models: options of each model (see `find_model`); if empty, all models on this machine are served.
    """
    from localllm.loading.load import check_file

    paths = dict[str, str | None]()
    for model in models or [{"model": settings.model or DEMO}]:
        if (path := find_model(model, settings)) is not None:
            check_file(path)
        paths[served_name(model["model"])] = None if path is None else str(path)
    if not models:
        from localllm.catalog.listing import find_models

        local_models = find_models(settings.model_folders).models
        paths |= {listed.name.removesuffix(".gguf"): str(listed.path) for listed in local_models}
        paths.setdefault(DEMO, None)
    return paths


def _folder(flag: str, folder: Path | None) -> Path | None:
    """Return the folder of a flag, and create it if it is missing."""
    if folder is not None:
        folder = expanded(folder)
        try:
            if (warning := private_folder(folder)) is not None:
                warn(warning)
        except OSError as error:
            raise UsageError(
                f"{flag} {path_text(folder)} cannot be created ({error.strerror}): name another folder"
            ) from None
    return folder


def served_name(source: str) -> str:
    """Return the name of a model in requests: a hub name unchanged, or a file name without folder and suffix."""
    if HubName.parse(source) is not None and not os.path.lexists(source):
        return source
    return Path(source).name.removesuffix(".gguf")


COMMAND = Command(
    "[-m FILE …] [options]",
    "serve models to other programs over HTTP",
    [
        "models",
        several("-m --model FILE", "GGUF file, or a name that localllm models lists", model_file, dest="models"),
        PRESETS,
        several("-a --alias NAME", "additional name of the first model, shown in lists", dest="aliases"),
        several(
            "-hf --hf-repo ORG/REPO[:QUANT]",
            "model on the hub, which is downloaded if it is missing",
            model_file,
            dest="downloads",
        ),
        several("--tags WORD", "tag of the first model, shown in lists", dest="tags"),
        flag("--ttl S", "unload a model after S seconds without a request", whole(1)),
        *RUNNING,
        *MEDIA,
        LORA,
        *STEERING,
        flag(
            "--steering DIR",
            'let requests add the control vectors in this folder: "steering": {"happy": 0.8} for happy.gguf',
            Path,
        ),
        *options(LoadOptions, "draft_model", type=model_file),
        flag(
            "-np --parallel N",
            "number of requests of full length that fit in a cache (default: up to 4, as memory allows); -c is "
            "divided by N",
            whole(1),
        ),
        flag("-kvu --kv-unified", "do not divide -c by -np: a request may use all of the context", dest="unified"),
        *options(LoadOptions, "prompt_cache", "prompt_cache_size", "cache_scope"),
        "where replies end (default for requests)",
        *ENDING,
        *(f"{item} (default for requests)" if isinstance(item, str) else item for item in SAMPLING),
        flag(
            "--tool-grammar on|off",
            "hold tool calls to the model's format and the tools' schemas (default: on)",
            on_or_off,
            choices=None,
            default=LEFT_OUT,
        ),
        flag("--allow-pull", "let requests, and the page, download models from the hub and delete downloaded ones"),
        flag(
            "--page-tools",
            "let the page use the tools in the settings file, on this machine or with an administrator's key",
        ),
        several(
            "--page-folder DIR",
            "also let these chats read and change files in this folder; implies --page-tools",
            Path,
            dest="page_folders",
        ),
        flag("--no-slots", "do not list running requests at /slots", dest="slots", action="store_false"),
        "access",
        flag(
            "--lan",
            "let other devices on the network connect with a key (generated unless you set one), and show a QR code",
        ),
        flag(
            "--host HOST",
            "address to listen on, or several separated by commas; unix:PATH: a Unix socket",
            default="127.0.0.1",
        ),
        flag("--port N", "port to listen on; 0: any free port", whole(0, below=65536), default=8080),
        several("--api-key KEY", "require this key; the server shares its time evenly between keys", dest="api_keys"),
        flag(
            "--api-key-file FILE",
            "read keys from a file, one per line; lines that start with # are comments",
            dest="key_file",
        ),
        flag(
            "--keys FILE",
            "accept the keys in this file, with roles, models and limits; localllm keys writes it",
            Path,
        ),
        flag("--api-prefix PREFIX", "serve everything below this path, such as /llm", dest="prefix", default=""),
        several(
            "--trusted-proxy ADDR",
            "take the clients' addresses from X-Forwarded-For if this proxy sends it: an address, a network, or unix",
            dest="trusted_proxies",
        ),
        several("--allow-host NAME", "also accept requests for this host name", dest="hosts"),
        several("--allow-image-urls HOST", "fetch images from web addresses at this host", dest="image_hosts"),
        several(
            "--cors-origin ORIGIN",
            "let web pages of this origin connect, such as https://example.org; *: any origin",
            dest="origins",
        ),
        flag("--ssl-key-file FILE", "private key for HTTPS (PEM)", Path, dest="ssl_key"),
        flag("--ssl-cert-file FILE", "certificate for HTTPS (PEM)", Path, dest="ssl_certificate"),
        flag(
            "-to --timeout S",
            "seconds within which a request must arrive completely",
            whole(1),
            default=60,
            dest="read_timeout",
        ),
        flag("--max-queue N", "maximum number of queued requests", whole(1), default=256),
        flag("--max-body MiB", "maximum size of a request", whole(1), default=32),
        flag("--grace S", "seconds that running replies have to finish after Ctrl-C", whole(0), default=10),
        flag("--responses FOLDER", "store responses here, so that previous_response_id works after a restart", Path),
        "output",
        flag("--stats", "show the throughput, the queue and the cache, updated continuously"),
        flag("--log-format text|json", "print messages with time stamps, and a line for every request"),
        flag("--log-prompts", "log prompts, too"),
        flag("--metrics-per-key", "count the requests and tokens of each API key in /metrics"),
        [
            flag("-q --quiet", "print nothing but the address and errors"),
            flag("-v --verbose", "print the devices and the memory of each model"),
        ],
    ],
    run,
    """\
Clients of the OpenAI API (http://127.0.0.1:8080/v1), Anthropic's, Ollama's (http://127.0.0.1:8080) and llama.cpp's
server can connect.  With -m, the first model is loaded at the start, and every other model on its first request.
Without -m, the server offers the model in the settings (or else the demo model) and all models that localllm models
lists.

By default only programs and web pages on this machine (localhost) can connect; --lan, --host and --cors-origin let
others connect.  The environment variable LOCALLLM_API_KEY also sets API keys, separated by commas.
""",
    aliases="server llama-server",
)
