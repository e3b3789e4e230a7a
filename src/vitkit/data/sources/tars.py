"""A tar archive goes in; the name, offset and size of each file in it come out, so that it can be read in place."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from vitkit.core.errors import DataError
from vitkit.data.sources.base import is_hidden, is_image

MOST_TEXT = 1 << 20
"""Labels longer than this are not labels."""


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    size: int


def members(archive: Path) -> Iterator[Member]:
    """The regular files of an uncompressed tar, in stored order. Only the headers are read."""
    with archive.open("rb") as file:
        yield from members_between(file, 0, archive.stat().st_size, name=str(archive))


def nested_members(archive: Path) -> Iterator[tuple[str, Member]]:
    """The files in the tars of a tar, each with the name of its inner tar; offsets count from the outer start."""
    outer = list(members(archive))
    with archive.open("rb") as file:
        for inner in outer:
            end = inner.offset + inner.size
            for member in members_between(file, inner.offset, end, name=f"{archive}/{inner.name}"):
                yield inner.name, member


def images_within(archive: Path) -> Iterator[Member]:
    """The images of a tar and of the tars in it, as ImageNet's are packed, by what follows the last dot of a name."""
    with archive.open("rb") as file:
        for member in members(archive):
            if is_image(member.name):
                yield member
            elif member.name.lower().endswith(".tar"):
                end = member.offset + member.size
                for inner in members_between(file, member.offset, end, name=f"{archive}/{member.name}"):
                    if is_image(inner.name):
                        yield inner._replace(name=f"{member.name}/{inner.name}")


def members_between(file: IO[bytes], start: int, end: int, *, name: str) -> Iterator[Member]:
    """The regular files of the tar between two offsets of an open file."""
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None and member.offset < end:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps a million of them
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise DataError(f"{name}: {member.name!r} leads out of the archive", hint="do not unpack it either")
                if member.size < 0:  # the next header would be one that was read before, for ever
                    raise DataError(f"{name} is damaged at {member.name}", hint="fetch it again")
                if not member.isreg() or any(map(is_hidden, member.name.removeprefix("./").split("/"))):
                    continue
                if member.issparse() or member.offset_data + member.size > end:
                    raise DataError(f"{name} is damaged at {member.name}", hint="fetch it again")
                yield Member(member.name.removeprefix("./"), member.offset_data, member.size)
    except (tarfile.TarError, EOFError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{name} is not a whole tar archive: {error}", hint="fetch it again") from error


def read_text(file: IO[bytes], member: Member, *, where: str) -> str:
    """A small text of an archive."""
    if member.size > MOST_TEXT:
        raise DataError(f"{where}: {member.name} is too long for a label", expected=f"at most {MOST_TEXT} bytes")
    file.seek(member.offset)
    try:
        return file.read(member.size).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {member.name} is not UTF-8") from error
