"""Nothing goes in, the folder comes out that vitkit keeps what it compiles in, which can always be made again.

What is compiled is code that will be run, so it is kept where nobody but this user and root can write.
"""

import os
import stat
from pathlib import Path

from vitkit.core.errors import ConfigError

HINT = "set VITKIT_CACHE to a folder that can be written to"


def cache_folder() -> Path:
    """$VITKIT_CACHE, else vitkit's in the user's cache folder.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, VITKIT_CACHE="compiled"):
    ...     cache_folder()
    PosixPath('compiled')
    """
    if own := os.environ.get("VITKIT_CACHE"):
        return Path(own)
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user) / "vitkit"
    try:
        return Path.home() / ".cache" / "vitkit"
    except RuntimeError as error:  # a container's user without a name has no home
        raise ConfigError("there is no home folder to keep what is compiled in", hint=HINT) from error


def private_folder() -> Path:
    """The cache folder; where others can write to it, as to a volume that many share, one of one's own in it.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, VITKIT_CACHE="/tmp"):
    ...     private_folder() == Path("/tmp") / f"of-{os.geteuid()}"
    True
    """
    folder = cache_folder()
    return folder if is_private(folder) else folder / f"of-{os.geteuid()}"


def make_private(folder: Path) -> None:
    """Make a folder that is this user's alone, if it is not there; one that others can write to is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_private(Path(folder) / "own")
    ...     (Path(folder) / "own").is_dir()
    True
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_private(folder):
        raise PermissionError(f"others can write to {folder}")


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can have put or changed what is there; nothing there is private.

    >>> is_private(Path("/dev/null"))
    False
    """
    try:
        status = path.stat()
    except OSError:
        return True
    if not hasattr(os, "geteuid"):  # Windows says nothing of others by these numbers
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def reason_against_keeping() -> str | None:
    """Why nothing new can be kept in the cache folder, as far as it can be told without trying; None where it can.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, VITKIT_CACHE="/dev/null/compiled"):
    ...     reason_against_keeping()
    '/dev/null/compiled cannot be written to: set VITKIT_CACHE to a folder that can be written to'
    """
    try:
        folder = cache_folder().absolute()
    except ConfigError as error:
        return f"{error}: {error.hint}"
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:  # a folder on the way lets nobody look into it
        writable = False
    return None if writable else f"{folder} cannot be written to: {HINT}"
