"""The model store: bytes by their SHA-256, names by one manifest each, every change committed by one rename.

    ROOT/lock                  held (flock) around every change, by any process
    ROOT/blobs/SHA256.gguf     weights; SHA256.jinja a chat template of the operator's
    ROOT/manifests/NAME.json   the rename that puts it here IS the installation; its unlink IS the removal
    ROOT/staging/*/            copies under way, each holding a lock of its own

A blob goes to its place before the manifest that names it, and leaves after it. A process killed anywhere in between
leaves a blob that nothing names, or a staging directory that nobody locks: the next change sweeps both.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from appliance.durable import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    exclusive_lock,
    fsync_directory,
    make_private_directory,
    replace_file,
)
from appliance.models.errors import (
    DigestMismatch,
    ModelError,
    ModelNameTaken,
    ModelNotInstalled,
    SourceUnreadable,
    StoreDamaged,
    StoreFull,
)
from appliance.models.formats import check_gguf, refuse_pickle_name
from appliance.models.manifest import (
    LIMIT_BYTES,
    InstalledModel,
    ModelFacts,
    check_name,
    encode_manifest,
    parse_manifest,
    template_path,
    weights_path,
)
from appliance.models.progress import ByteProgress, silent

CHUNK_BYTES: Final = 1 << 20
TEMPLATE_LIMIT_BYTES: Final = 256 * 1024
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IN_USE: Final = "in-use"

Step = Callable[[str], None]
"""Told the name of each step once it is done; a test kills the process there."""


def default_store_root(data_home: str | None, home: str | None) -> Path:
    """The store of this user, from the values of XDG_DATA_HOME and HOME. Raises ModelError when neither is set.

    A relative XDG_DATA_HOME is ignored, as the XDG Base Directory Specification says.
    """
    if data_home and os.path.isabs(data_home):
        return Path(data_home) / "attested-inference" / "models"
    if home and os.path.isabs(home):
        return Path(home) / ".local" / "share" / "attested-inference" / "models"
    raise ModelError(
        "no place for models: set XDG_DATA_HOME or HOME to an absolute path, or name the store's directory"
    )


class ModelStore:
    """The models under `root`. Reading makes nothing; every change raises a ModelError and then has changed nothing."""

    def __init__(self, root: Path, *, on_step: Step = lambda step: None) -> None:
        self.root = root
        self._blobs = root / "blobs"
        self._manifests = root / "manifests"
        self._staging = root / "staging"
        self._on_step = on_step

    def names(self) -> tuple[str, ...]:
        """The installed names, sorted."""
        if not self._manifests.is_dir():
            return ()
        return tuple(sorted(p.name.removesuffix(".json") for p in self._manifests.glob("[!.]*.json")))

    def get(self, name: str) -> InstalledModel:
        """The model of that name, its files present with their full length (not hashed again: see `verify`).

        Raises ModelNotInstalled, StoreDamaged.
        """
        model = self._read_manifest(check_name(name))
        for path, size in ((model.paths[0], model.size), (model.chat_template, None)):
            if path is None:
                continue
            found = path.lstat() if path.is_symlink() or path.exists() else None
            if found is None or not stat.S_ISREG(found.st_mode) or (size is not None and found.st_size != size):
                raise StoreDamaged(
                    f"a file of model {name!r} is missing, a link, or cut short. Remove and install it again."
                )
        return model

    def verify(self, name: str, progress: ByteProgress = silent) -> InstalledModel:
        """The model of that name after hashing all of its files again. Raises DigestMismatch, StoreDamaged."""
        model = self.get(name)
        _check_file(model.paths[0], model.sha256, lambda done: progress("hash", done, model.size))
        if model.chat_template is not None and model.chat_template_sha256 is not None:
            _check_file(model.chat_template, model.chat_template_sha256, lambda done: None)
        return model

    def add(
        self, path: Path, facts: ModelFacts, *, chat_template: bytes | None = None, progress: ByteProgress = silent
    ) -> InstalledModel:
        """Install the file `path` (which stays) as `facts` says. Any ModelError; installing twice is no error."""
        refuse_pickle_name(path.name)
        check_name(facts.name)
        with _open_regular(path) as source:
            chunks, expect = _read_chunks(source, path), os.fstat(source.fileno()).st_size
            return self.install(chunks, facts, expect=expect, chat_template=chat_template, progress=progress)

    def install(
        self,
        chunks: Iterator[bytes],
        facts: ModelFacts,
        *,
        expect: int,
        chat_template: bytes | None = None,
        progress: ByteProgress = silent,
    ) -> InstalledModel:
        """Install the bytes that `chunks` yields (`expect` of them, for the bar and the room check) as `facts`.

        They are hashed while they are copied into the store, so what was checked is what is kept; only then are they
        looked at. Raises any ModelError, and what `chunks` raises.
        """
        check_name(facts.name)
        if chat_template is not None and len(chat_template) > TEMPLATE_LIMIT_BYTES:
            raise SourceUnreadable(f"the chat template has over {TEMPLATE_LIMIT_BYTES} bytes")
        with self._reporting_no_room(), self.staging() as area:
            self._check_room(expect)
            staged = area / "weights"
            size, digest = self._copy(chunks, staged, lambda done: progress("hash", done, expect))
            _check_promise(facts, size=size, digest=digest)
            check_gguf(staged, facts.name)
            self._on_step("copied")
            self._commit(staged, facts, size=size, chat_template=chat_template)
        return self.get(facts.name)

    def remove(self, name: str) -> None:
        """Forget `name`, and its bytes once no other name has them. Raises ModelNotInstalled."""
        check_name(name)
        if not self.root.is_dir():
            raise self._not_installed(name)
        with self._locked():
            try:
                (self._manifests / f"{name}.json").unlink()
            except FileNotFoundError:
                raise self._not_installed(name) from None
            fsync_directory(self._manifests)
            self._on_step("unlinked")
            self._sweep()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory on the store's file system, removed afterwards, whoever dies. Raises ModelError."""
        with self._locked():  # made and locked under the store's lock, so that no sweep falls between the two
            self._sweep()
            area = Path(tempfile.mkdtemp(dir=self._staging))
            holder = os.open(area / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
            fcntl.flock(holder, fcntl.LOCK_EX)
        try:
            self._on_step("staged")
            yield area
        finally:
            shutil.rmtree(area, ignore_errors=True)
            os.close(holder)

    def _commit(self, staged: Path, facts: ModelFacts, *, size: int, chat_template: bytes | None) -> None:
        template_sha256 = hashlib.sha256(chat_template).digest() if chat_template is not None else None
        with self._locked():
            taken = self._existing(facts.name)
            if taken is not None and (taken.sha256, taken.chat_template_sha256) != (facts.sha256, template_sha256):
                raise ModelNameTaken(
                    f"{facts.name!r} is installed with other bytes. Remove it first, or choose another name."
                )
            if chat_template is not None and template_sha256 is not None:
                replace_file(template_path(self._blobs, template_sha256), chat_template)
            os.rename(staged, weights_path(self._blobs, facts.sha256))
            fsync_directory(self._blobs)
            self._on_step("blob")
            if taken is None:
                manifest = encode_manifest(facts, size=size, chat_template_sha256=template_sha256)
                replace_file(self._manifests / f"{facts.name}.json", manifest)
            self._on_step("committed")

    def _copy(self, chunks: Iterator[bytes], to: Path, done: Callable[[int], None]) -> tuple[int, bytes]:
        hasher, size = hashlib.sha256(), 0
        descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        with os.fdopen(descriptor, "wb", buffering=0) as out:
            for chunk in chunks:
                hasher.update(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[out.write(view) :]
                size += len(chunk)
                done(size)
                self._on_step("chunk")
            os.fsync(out.fileno())
        return size, hasher.digest()

    def _read_manifest(self, name: str) -> InstalledModel:
        try:
            with (self._manifests / f"{name}.json").open("rb") as stream:
                data = stream.read(LIMIT_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise self._not_installed(name) from None
        except OSError as error:
            raise StoreDamaged(f"cannot read the manifest of model {name!r}: {error.strerror}") from error
        return parse_manifest(data, name=name, blobs=self._blobs)

    def _existing(self, name: str) -> InstalledModel | None:
        try:
            return self._read_manifest(name)  # not `get`: installing again is how lost or cut bytes are mended
        except ModelNotInstalled:
            return None

    def _not_installed(self, name: str) -> ModelNotInstalled:
        known = ", ".join(self.names()) or "none"
        return ModelNotInstalled(
            f"model {name!r} is not installed (installed: {known}). "
            "Run `appliance models pull NAME` or `appliance models add PATH --name NAME --sha256 DIGEST`."
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            for directory in (self.root, self._blobs, self._manifests, self._staging):
                make_private_directory(directory)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            raise StoreDamaged(f"cannot make the model store at {self.root}: {error.strerror}") from error
        found = self.root.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StoreDamaged(f"{self.root} can be written by others: chmod it to {PRIVATE_DIRECTORY:o}, as its owner")
        with exclusive_lock(self.root / "lock"):
            yield

    def _sweep(self) -> None:
        """Remove what a killed process left. Only under the store's lock; a damaged manifest keeps all blobs."""
        for area in self._staging.iterdir():
            if not _is_held(area / _IN_USE):
                shutil.rmtree(area, ignore_errors=True)
        for stray in self._manifests.glob(".*"):  # replace_file's own staging; its writers hold the lock we hold
            stray.unlink()
        try:
            models = [self._read_manifest(name) for name in self.names()]
        except ModelError:
            return
        named = {path for model in models for path in (*model.paths, model.chat_template) if path is not None}
        for blob in self._blobs.iterdir():
            if blob not in named:
                blob.unlink()

    def _check_room(self, expect: int) -> None:
        free = shutil.disk_usage(self.root).free
        if expect > free:
            raise StoreFull(
                f"the model needs {expect:,} bytes and {self.root} has {free:,} left. Free some and try again."
            )

    @contextmanager
    def _reporting_no_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise StoreDamaged(f"cannot write to the model store at {self.root}: {error.strerror}") from error
            raise StoreFull(f"no room at {self.root}: {error.strerror}. Free some and try again.") from error


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open_regular(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not hang us before fstat sees it
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceUnreadable(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def _read_chunks(source: BinaryIO, path: Path) -> Iterator[bytes]:
    while True:
        try:
            chunk = source.read(CHUNK_BYTES)
        except OSError as error:
            raise SourceUnreadable(f"cannot read {path}: {error.strerror}") from error
        if not chunk:
            return
        yield chunk


def _check_promise(facts: ModelFacts, *, size: int, digest: bytes) -> None:
    if digest == facts.sha256:
        return
    short = f" and {size:,} bytes instead of {facts.size:,}" if facts.size is not None and size != facts.size else ""
    raise DigestMismatch(
        f"model {facts.name!r} has SHA-256 {digest.hex()}{short}, not {facts.sha256.hex()} as promised. "
        "Nothing was installed. Fetch the file again, and check where the expected digest came from."
    )


def _check_file(path: Path, sha256: bytes, done: Callable[[int], None]) -> None:
    hasher, size = hashlib.sha256(), 0
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                hasher.update(chunk)
                size += len(chunk)
                done(size)
    except OSError as error:
        raise StoreDamaged(f"cannot read {path}: {error.strerror}") from error
    if hasher.digest() != sha256:
        raise DigestMismatch(
            f"{path} has SHA-256 {hasher.hexdigest()}: it was changed. Remove the model, install it again."
        )
