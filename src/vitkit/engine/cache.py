"""Nothing goes in, the folder comes out that vitkit keeps what it compiles in, which can always be made again."""

import os
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
