"""What every runtime looks like to the export: what it needs, how it writes a program, and how it runs one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError

Numbers = NDArray[np.float32]
Run = Callable[[Numbers], Mapping[str, Numbers]]
"""Normalised pixels, B × C × H × W, to answers by name."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A program's kind. `write` puts it into a folder, `start` makes one that is there ready to run."""

    name: str
    title: str
    file: str
    """The file that a user names to load it."""
    loader: str
    """The line of Python that loads it, with {out} for its folder."""
    package: str
    """What runs it, as installed."""
    needs: tuple[str, ...]
    """What must be importable to write and to run it."""
    extra: str
    """The name of the dependencies in `pip install 'vitkit[…]'`."""
    write: Callable[[Artefact, Path], None]
    start: Callable[[Path], Run]

    @property
    def version(self) -> str:
        """Package and version of what runs it here."""
        return f"{self.package} {metadata.version(self.package)}"


def check_installed(title: str, *, needs: Sequence[str], extra: str) -> None:
    """Refuse a runtime that is not here, before time is spent.

    >>> check_installed("ONNX", needs=("numpy", "no_such_package"), extra="export")
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: ONNX needs no_such_package, which is not installed
    """
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        verb = "which is" if len(missing) == 1 else "which are"
        raise ConfigError(
            f"{title} needs {' and '.join(missing)}, {verb} not installed", hint=f"pip install 'vitkit[{extra}]'"
        )
