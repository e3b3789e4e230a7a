"""What fills a folder or a file goes in; it appears under its name whole and proved, or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vitkit.checkpoints import native
from vitkit.core.errors import VitkitError
from vitkit.core.files import commit_folder, sha256, sync_file, sync_folder, write_text

PROOF, SUMS = "proof.json", "SHA256SUMS"
"""The latter in the form that `sha256sum -c` reads. Written last: its presence says that the rest is whole."""
OURS = (native.CHECKSUMS, native.REFERENCE, native.LABELS)
"""What would make a folder look like an artefact of ours, which it is no more once other weights lie in it."""


def put_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder aside, and give it its name; files of a folder that is there are replaced.

    Of what was there, what an earlier export wrote is removed, and what is somebody else's stays.
    """
    with _said_of(out):
        if not (out.exists() or out.is_symlink()):
            commit_folder(out, fill)
            return
        aside = out.with_name(f".{out.name}.{os.getpid()}.new.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        commit_folder(aside, fill)
    try:
        new = sorted((path.name for path in aside.iterdir()), key=lambda name: name == SUMS)
        for name in (SUMS, *_ours(out), *(name for name in OURS if name not in new)):
            (out / name).unlink(missing_ok=True)
        for name in new:
            (aside / name).replace(out / name)
        sync_folder(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_file(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write one file of this name aside, and move it here once it is on the disk."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.new.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        with _said_of(out, aside=aside / out.name):
            fill(aside / out.name)
        sync_file(aside / out.name)
        (aside / out.name).replace(out)
        sync_folder(out.absolute().parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_sums(folder: Path) -> None:
    """Write down what all files of a folder are."""
    names = sorted(path.name for path in folder.iterdir())
    write_text(folder / SUMS, "".join(f"{sha256(folder / name)}  {name}\n" for name in names))


def damaged(folder: Path) -> str | None:
    """The first file that is not what was written, or None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     Path(place, "a").write_text("1"), write_sums(Path(place)), damaged(Path(place))
    (1, None, None)
    """
    for name, recorded in read_sums(folder).items():
        path = folder / name
        if not path.is_file() or sha256(path) != recorded:
            return name
    return None


def read_sums(folder: Path) -> Mapping[str, str]:
    """The checksums of a folder by file; names that lead out of it, or are of no file, are left out."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    pairs = (line.split("  ", 1) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and Path(pair[1]).name == pair[1]}


def stored_proof(out: Path) -> Mapping[str, object] | None:
    """What proof.json of a folder says, where there is one."""
    try:
        found = json.loads((out / PROOF).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _ours(folder: Path) -> list[str]:
    """The files that an earlier export wrote; where there is no proof of one, the checksums are somebody else's."""
    proof = stored_proof(folder)
    return [name for name in read_sums(folder) if (folder / name).is_file()] if proof and "asked" in proof else []


@contextmanager
def _said_of(out: Path, *, aside: Path | None = None) -> Iterator[None]:
    """Errors name the place that the user chose, not the one where it was tried."""
    try:
        yield
    except VitkitError as error:
        places = (
            [aside] if aside else [out.with_name(f".{out.name}.{os.getpid()}{end}") for end in (".tmp", ".new.tmp")]
        )
        places += [places[-1].with_name(f".{places[-1].name}.{os.getpid()}.tmp")]
        message = error.message
        for place in reversed(places):
            message = message.replace(str(place), str(out))
        if message == error.message:
            raise
        raise type(error)(message, expected=error.expected, got=error.got, hint=error.hint) from error
