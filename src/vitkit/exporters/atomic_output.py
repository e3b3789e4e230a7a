"""Atomic output of exports: a directory or file appears complete and verified, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from vitkit.core.errors import VitkitError, WeightsError
from vitkit.core.files import commit_directory, sha256, sync_directory, sync_file, write_text
from vitkit.weights import artifact as artifact_io

VERIFICATION, CHECKSUMS = "verification.json", "SHA256SUMS"
"""SHA256SUMS has the format of `sha256sum -c`. It is written last: its presence means that the rest is complete."""
ARTIFACT_FILES = (artifact_io.REFERENCE, artifact_io.LABELS)
"""Files of an artifact, besides its checksums, that must not remain in an export that replaces it."""


def write_directory(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a temporary directory and rename it; files of an existing directory are replaced.

    Unchanged files of an earlier export are removed, and all other files are kept.
    """
    name = out.absolute().name
    _remove_leftovers(out.absolute().parent, name)
    if not (out.exists() or out.is_symlink()):
        with _report_final_path(out, temporary=out.with_name(f".{out.name}.{os.getpid()}.tmp")):
            commit_directory(out, fill)
        return
    # Inside and not next to it: it may be a volume or a link, and files cannot be renamed across file systems.
    _remove_leftovers(out, name)
    with _temporary_directory(out / name) as temporary:
        with _report_final_path(out, temporary=temporary):
            fill(temporary)
        new = sorted((path.name for path in temporary.iterdir()), key=lambda name: name == CHECKSUMS)
        for file in new:
            if (out / file).is_dir():
                raise WeightsError(f"{out / file}: a directory, but a file is to be written", hint="choose another OUT")
            sync_file(temporary / file)
        for file in (CHECKSUMS, *_stale_files(out, new)):
            (out / file).unlink(missing_ok=True)
        _move_files(temporary, new, out)


def write_file(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a file and its verification to a temporary directory, and move both once they are on disk."""
    parent = out.absolute().parent
    _remove_leftovers(parent, out.name)
    with _temporary_directory(out) as temporary:
        with _report_final_path(out, temporary=temporary / out.name):
            fill(temporary / out.name)
        names = [name for name in (verification_path(out).name, out.name) if (temporary / name).is_file()]
        for name in names:
            sync_file(temporary / name)
        _move_files(temporary, names, parent)


def _move_files(source: Path, names: Sequence[str], target: Path) -> None:
    for name in names:
        (source / name).replace(target / name)
    sync_directory(target)


@contextmanager
def _temporary_directory(out: Path) -> Iterator[Path]:
    """Create a directory next to `out`, with the process id in its name, and remove it in the end."""
    path = out.with_name(f".{out.name}.{os.getpid()}.new.tmp")
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def verification_path(file: Path) -> Path:
    """Return the path of the verification of a single file: NAME.verification.json."""
    return file.with_name(f"{file.name}.{VERIFICATION}")


def write_checksums(directory: Path) -> None:
    """Write the checksums of all files of a directory."""
    names = sorted(path.name for path in directory.iterdir())
    write_text(directory / CHECKSUMS, "".join(f"{sha256(directory / name)}  {name}\n" for name in names))


def find_damaged_file(directory: Path) -> str | None:
    """Return the first file that changed since it was written, or None."""
    for name, recorded in read_checksums(directory).items():
        path = directory / name
        if not path.is_file() or sha256(path) != recorded:
            return name
    return None


def read_checksums(directory: Path) -> Mapping[str, str]:
    """Return the checksums of a directory by file name. Paths and invalid lines are ignored."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return {}
    pairs = (line.split("  ", 1) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and Path(pair[1]).name == pair[1]}


def read_verification(out: Path) -> Mapping[str, object] | None:
    """Return the verification of an exported directory or file, or None."""
    return _json(out / VERIFICATION if out.is_dir() else verification_path(out)) or None


def _stale_files(directory: Path, new: Sequence[str]) -> list[str]:
    """Return unchanged files of an earlier export or artifact that are not replaced.

    Checksums without a verification of vitkit, or that list no weights, are of another program.
    """
    recorded: dict[str, object] = {}
    verification, artifact = read_verification(directory), _json(directory / artifact_io.CHECKSUMS)
    if artifact_io.WEIGHTS in artifact and artifact_io.CONFIG in artifact:
        recorded |= {name: artifact.get(name) for name in ARTIFACT_FILES}
        recorded |= {artifact_io.CHECKSUMS: sha256(directory / artifact_io.CHECKSUMS)}
    if verification and "request" in verification:
        recorded |= read_checksums(directory)
    left = [name for name in recorded if name not in new and (directory / name).is_file()]
    return [name for name in left if sha256(directory / name) == recorded[name]]


def _json(path: Path) -> Mapping[str, object]:
    """Return the object in a JSON file, or an empty one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _remove_leftovers(directory: Path, name: str) -> None:
    """Remove temporary files of killed exports to this name."""
    pattern = re.compile(rf"\.{re.escape(name)}\.([0-9]{{1,9}})(\.new)?\.tmp")
    for path in directory.iterdir() if directory.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and not path.is_symlink() and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _report_final_path(out: Path, *, temporary: Path) -> Iterator[None]:
    """Replace the temporary path in errors by the path that the user chose."""
    try:
        yield
    except VitkitError as error:
        message = error.message.replace(str(temporary), str(out))
        if message == error.message:
            raise
        raise type(error)(message, expected=error.expected, got=error.got, hint=error.hint) from error
