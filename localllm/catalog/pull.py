"""Download models from the hub into its cache on this machine, with the package huggingface_hub.

The package sends requests, reads the user's token, and defines the layout of the cache. localllm downloads the bytes
itself, because the package deletes an incomplete file when it is interrupted, and a download of many gigabytes should
continue. An incomplete file is named ``blobs/<hash>.incomplete`` until its size and hash match the hub's. On systems
without symbolic links, files are stored under their names in ``snapshots`` without a blob, as in the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from localllm.catalog.hub import Hub, RemoteFile, is_passing, seconds_to_wait
from localllm.catalog.hub_cache import hub_cache, repo_folder
from localllm.catalog.hub_names import FileGroup, HubName, choose, group_files
from localllm.catalog.known_models import KnownModel, advice, hub_name, known_model
from localllm.errors import GGUFError, HubError, ModelError, Notice, UsageError, warn
from localllm.gguf import GGUFFile
from localllm.gguf.file import read_head

#: Called with "download" or "check", the bytes done, and the total bytes.
PullProgress = Callable[[str, int, int], object]

#: Seconds to wait before each retry after a connection that brought no new bytes.
RETRY_SECONDS = (1.0, 3.0, 10.0)
#: Bytes that must stay free on the disk.
SPARE_BYTES = 100 << 20

#: Maximum number of encoders whose metadata is read before the download, and bytes that contain it.
_MAX_ENCODERS, _HEAD_BYTES = 4, 1 << 20

_CHECK = "check the environment variable HF_ENDPOINT, or try again later"


def pull(name: str, progress: PullProgress | None = None) -> Path:
    """Download a model unless it is cached. Returns its file in the cache, the first file of a split model.

    Also downloads the encoder of images and audio (``mmproj-….gguf``) in the model's folder on the hub, if this
    version supports it. Otherwise a warning names the encoder.

    ``name``: ``ORG/REPO``, ``ORG/REPO:QUANT`` or ``ORG/REPO:FILE`` (see `localllm.catalog.hub_names.choose`), or a
    short name such as ``qwen3.5:4b`` (see `localllm.catalog.known_models`). The available memory chooses its format.

    Raises:
        HubError: the download failed; the message names the reason.
        UsageError: the name is invalid or ambiguous.
    """
    remote = hub_name(name)
    if remote is None:
        remedy = advice(name)
        if remedy is None:
            remedy = "write ORG/REPO, or ORG/REPO:QUANT; localllm search WORDS lists them"
        raise UsageError(f"{name!r:.80} is not the name of a model on the hub: {remedy}")
    known = None if HubName.parse(name) is not None else known_model(name)
    return _Puller(remote, progress).model(None if known is None else known[0])


def pull_checkpoint(name: str, progress: PullProgress | None = None) -> Path:
    """Download the files of a checkpoint, ``ORG/REPO``, that are not cached. Returns its folder in the cache."""
    remote = HubName.parse(name)
    if remote is None:
        raise UsageError(f"{name!r:.80} is not the name of a checkpoint on the hub: write ORG/REPO")
    return _Puller(remote, progress).checkpoint()


def _is_of_checkpoint(name: str) -> bool:
    """Return whether a conversion reads a file. Files in folders are other formats of the same model."""
    suffixes = (".safetensors", ".json", ".jinja", "tokenizer.model")
    return "/" not in name and name.endswith(suffixes) and not name.startswith(("consolidated", "adapter_model"))


def _encoders(group: FileGroup, names: Iterable[str]) -> list[str]:
    """Return the projector files of a model, the best first, as `load` would choose."""
    from localllm.loading.projector_files import projector_names

    folder = group.names[0].rpartition("/")[0]
    files = [name for name in names if name.rpartition("/")[0] == folder and name.lower().endswith(".gguf")]
    return projector_names(group.names[0], files)


class _Puller:
    def __init__(self, name: HubName, progress: PullProgress | None) -> None:
        self._hub = Hub(name.repo)
        self._name = name
        self._progress: PullProgress = progress or (lambda stage, n_bytes, total: None)
        self._folder = repo_folder(name.repo)

    def model(self, known: KnownModel | None) -> Path:
        """Download a model and its encoder.  ``known``: the model of a short name, whose encoder is known."""
        commit, files = self._hub.files(lambda name: name.lower().endswith(".gguf"))
        group = choose(self._name, group_files({file.name: file.n_bytes for file in files.values()}), self._name.repo)
        if not group.is_complete:
            raise HubError(f"{self._name.repo} has not all files of {group.stem}: choose another model")
        encoders = _encoders(group, files)
        if known is None:
            encoders = self._supported(encoders, files, commit)
        elif known.projector is None:
            encoders = []
        paths = self._get([files[name] for name in (*group.names, *encoders[:1])], commit)
        self._check_model(paths, group)
        return paths[0]

    def _supported(self, encoders: list[str], files: dict[str, RemoteFile], commit: str) -> list[str]:
        """Return the first encoder that this version supports, by the first bytes of its file; warn if none is."""
        from localllm.models.encoders.registry import projectors_of  # imported here because it imports numpy

        faults = list[str]()
        for name in encoders[:_MAX_ENCODERS]:
            if self._is_here(files[name], commit):
                return [name]
            try:
                with self._hub.open(name, commit, 0, _HEAD_BYTES) as answer:
                    head = b"".join(_until(answer.iter_raw(), _HEAD_BYTES))
                projectors_of(read_head(Path(name), head))
            except ModelError as error:
                fault = str(error).partition(";")[0]
                faults.append(f"{name} is not downloaded: {fault}, so the model accepts only text")
            except (self._hub.http_error, GGUFError):  # its metadata is unknown
                return [name]
            else:
                return [name]
        if faults:
            warn(Notice(faults[0]))
        return []

    def checkpoint(self) -> Path:
        commit, files = self._hub.files(_is_of_checkpoint)
        if not {"config.json"} < files.keys():
            raise HubError(
                f"{self._name.repo} has no checkpoint with config.json: choose another repository, or download "
                f"its GGUF file with localllm pull {self._name.repo}"
            )
        return self._get(list(files.values()), commit)[0].parent

    def _get(self, files: list[RemoteFile], commit: str) -> list[Path]:
        """Download missing files and return their paths in the cache."""
        blobs = {file.hash: file for file in files}.values()
        with self._hub.complaints(), contextlib.ExitStack() as locks:
            for file in blobs:
                locks.enter_context(self._lock(file))
            self._fetch_all([file for file in blobs if not self._is_here(file, commit)], commit)
            paths = [self._link(file, commit) for file in files]
            reference = self._folder / "refs" / "main"
            reference.parent.mkdir(exist_ok=True)
            reference.write_text(commit, encoding="ascii")
        return paths

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.hash

    def _partial(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / f"{file.hash}.incomplete"

    def _named(self, file: RemoteFile, commit: str) -> Path:
        return self._folder / "snapshots" / commit / file.name

    def _is_here(self, file: RemoteFile, commit: str) -> bool:
        """Return whether the cache contains a file. Removes a blob of the wrong size."""
        blob = self._blob(file)
        if _size(blob) == file.n_bytes or self._is_plain(self._named(file, commit), file):
            return True
        blob.unlink(missing_ok=True)
        for snapshot in (self._folder / "snapshots").glob("*"):  # the same file in another commit
            path = snapshot / file.name
            if self._is_plain(path, file) and _hash_of(path, len(file.hash), lambda n_bytes: None) == file.hash:
                with contextlib.suppress(OSError):  # some file systems have no hard links
                    blob.parent.mkdir(exist_ok=True)
                    os.link(path, blob)
                    return True
        return False

    def _is_plain(self, path: Path, file: RemoteFile) -> bool:
        """Return whether a path is the file itself, not a link."""
        return not path.is_symlink() and _size(path) == file.n_bytes

    def _link(self, file: RemoteFile, commit: str) -> Path:
        """Link a blob under its name in the commit, or move it there if the system has no links."""
        path, blob = self._named(file, commit), self._blob(file)
        if not self._is_plain(path, file):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                path.symlink_to(os.path.relpath(blob, path.parent))
            except OSError:
                blob.replace(path)
        return path

    # -- Fetching --------------------------------------------------------------------------------------------------

    def _fetch_all(self, files: list[RemoteFile], commit: str) -> None:
        """Download the missing bytes of files, and check their hashes."""
        total = sum(file.n_bytes for file in files)
        have = sum(min(file.n_bytes, _size(self._partial(file)) or 0) for file in files)
        self._check_disk_space(total - have)
        n_done = 0
        for file in files:
            self._fetch(file, commit, self._report("download", n_done, total))
            n_done += file.n_bytes
        n_done = 0
        for file in files:
            partial = self._partial(file)
            if _hash_of(partial, len(file.hash), self._report("check", n_done, total)) != file.hash:
                partial.unlink()
                raise HubError(f"{file.name} was damaged (its hash is not the hub's) and removed: pull it again")
            partial.replace(self._blob(file))
            n_done += file.n_bytes

    def _report(self, stage: str, before: int, total: int) -> Callable[[int], object]:
        """Return a callback that adds ``before``, the bytes of earlier files, to the bytes of one file."""
        return lambda n: self._progress(stage, before + n, total)

    def _check_disk_space(self, n_bytes: int) -> None:
        folder = self._folder / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if n_bytes and free < n_bytes + SPARE_BYTES:
            fault = f"{self._name} needs {n_bytes / 1e9:,.2f} GB more on the disk of {hub_cache()}, where"
            advice = "make room, choose a smaller model, or set HF_HUB_CACHE to another folder"
            raise HubError(f"{fault} {free / 1e9:,.2f} GB are free: {advice}")

    def _fetch(self, file: RemoteFile, commit: str, report: Callable[[int], object]) -> None:
        """Download the missing bytes of a file. Reconnects as long as connections bring new bytes."""
        partial = self._partial(file)
        partial.touch()
        waits = iter(RETRY_SECONDS)
        is_asked = False
        while (have := _size(partial) or 0) != file.n_bytes:
            if have > file.n_bytes:
                partial.unlink()
                if is_asked:
                    fault = f"sends more of {file.name} than the {file.n_bytes:,} bytes that it should have"
                    raise HubError(f"{self._hub.endpoint} {fault}: {_CHECK}")
                continue
            is_asked = True
            cut: BaseException | None = None
            try:
                self._stream(file, commit, have, report)
            except self._hub.http_error as error:
                if not is_passing(error):
                    raise
                cut = error
            if (_size(partial) or 0) > have:
                waits = iter(RETRY_SECONDS)
            elif (wait := next(waits, None)) is not None:
                time.sleep(max(wait, seconds_to_wait(cut) or 0.0))
            else:
                reason = str(cut or "it ends too early").strip().split("\n")[0]
                raise HubError(
                    f"the connection to {self._hub.endpoint} keeps breaking off ({reason}); {have:,} of the "
                    f"{file.n_bytes:,} bytes of {file.name} are kept: run the same command again to continue"
                ) from cut

    def _stream(self, file: RemoteFile, commit: str, have: int, report: Callable[[int], object]) -> None:
        with self._hub.open(file.name, commit, have) as answer:
            size = answer.headers.get("Content-Range", answer.headers.get("Content-Length", "")).rpartition("/")[2]
            if size.isdigit() and int(size) != file.n_bytes:
                fault = f"lists {file.name} with {file.n_bytes:,} bytes, but sends {int(size):,}"
                raise HubError(f"{self._hub.endpoint} {fault}: {_CHECK}")
            if answer.status_code != 206:  # the server sends the whole file
                have = 0
            with self._partial(file).open("ab" if have else "wb") as out:
                for data in answer.iter_raw():
                    out.write(data)
                    out.flush()  # reported bytes are not downloaded again
                    have += len(data)
                    report(min(have, file.n_bytes))
                    if have > file.n_bytes:
                        break

    def _lock(self, file: RemoteFile) -> Any:
        """Acquire the lock that the hub's package also uses for a file."""
        filelock = importlib.import_module("filelock")
        path = hub_cache() / ".locks" / self._folder.name / f"{file.hash}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return filelock.FileLock(path).acquire(timeout=0)
        except filelock.Timeout:
            raise HubError(f"another program downloads {file.name} now: wait for it, or end it") from None

    # -- Checking --------------------------------------------------------------------------------------------------

    def _check_model(self, paths: list[Path], group: FileGroup) -> None:
        """Read the header of a downloaded model, and remove its files if it is invalid."""
        try:
            GGUFFile.open(paths[0]).close()
        except GGUFError as error:
            outcome = "was removed again"
            for path in paths:
                try:
                    path.resolve().unlink()
                    path.unlink(missing_ok=True)
                except OSError as reason:
                    outcome = f"cannot be removed ({reason.strerror})"
            fault = f"{self._name.repo} has a broken {group.stem}, which {outcome}"
            raise HubError(f"{fault} ({error}): choose another one") from error


def _until(chunks: Iterable[bytes], n_bytes: int) -> Iterator[bytes]:
    """Yield chunks until they have ``n_bytes`` together."""
    for chunk in chunks:
        yield chunk
        n_bytes -= len(chunk)
        if n_bytes <= 0:
            return


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _hash_of(path: Path, n_digits: int, report: Callable[[int], object]) -> str:
    """Return the SHA-256 of a file's bytes, or git's SHA-1 of the blob if ``n_digits`` is 40."""
    digest = hashlib.sha256() if n_digits == 64 else hashlib.sha1(usedforsecurity=False)
    if n_digits != 64:
        digest.update(b"blob %d\0" % path.stat().st_size)
    n_read = 0
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            n_read += len(data)
            report(n_read)
    return digest.hexdigest()
