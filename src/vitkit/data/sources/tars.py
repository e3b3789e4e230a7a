"""A tar archive goes in; the name, offset and size of each file in it come out, so that it can be read in place."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from vitkit.core.errors import DataError
from vitkit.data.sources.base import is_hidden

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
        yield from members_of(file, name=str(archive))


def members_of(file: IO[bytes], *, name: str, offset: int = 0) -> Iterator[Member]:
    """The regular files of an open tar that starts at `offset` of another."""
    end = file.seek(0, 2)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps a million of them
                if not member.isreg() or any(map(is_hidden, member.name.removeprefix("./").split("/"))):
                    continue
                if member.issparse() or member.offset_data + member.size > end:
                    raise DataError(f"{name} is damaged at {member.name}", hint="fetch it again")
                yield Member(member.name.removeprefix("./"), offset + member.offset_data, member.size)
    except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
        raise DataError(f"{name} is not a whole tar archive: {error}", hint="fetch it again") from error


def nested_members(archive: Path) -> Iterator[tuple[str, Member]]:
    """The files in the tars of a tar, each with the name of its inner tar; offsets count from the outer start."""
    with archive.open("rb") as file:
        for inner in list(members_of(file, name=str(archive))):
            for member in members_of(Window(file, inner), name=f"{archive}/{inner.name}", offset=inner.offset):
                yield inner.name, member


def read_text(file: IO[bytes], member: Member, *, where: str) -> str:
    """A small text of an archive."""
    if member.size > MOST_TEXT:
        raise DataError(f"{where}: {member.name} is too long for a label", expected=f"at most {MOST_TEXT} bytes")
    file.seek(member.offset)
    try:
        return file.read(member.size).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {member.name} is not UTF-8") from error


class Window(IO[bytes]):
    """A part of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], member: Member) -> None:
        self.file, self.start, self.size, self.position = file, member.offset, member.size, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position from the start, or from the end."""
        self.position = offset + (self.size if whence == 2 else self.position if whence == 1 else 0)
        return self.position

    def tell(self) -> int:
        """The position."""
        return self.position

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes of the part."""
        left = max(self.size - self.position, 0)
        self.file.seek(self.start + self.position)
        content = self.file.read(left if size < 0 else min(size, left))
        self.position += len(content)
        return content
