"""Access to the hub through the package huggingface_hub, with one-sentence errors for its refusals."""

from __future__ import annotations

import contextlib
import email.utils
import importlib
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from localllm.catalog.hub_cache import hub_cache
from localllm.catalog.hub_names import REPOSITORY
from localllm.errors import HubError, UsageError
from localllm.nesting import parse_json
from localllm.version import __version__

#: Timeout of requests in seconds.
_TIMEOUT = 20.0

#: Maximum bytes of the list of a repository's files; a list of 20,000 files has about 8 MB.
_MAX_LISTING = 64 << 20

#: Maximum seconds to wait before a request if the hub limits the rate; a longer wait is an error.
_MAX_WAIT = 60.0

#: Identifies the client to the hub.
_LIBRARY = {"library_name": "localllm", "library_version": __version__}

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    name: str
    n_bytes: int
    hash: str  # SHA-256, or git's SHA-1 for small files: the name of the blob in the cache


@dataclass(frozen=True)
class RemoteRepository:
    """A repository of GGUF files that a search found."""

    name: str  # "ORG/REPO"
    n_downloads: int  # in the last month
    is_gated: bool  # whether its files need the permission of its owner


#: Environment variables, in lower case, that the HTTP client reads when it is created.
_PROXIES = ("all_proxy", "https_proxy", "http_proxy")
_CERTIFICATES = ("ssl_cert_file", "ssl_cert_dir")


def _session(package: Any) -> Any:
    """Return the HTTP client of huggingface_hub.

    Raises:
        HubError: a proxy or a file of certificates in the environment is invalid; the message names the variable.
    """
    try:
        return package.get_session()
    except Exception as error:  # the errors of its address parser have no common base class
        reason = f"{error!s:.200}"
        if isinstance(error, OSError):
            reason = error.strerror or reason
            names = _set_variables(_CERTIFICATES, lambda path: not os.path.exists(path))
            advice = "name files of certificates in PEM, or unset it"
        else:
            names = _set_variables(_PROXIES, lambda address: not address.startswith(("http://", "https://")))
            advice = "name a proxy with http:// or https://, or unset it"
            if isinstance(error, ImportError):
                reason, advice = "a SOCKS proxy needs the package socksio", f'pip install "httpx[socks]", {advice}'
        name = " or ".join(names) or "for proxies or certificates"
        raise HubError(f"the environment variable {name} cannot be used ({reason}): {advice}") from error


def _set_variables(names: Sequence[str], is_wrong: Callable[[str], bool]) -> list[str]:
    """Return the set variables with a wrong value; every set variable if no value is wrong."""
    values = {name: value for name, value in os.environ.items() if name.lower() in names and value}
    return sorted(name for name, value in values.items() if is_wrong(value)) or sorted(values)


