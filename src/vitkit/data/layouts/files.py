"""Files of datasets: directory listings, names of splits, shards, members of tar archives and size checks."""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from vitkit.core.errors import DataError
from vitkit.core.files import read_text
from vitkit.core.formatting import format_plural, shorten_list

IMAGE_SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif", ".hif",
})  # fmt: skip
SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
CLASS_NAME_FILES = ("classes.txt", "classnames.txt")
MAX_DEPTH = 100
MAX_VISITS = 100
"""Paths by which links may lead to one directory; links can multiply few directories to millions."""
MAX_SHARDS = 100_000
SMALL_FILE = 64 << 20
"""Uncompressed size that is always allowed."""
MAX_EXPANSION = 20
"""Ratio of uncompressed to compressed size. Drawings reach 10; decompression bombs 1,000."""
MAX_TEXT = 1 << 20
"""Size of a file with a label, and of a line in a list."""
MAX_HEADER = 1 << 20
"""Size of a header in a tar: long names and attributes."""


def is_image(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - a million Paths are slow


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or created by macOS or Windows."""
    return name.startswith(".") or name in {"__MACOSX", "Thumbs.db", "desktop.ini"}


def walk_files(root: Path) -> Iterator[str]:
    """Yield the relative names, with /, of all files below a directory, and those of empty directories with a final /.

    Links are followed, but not in a circle.
    """
    return _walk(root, prefix="", ancestors=frozenset(), visits=Counter())


def _walk(
    directory: Path, *, prefix: str, ancestors: frozenset[tuple[int, int]], visits: Counter[tuple[int, int]]
) -> Iterator[str]:
    status = directory.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in ancestors:
        return
    visits[identity] += 1
    if visits[identity] > MAX_VISITS:
        raise DataError(f"links lead to {directory} on too many paths", expected=f"at most {MAX_VISITS}")
    if len(ancestors) >= MAX_DEPTH:
        raise DataError(f"{directory} is nested too deeply", expected=f"at most {MAX_DEPTH} levels of folders")
    is_empty, ancestors = True, ancestors | {identity}
    with os.scandir(directory) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            is_empty = False
            if entry.is_dir():
                yield from _walk(Path(entry.path), prefix=f"{prefix}{entry.name}/", ancestors=ancestors, visits=visits)
            else:  # also a broken link: reading it raises an error with its name
                yield prefix + entry.name
    if is_empty and prefix:
        yield prefix


def list_left_out(names: Sequence[str]) -> list[str]:
    """Return one warning about files and folders that are not used, by kind and suffix; none if there are none.

    >>> list_left_out(["1.svg", "2.pdf", "3.svg", "bird/"])
    ['left out 3 files that are not images (2 .svg, 1 .pdf): 1.svg, 2.pdf, 3.svg; 1 folder without images: bird/']
    """
    folders = [name for name in names if name.endswith("/")]
    images = [name for name in names if is_image(name)]
    files = [name for name in names if not name.endswith("/") and not is_image(name)]
    parts = []
    if files:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in count_suffixes(files).most_common(5))
        noun = "files that are not images" if len(files) > 1 else "file that is not an image"
        parts.append(f"{len(files):,} {noun} ({counts}): {shorten_list(files, limit=3)}")
    if images:
        parts.append(f"{format_plural(len(images), 'image')} without a class: {shorten_list(images, limit=3)}")
    if folders:
        parts.append(f"{format_plural(len(folders), 'folder')} without images: {shorten_list(folders, limit=3)}")
    return [f"left out {'; '.join(parts)}"] if parts else []


def count_suffixes(names: Iterable[str]) -> Counter[str]:
    """Count file names by their suffix."""
    return Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in names)  # noqa: PTH122


def list_directory(path: Path) -> list[Path]:
    """Return the files and directories directly in a directory, by name, without hidden ones, pipes and devices."""
    if not path.is_dir():
        return []
    entries = (entry for entry in path.iterdir() if not is_hidden(entry.name) and (entry.is_file() or entry.is_dir()))
    return sorted(entries, key=lambda entry: entry.name)


def read_lines(path: Path) -> Iterator[str]:
    """Return the lines of a text file that are not empty."""
    return (line.strip() for line in read_list(path).splitlines() if line.strip())


def read_list(path: Path) -> str:
    """Return the text of a file of labels or names."""
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", hint="save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def iterate_lines(file: IO[str], *, path: Path) -> Iterator[str]:
    """Yield the lines of a text file; raise DataError for one that is too long to be a file name and a label."""
    number = 1
    while line := file.readline(MAX_TEXT + 1):
        if len(line) > MAX_TEXT:
            raise DataError(f"{path}, line {number} is too long", expected=f"at most {MAX_TEXT:,} characters")
        yield line
        number += 1


def read_class_names(directory: Path) -> tuple[str, ...]:
    """Return the lines of classes.txt in a directory; none if there is no such file."""
    for path in (directory / name for name in CLASS_NAME_FILES):
        if path.is_file():
            return tuple(read_lines(path))
    return ()


def parse_split(name: str) -> str | None:
    """Return the split that a folder or column value names, or None."""
    return SPLITS.get(name.strip().lower())


def find_split(path: Path, *, root: Path) -> str | None:
    """Return the split that a shard belongs to, by a word of its file name or else by a parent folder.

    >>> find_split(Path("d/cifar10-train-00000-of-00002.parquet"), root=Path("d"))
    'train'
    >>> find_split(Path("d/default/validation/0000.parquet"), root=Path("d"))
    'val'
    """
    words = path.name.replace("_", "-").replace(".", "-").split("-")
    folders = path.relative_to(root).parts[:-1]
    return next((split for word in (*words, *reversed(folders)) if (split := parse_split(word))), None)


def select_one(path: Path, matches: Sequence[Path], *, content: str, expected: str) -> Path:
    """Return the only match at a path; raise DataError if there are several or none."""
    if len(matches) == 1:
        return matches[0]
    names = shorten_list([match.name for match in matches])
    raise DataError(f"{path} has {len(matches) or 'no'} {content}", expected=expected, got=names or None)


def check_expansion(size: int, *, compressed: int, where: str) -> None:
    """Raise DataError if a file decompresses to far more than images do."""
    limit = max(SMALL_FILE, MAX_EXPANSION * compressed)
    if size > limit:
        raise DataError(f"{where} decompresses to far more than images do", expected=f"at most {limit:,} bytes")


def is_pattern(path: Path) -> bool:
    """Return whether a path is a brace pattern, and not a file or directory with braces in its name."""
    return bool(re.search(r"\{[^{}]*(\.\.|,)[^{}]*\}", str(path))) and not path.exists()


def expand_braces(pattern: str) -> list[str]:
    """Return the paths that match a brace pattern.

    >>> expand_braces("data-{000009..000011}.tar")
    ['data-000009.tar', 'data-000010.tar', 'data-000011.tar']
    >>> expand_braces("{train,val}-{0..1}.tar")
    ['train-0.tar', 'train-1.tar', 'val-0.tar', 'val-1.tar']
    """
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if not braces:
        return [pattern]
    if numbers := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", braces[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + MAX_SHARDS:
            raise DataError(f"{pattern} is not a range of files", expected=f"1 to {MAX_SHARDS} files")
        words = [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]
    else:
        words = braces[1].split(",")
    tails = expand_braces(pattern[braces.end() :])
    if len(words) * len(tails) > MAX_SHARDS:
        raise DataError(f"{pattern} matches too many files", expected=f"at most {MAX_SHARDS}")
    return [pattern[: braces.start()] + word + tail for word in words for tail in tails]


def find_shards(path: Path, *, suffix: str) -> list[Path]:
    """Return the shards of a file, a brace pattern, or a directory and its subdirectories."""
    if is_pattern(path):
        shards = [Path(shard) for shard in expand_braces(str(path))]
        if missing := [str(shard) for shard in shards if not shard.is_file()]:
            got = f"{len(missing)} of {len(shards)}"
            raise DataError(f"{path} matches files that do not exist: {shorten_list(missing)}", got=got)
    elif path.is_file():
        shards = [path]
    else:
        shards = list_directory(path)
        for directory in [entry for entry in shards if entry.is_dir()]:
            below = (directory / name for name in walk_files(directory) if name.endswith(suffix))
            shards += sorted(shard for shard in below if shard.is_file())
    return [shard for shard in shards if shard.suffix.lower() == suffix and not shard.name.startswith("ILSVRC2012_")]


def find_base_directory(path: Path) -> Path:
    """Return the directory that names are relative to: the path itself, or the parent of a file or pattern."""
    if is_pattern(path):
        return Path(str(path).partition("{")[0] + "x").parent
    return path.parent if path.is_file() else path


def group_shards(path: Path, *, suffix: str) -> dict[str, list[Path]]:
    """Return the shards of each split; all or none of them must name their split."""
    base = find_base_directory(path)
    by_split: dict[str, list[Path]] = {}
    for shard in find_shards(path, suffix=suffix):
        by_split.setdefault(find_split(shard, root=base) or "all", []).append(shard)
    if "all" in by_split and len(by_split) > 1:
        names = shorten_list([shard.name for shard in by_split["all"]])
        hint = "begin each name with train-, val- or test-"
        raise DataError(f"only some {suffix} files of {path} name their split, but not {names}", hint=hint)
    return by_split


class TarMember(NamedTuple):
    """A file in an archive, by its offset: it is read in place."""

    name: str
    offset: int
    size: int


def list_members(archive: Path) -> Iterator[TarMember]:
    """Yield the regular files of an uncompressed tar in stored order. Only headers are read."""
    with archive.open("rb") as file:
        yield from scan_members(file, 0, archive.stat().st_size, name=str(archive))


def list_nested_members(archive: Path) -> Iterator[TarMember]:
    """Yield the files of a tar and of the tars in it, such as ImageNet's."""
    with archive.open("rb") as file:
        for member in list_members(archive):
            if member.name.lower().endswith(".tar"):
                end = member.offset + member.size
                for inner in scan_members(file, member.offset, end, name=f"{archive}/{member.name}"):
                    yield inner._replace(name=f"{member.name}/{inner.name}")
            else:
                yield member


def list_images(archive: Path) -> list[TarMember]:
    """Return the images of a tar and of the tars in it, sorted by name as in folders, so that runs are equal."""
    return sorted(member for member in list_nested_members(archive) if is_image(member.name))


class HeaderReader:
    """File of which tarfile reads headers, with a limit on their size; contents are skipped by seeking."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.file, self.name = file, name
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > MAX_HEADER:
            raise DataError(f"{self.name} has a header of {size:,} bytes", expected=f"at most {MAX_HEADER:,}")
        return self.file.read(size)


def scan_members(file: IO[bytes], start: int, end: int, *, name: str) -> Iterator[TarMember]:
    """Yield the regular files of the tar between two offsets of an open file."""
    file.seek(start)
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", HeaderReader(file, name)), mode="r:") as tar:
            while (member := tar.next()) is not None and member.offset < end:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise DataError(
                        f"{name}: {member.name!r} is a path outside of the archive", hint="do not unpack it either"
                    )
                if member.size < 0:  # the next header would be an earlier one, in an endless loop
                    raise DataError(f"{name} is damaged at {member.name}", hint="download it again")
                if not member.isreg() or any(map(is_hidden, member.name.removeprefix("./").split("/"))):
                    continue
                if member.issparse() or member.offset_data + member.size > end:
                    raise DataError(f"{name} is damaged at {member.name}", hint="download it again")
                yield TarMember(member.name.removeprefix("./"), member.offset_data, member.size)
    except DataError:
        raise
    except (tarfile.TarError, EOFError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{name} is not a complete tar archive: {error}", hint="download it again") from error


def read_member_text(file: IO[bytes], member: TarMember, *, where: str) -> str:
    """Return the content of a small text file."""
    if member.size > MAX_TEXT:
        raise DataError(f"{where}: {member.name} is too long for a label", expected=f"at most {MAX_TEXT} bytes")
    file.seek(member.offset)
    try:
        return file.read(member.size).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {member.name} is not UTF-8") from error
