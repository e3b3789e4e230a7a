"""What fills a folder or a file goes in; it appears under its name whole and proved, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitkit.checkpoints import native
from vitkit.core.errors import VitkitError, WeightsError
from vitkit.core.files import commit_folder, sha256, sync_file, sync_folder, write_text

PROOF, SUMS = "proof.json", "SHA256SUMS"
"""The latter in the form that `sha256sum -c` reads. Written last: its presence says that the rest is whole."""
OURS = (native.REFERENCE, native.LABELS)
"""With the list of their checksums, what would make a folder look like an artefact of ours, which it is no more."""


def put_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder aside, and give it its name; files of a folder that is there are replaced.

    Of what was there, what an earlier export wrote and nobody changed is removed, and what is somebody else's stays.
    """
    name = out.absolute().name
    _sweep(out.absolute().parent, name)
    if not (out.exists() or out.is_symlink()):
        with _said_of(out, aside=out.with_name(f".{out.name}.{os.getpid()}.tmp")):
            commit_folder(out, fill)
        return
    # In it and not beside: it may be a volume or a link, and a file cannot be moved from one file system to another.
    _sweep(out, name)
    aside = _aside(out / name)
    try:
        aside.mkdir()
        with _said_of(out, aside=aside):
            fill(aside)
        for path in aside.iterdir():
            sync_file(path)
        new = sorted((path.name for path in aside.iterdir()), key=lambda name: name == SUMS)
        for file in new:
            if (out / file).is_dir():
                raise WeightsError(f"{out / file}: a folder, and a file is to be written", hint="choose another OUT")
        for file in (SUMS, *_left_by_us(out, new)):
            (out / file).unlink(missing_ok=True)
        for file in new:
            (aside / file).replace(out / file)
        sync_folder(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_file(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write one file of this name aside, and its proof; both move here once they are on the disk."""
    _sweep(out.absolute().parent, out.name)
    aside = _aside(out)
    try:
        aside.mkdir()
        with _said_of(out, aside=aside / out.name):
            fill(aside / out.name)
        for path in (proof_beside(aside / out.name), aside / out.name):
            if path.is_file():
                sync_file(path)
                path.replace(out.with_name(path.name))
        sync_folder(out.absolute().parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def proof_beside(file: Path) -> Path:
    """Where the proof of weights is that are one file.

    >>> proof_beside(Path("photos.npz")).name
    'photos.npz.proof.json'
    """
    return file.with_name(f"{file.name}.{PROOF}")


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
    """What the proof of a folder says, or that beside a file, where there is one."""
    return _json(out / PROOF if out.is_dir() else proof_beside(out)) or None


def _left_by_us(folder: Path, new: Sequence[str]) -> list[str]:
    """The files of an earlier export, or of an artefact, that are not replaced and still what was written.

    Checksums without a proof of ours beside them, or of no weights, are somebody else's.
    """
    recorded: dict[str, object] = {}
    proof, artefact = stored_proof(folder), _json(folder / native.CHECKSUMS)
    if native.WEIGHTS in artefact and native.CONFIG in artefact:
        recorded |= {name: artefact.get(name) for name in OURS}
        recorded |= {native.CHECKSUMS: sha256(folder / native.CHECKSUMS)}
    if proof and "asked" in proof:
        recorded |= read_sums(folder)
    left = [name for name in recorded if name not in new and (folder / name).is_file()]
    return [name for name in left if sha256(folder / name) == recorded[name]]


def _json(path: Path) -> Mapping[str, object]:
    """The object in a file of JSON; an empty one where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _aside(out: Path) -> Path:
    """Where something is written before it has its name; its own number tells whose it is."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.new.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _sweep(folder: Path, name: str) -> None:
    """Remove what exports to this name were writing in a folder when they were killed."""
    known = re.compile(rf"\.{re.escape(name)}\.([0-9]{{1,9}})(\.new)?\.tmp")
    for path in folder.iterdir() if folder.is_dir() else ():
        found = known.fullmatch(path.name)
        if found and not path.is_symlink() and not _is_running(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


@contextmanager
def _said_of(out: Path, *, aside: Path) -> Iterator[None]:
    """Errors name the place that the user chose, not the one where it was tried."""
    try:
        yield
    except VitkitError as error:
        message = error.message.replace(str(aside), str(out))
        if message == error.message:
            raise
        raise type(error)(message, expected=error.expected, got=error.got, hint=error.hint) from error