class Hub:
    """One repository on the hub, "ORG/REPO", or the words of a search.

    Methods raise the errors of `complaints` only.
    """

    def __init__(self, repo: str) -> None:
        self._package = import_hub()
        self._repo = repo
        self.endpoint: str = os.environ.get("HF_ENDPOINT") or self._package.constants.ENDPOINT

    def search(self, limit: int) -> list[RemoteRepository]:
        """Return repositories with GGUF files whose names contain the words that `Hub` got, most downloads first."""
        words = urllib.parse.quote(self._repo)
        query = f"search={words}&filter=gguf&sort=downloads&direction=-1&limit={limit}"
        try:
            with self.complaints():
                listed = parse_json(self._read(f"{self.endpoint}/api/models?{query}"))
            repositories = [_remote_repository(entry) for entry in listed]
        except (HubError, UsageError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._no_hub(error) from error
        return [repository for repository in repositories if REPOSITORY.fullmatch(repository.name)]

    def files(self, is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, RemoteFile]]:
        """Return the newest commit, and by name its files that ``is_wanted`` accepts."""
        return self.described(is_wanted)[:2]

    def described(self, is_wanted: Callable[[str], bool]) -> tuple[str, dict[str, RemoteFile], dict[str, Any]]:
        """Return the same as `files`, and the hub's description of the repository. Its other values are unchecked."""
        try:
            listing = parse_json(self._listing())
            commit = listing["sha"]
            if not _COMMIT.fullmatch(commit):  # used as the name of a folder
                raise ValueError(f"the commit is {commit!r:.100}")
            entries = [entry for entry in listing["siblings"] if is_wanted(entry["rfilename"])]
            return commit, {entry["rfilename"]: _remote_file(entry) for entry in entries}, listing
        except (HubError, UsageError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._no_hub(error) from error

    def _no_hub(self, error: Exception) -> HubError:
        fault = f"the server at {self.endpoint} is not a hub ({type(error).__name__}: {error!s:.200})"
        return HubError(f"{fault}: check the network, and the environment variable HF_ENDPOINT")

    def _listing(self) -> bytes:
        """Return the hub's description of the repository as JSON. Tries again once if the hub is busy."""
        url = f"{self.endpoint}/api/models/{self._repo}?blobs=true"
        with self.complaints():
            self._package.utils.validate_repo_id(self._repo)
            try:
                return self._read(url)
            except self.http_error as error:
                if (wait := seconds_to_wait(error)) is None:
                    raise
            time.sleep(wait)
            return self._read(url)

    def _read(self, url: str) -> bytes:
        data = bytearray()
        with self._get(url) as answer:
            for data_chunk in answer.iter_bytes():
                data += data_chunk
                if len(data) > _MAX_LISTING:
                    raise ValueError(f"the list of its files has more than {_MAX_LISTING >> 20} MiB")
        return bytes(data)

    @contextlib.contextmanager
    def _get(self, url: str, **headers: str) -> Iterator[Any]:
        package = self._package
        session, headers = _session(package), package.utils.build_hf_headers(**_LIBRARY) | headers
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as answer:
            if answer.status_code >= 400:
                # Without its body, because the package would read a body of any length.
                answer = type(answer)(answer.status_code, headers=answer.headers, request=answer.request)
            package.utils.hf_raise_for_status(answer)
            yield answer

    def open(
        self, name: str, commit: str, start: int, end: int | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Open a stream of a file's bytes from ``start`` to ``end``, with HTTP status 206, or 200 for all bytes."""
        url = self._package.hf_hub_url(self._repo, name, revision=commit, endpoint=self.endpoint)
        ask = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        return self._get(url, **{"Accept-Encoding": "identity"}, **ask)

    @property
    def http_error(self) -> type[Exception]:
        """The error of a failed connection or of a refusal by the hub."""
        error: type[Exception] = self._package.errors.HTTPError
        return error

    @contextlib.contextmanager
    def complaints(self) -> Iterator[None]:
        """Convert errors of the hub, the network or the disk to HubError or UsageError in one sentence."""
        errors = self._package.errors
        try:
            yield
        except HubError:
            raise
        except errors.HFValidationError as error:
            raise UsageError(f"{self._repo!r} is not the name of a repository: {error}") from error
        except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
            self._refused(error)
        except OSError as error:
            fault = f"the cache {hub_cache()} cannot be written ({error.strerror or error})"
            advice = "make room, check permissions, or name another folder in the environment variable HF_HUB_CACHE"
            raise HubError(f"{fault}: {advice}; what was fetched is kept") from error

    def _refused(self, error: BaseException) -> NoReturn:
        errors, repo = self._package.errors, self._repo
        status = getattr(getattr(error, "response", None), "status_code", None)
        login = "log in with 'hf auth login' or the environment variable HF_TOKEN"
        if isinstance(error, errors.OfflineModeIsEnabled):
            text = "the environment variable HF_HUB_OFFLINE forbids access to the hub: unset it to download"
        elif isinstance(error, errors.GatedRepoError):
            text = f"{repo} is gated: request access on its page on the hub, and then {login}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            text = f"the hub has no repository {repo}, or it is private: check the name; for a private one {login}"
        elif status in (401, 403):
            text = f"the hub refuses access to {repo} (HTTP {status}): check the rights of the token, or {login}"
        elif status == 404:
            text = f"the hub no longer has what it listed of {repo} (HTTP 404): try again"
        elif status == 429:
            wait = error.response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
            later = f"in {wait} seconds" if wait.isdigit() else "later"
            text = f"the hub got too many requests (HTTP 429): try again {later}, or {login}"
        elif status is not None:
            text = f"the hub does not answer for {repo} (HTTP {status}): try again later"
        else:
            reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
            check = "check the network, a proxy, and the environment variable HF_ENDPOINT"
            text = f"the hub at {self.endpoint} cannot be reached ({reason:.200}): {check}"
        raise HubError(text) from error


def import_hub() -> Any:
    """Return the package huggingface_hub.

    Raises:
        HubError: the package cannot be imported.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
        for name in ("constants", "errors", "utils"):
            importlib.import_module(f"huggingface_hub.{name}")
    except (ImportError, ValueError) as error:  # ValueError: an invalid environment variable
        advice = "install it again, and check the environment variables HF_…"
        raise HubError(f"the package huggingface_hub cannot be loaded ({error}): {advice}") from error
    return hub


def _remote_repository(entry: dict[str, Any]) -> RemoteRepository:
    """Return a repository of the hub's response. Raises ValueError if its name or number of downloads is invalid."""
    name, n_downloads = entry["id"], entry.get("downloads", 0)
    if not isinstance(name, str) or type(n_downloads) is not int:
        raise ValueError(f"no name and downloads in {entry!r:.100}")
    return RemoteRepository(name, n_downloads, bool(entry.get("gated")))


def _remote_file(sibling: dict[str, Any]) -> RemoteFile:
    """Return a file of the hub's response. Raises ValueError if its name, hash or size is invalid."""
    name, lfs = sibling["rfilename"], sibling.get("lfs")
    sha, n_bytes = (sibling["blobId"], sibling["size"]) if lfs is None else (lfs["sha256"], lfs["size"])
    # Both become names of files, so they must not lead to another folder.
    if not name.isprintable() or {"", ".", ".."} & set(re.split(r"[/\\]", name)):
        raise ValueError(f"a file has the name {name!r:.100}")
    if not isinstance(sha, str) or not _HASH.fullmatch(sha) or not isinstance(n_bytes, int) or n_bytes < 0:
        raise ValueError(f"no hash and size of {name}")
    return RemoteFile(name, n_bytes, sha)


def is_passing(error: Any) -> bool:
    """Return whether a failure may be temporary: of the connection, or of a busy server."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        return seconds_to_wait(error) is not None
    return status is None or status == 408 or status >= 500


def seconds_to_wait(error: Any) -> float | None:
    """Return the seconds of Retry-After, a number or a date; None if it is missing or above `_MAX_WAIT`."""
    text = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    try:
        wait = float(text) if text.isdigit() else email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError):
        return None
    return max(0.0, wait) if wait <= _MAX_WAIT else None
