"""The hub, asked through the package huggingface_hub (an extra), and what it refuses in one sentence each."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from localllm import __version__
from localllm.errors import HubError, UsageError
from localllm.library.hub_cache import hub_cache

#: Seconds to wait for an answer.
_TIMEOUT = 20.0

#: What says to the hub who asks.
_LIBRARY = {"library_name": "localllm", "library_version": __version__}

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub.

    Attributes:
        hash: SHA-256 of its bytes, or if it is small git's SHA-1: what its blob in the cache is called.
    """

    name: str
    n_bytes: int
    hash: str


class Hub:
    """One repository on the hub, "ORG/REPO".

    Whatever a method raises is one of those that `complaints` makes.
    """

    def __init__(self, repo: str) -> None:
        self._package = import_hub()
        self._repo = repo
        self.endpoint: str = os.environ.get("HF_ENDPOINT") or self._package.constants.ENDPOINT

    def files(self) -> tuple[str, dict[str, RemoteFile]]:
        """The newest commit, and its GGUF files by name."""
        try:
            with self.complaints():
                api = self._package.HfApi(endpoint=self.endpoint, **_LIBRARY)
                info = api.model_info(self._repo, files_metadata=True, timeout=_TIMEOUT)
            names = [each for each in info.siblings if each.rfilename.lower().endswith(".gguf")]
            return str(info.sha), {each.rfilename: _remote_file(each) for each in names}
        except (HubError, UsageError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HubError(
                f"what answered at {self.endpoint} is no hub ({type(error).__name__}: {error!s:.200}): check the "
                "network, and the environment variable HF_ENDPOINT"
            ) from error

    @contextlib.contextmanager
    def open(self, name: str, commit: str, start: int) -> Iterator[Any]:
        """A file's bytes from ``start`` on, as an answer of HTTP: with status 206, or 200 if it begins at 0."""
        package = self._package
        headers = package.utils.build_hf_headers(**_LIBRARY) | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = package.hf_hub_url(self._repo, name, revision=commit, endpoint=self.endpoint)
        session = package.get_session()
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as answer:
            package.utils.hf_raise_for_status(answer)
            yield answer

    @property
    def http_error(self) -> type[Exception]:
        """What `open` raises where the connection or the hub fails."""
        error: type[Exception] = self._package.errors.HTTPError
        return error

    def link(self, name: str) -> Path:
        """Gives a file, whose blob is in the cache, its name there."""
        with self.complaints():
            try:
                path = self._package.hf_hub_download(
                    self._repo, name, cache_dir=hub_cache(), endpoint=self.endpoint, **_LIBRARY
                )
            except ValueError as error:  # a commit that leads out of the cache
                raise HubError(
                    f"what {self.endpoint} answers for {name} is not usable ({error!s:.200}): check the environment "
                    "variable HF_ENDPOINT"
                ) from error
            return Path(path)

    @contextlib.contextmanager
    def complaints(self) -> Iterator[None]:
        """Says in one sentence what the hub, the network or the disk refused."""
        errors = self._package.errors
        try:
            yield
        except HubError:
            raise
        except errors.HFValidationError as error:
            raise UsageError(f"{self._repo!r} is no name of a repository: {error}") from error
        except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
            self._refused(error)
        except OSError as error:
            raise HubError(
                f"the cache {hub_cache()} cannot be written ({error.strerror or error}): make room or check its "
                "permissions, or name another folder in the environment variable HF_HUB_CACHE; what was fetched "
                "is kept"
            ) from error

    def _refused(self, error: BaseException) -> NoReturn:
        errors, repo = self._package.errors, self._repo
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.OfflineModeIsEnabled):
            text = "the environment variable HF_HUB_OFFLINE forbids to ask the hub: unset it to download"
        elif isinstance(error, errors.GatedRepoError):
            text = (
                f"{repo} is gated: ask for access on its page on the hub, and then say who you are with "
                "'hf auth login' or the environment variable HF_TOKEN"
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            text = (
                f"the hub has no repository {repo}, or it is private: check the name; for a private one say who you "
                "are with 'hf auth login' or the environment variable HF_TOKEN"
            )
        elif status in (401, 403):
            text = (
                f"the hub refuses access to {repo} (HTTP {status}): check the rights of the token in HF_TOKEN, or of "
                "'hf auth login'"
            )
        elif status == 404:
            text = f"the hub no longer has what it listed of {repo} (HTTP 404): try again"
        elif status is not None:
            text = f"the hub does not answer for {repo} (HTTP {status}): try again later"
        else:
            reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
            text = (
                f"the hub at {self.endpoint} cannot be reached ({reason:.200}): check the network, a proxy, and the "
                "environment variable HF_ENDPOINT"
            )
        raise HubError(text) from error


def import_hub() -> Any:
    """The package huggingface_hub.

    Raises:
        HubError: it is not installed, or broken.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
        for name in ("constants", "errors", "utils"):
            importlib.import_module(f"huggingface_hub.{name}")
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise HubError(
                f"the package huggingface_hub lacks one that it needs ({error}): install it again"
            ) from error
        raise HubError(
            "downloading needs the package huggingface_hub, which is not installed: pip install huggingface_hub"
        ) from None
    except ValueError as error:  # an environment variable that it reads while it is imported
        raise HubError(
            f"the package huggingface_hub cannot be loaded ({error}): check the environment variables HF_…"
        ) from error
    return hub


def _remote_file(sibling: Any) -> RemoteFile:
    """Raises:
    ValueError: the hub tells no name, hash or size that a file can have.
    """
    lfs = sibling.lfs
    sha, n_bytes = (sibling.blob_id, sibling.size) if lfs is None else (lfs.sha256, lfs.size)
    # Both become names of files: they must not be able to lead elsewhere.
    if not sibling.rfilename.isprintable() or {"", ".", ".."} & set(re.split(r"[/\\]", sibling.rfilename)):
        raise ValueError(f"a file has the name {sibling.rfilename!r:.100}")
    if not isinstance(sha, str) or not _HASH.fullmatch(sha) or not isinstance(n_bytes, int) or n_bytes < 0:
        raise ValueError(f"no hash and size of {sibling.rfilename}")
    return RemoteFile(sibling.rfilename, n_bytes, sha)


def is_passing(error: Any) -> bool:
    """Whether a failure is one of the connection, or of a server that may recover."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status in (408, 429) or status >= 500
