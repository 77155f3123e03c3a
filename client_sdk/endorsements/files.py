"""Directories of endorsements, recognised by content: for machines without a network, and for sessions."""

from __future__ import annotations

from pathlib import Path

from client_sdk.errors import PolicyFileError
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.evidence import Endorsements
from client_sdk.wire.errors import WireError

MAX_FILES = 256
LIMIT_FILE_BYTES = 1 << 20


def load_directory(directory: Path) -> Endorsements:
    """All endorsement files of a directory, recognised by content. Raises PolicyFileError naming the file at fault."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise PolicyFileError(f"{directory}: {error.strerror}") from None
    if len(paths) > MAX_FILES:
        raise PolicyFileError(f"{directory}: more than {MAX_FILES} files")
    return merge(recognise_file(path) for path in paths)


def recognise_file(path: Path) -> Endorsements:
    """Raises PolicyFileError: a file the caller gave and nobody can read is a mistake to mend."""
    try:
        with path.open("rb") as file:
            return recognise(file.read(LIMIT_FILE_BYTES + 1))
    except OSError as error:
        raise PolicyFileError(f"{path}: {error.strerror}") from None
    except WireError as error:
        raise PolicyFileError(f"{path}: {error.detail}") from None
