"""What a weight file claims of itself goes in; an error comes out where weights cannot be so, before any is read.

The limits are far above the largest Vision Transformer and far below what hurts: a file that lies is refused from its
first bytes, at the cost of a few megabytes and a fraction of a second.
"""

import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from vitkit.core.errors import WeightsError
from vitkit.core.files import kind_of_file
from vitkit.core.shapes import Tensor

MOST_TENSORS = 5_000
"""ViT-22B has about 600, and three times as many with both moments of its optimiser."""
MOST_AXES = 8
"""A convolution has 4, and one more where blocks are stacked."""
MOST_ON_AN_AXIS = 10**8
"""The longest axis of a Vision Transformer is its 21,843 classes, or a long row of patches."""
MOST_NAME = 1_000
"""The longest names, of stacked blocks under prefixes, have about 100 characters."""
MOST_CONFIG = 4 << 20
"""A config.json with the 21,843 names of ImageNet-21k, both ways, has about 2 MiB."""
MOST_BRACKETS = 4 * MOST_TENSORS
"""A header has three for each tensor. A megabyte of empty lists is parsed into a hundred, and takes a second."""
MOST_DEPTH = 32
"""How deep a config.json may be: they are two or three levels deep."""
MOST_SAID = {"depth": 1_000, "units": 1_000, "image_size": 100_000, "registers": 10_000}
"""What a configuration may say, by key: a model is built layer by layer, and a picture is resized before it is seen."""
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxtuple, SHORT.maxlist = 2, MOST_AXES, MOST_AXES
"""A tuple of one tuple twice, and so on forty times, is small in a file; its plain representation is endless."""
DAMAGED = "fetch it again from its publisher; if it stays so, do not trust it"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file: what it is, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def refusal(
    where: Path | str, reason: str, *, expected: object = None, got: object = None, hint: str = DAMAGED
) -> WeightsError:
    """The error that says which file cannot be read, and why."""
    return WeightsError(f"{printable(str(where))}: {reason}", expected=expected, got=got, hint=hint)


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; anything but a folder or a file, such as a pipe, which would wait, is refused."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        hint = "it is a link to nothing" if path.is_symlink() else "check the path"
        raise refusal(path, "no such file", hint=hint) from error
    except (OSError, ValueError) as error:
        raise refusal(path, f"cannot be opened: {brief(error)}", hint="check the path") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise refusal(path, "not a file", expected="a file or a folder", got=kind_of_file(mode), hint="check the path")
    return stat.S_ISDIR(mode)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file to read, and never wait for one that is none."""
    if is_folder(path):
        raise refusal(path, "not a file", expected="a file", got="a folder", hint="name the file in it")
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        raise refusal(path, f"cannot be opened: {brief(error)}", hint="check who may read it") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was exchanged meanwhile
        file.close()
        raise refusal(path, "not a file", expected="a file", hint="check the path")
    return file


def size_of(file: BinaryIO) -> int:
    """The bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def brief(value: object) -> str:
    """A value from a file in an error message: on one line, and not longer than one.

    >>> brief("a\\nb" + "c" * 1000)[:8]
    'a\\\\nbcccc'
    """
    text = str(value) if isinstance(value, Exception | str) else SHORT.repr(value)
    return printable(text if len(text) <= 120 else f"{text[:120]}…")


def printable(text: str) -> str:
    r"""A text that does nothing to a terminal but stand there.

    >>> printable("höhe\x1b[2J")
    'höhe\\x1b[2J'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def check_count(count: int, *, where: Path | str) -> None:
    """Refuse a file with no tensors, or with more than any model has."""
    if count == 0:
        raise refusal(where, "holds no tensors")
    if count > MOST_TENSORS:
        raise refusal(where, "holds too many tensors", expected=f"at most {MOST_TENSORS:,}", got=f"{count:,}")


def check_name(name: str, *, where: Path | str) -> None:
    r"""Refuse a name that is no tensor's: one that leads out of a folder, or is no line of text.

    >>> check_name("../../etc/passwd", where="model.npz")
    Traceback (most recent call last):
    vitkit.core.errors.WeightsError: model.npz: the name '../../etc/passwd' leads out of the file
    """
    if not name or len(name) > MOST_NAME or not name.isprintable():
        raise refusal(where, f"'{brief(name)}' is not the name of a tensor")
    if name.startswith("/") or "\\" in name or name[1:2] == ":" or ".." in name.split("/"):
        raise refusal(where, f"the name '{brief(name)}' leads out of the file")


def check_shape(shape: object, *, name: str, where: Path | str) -> tuple[int, ...]:
    """The shape, where it is one that weights can have.

    >>> check_shape([3, 4], name="kernel", where="model.npz")
    (3, 4)
    >>> check_shape([3, -4], name="kernel", where="model.npz")
    Traceback (most recent call last):
    vitkit.core.errors.WeightsError: model.npz: kernel has no possible shape (got [3, -4])
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > MOST_AXES:
        raise refusal(where, f"{name} has no possible shape", got=brief(shape))
    if not all(type(side) is int and 0 < side <= MOST_ON_AN_AXIS for side in shape):
        raise refusal(where, f"{name} has no possible shape", got=brief(shape))
    return tuple(shape)


def byte_count(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes that a tensor's numbers fill.

    >>> byte_count((3, 4), torch.bfloat16)
    24
    """
    return math.prod(shape) * dtype.itemsize


def parsed_json(content: bytes, *, where: Path | str) -> Any:
    """What a JSON text holds. An object with a name twice is refused: readers do not agree on which one counts.

    >>> parsed_json(b'{"a": 1, "a": 2}', where="config.json")
    Traceback (most recent call last):
    vitkit.core.errors.WeightsError: config.json: has the name 'a' twice
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise refusal(where, f"has the name '{brief(twice)}' twice")
        return made

    if content.count(b"[") + content.count(b"{") > MOST_BRACKETS:
        raise refusal(where, "holds too many lists", expected=f"at most {MOST_BRACKETS:,}")

    def no_number(text: str) -> NoReturn:
        raise refusal(where, f"holds {text}, which is no number")

    try:
        return json.loads(content.decode(), object_pairs_hook=once, parse_constant=no_number)
    except RecursionError as error:
        raise refusal(where, "is nested too deep") from error
    except ValueError as error:
        raise refusal(where, f"is not JSON: {brief(error)}") from error


def read_json(path: Path, *, most: int = MOST_CONFIG) -> Mapping[str, Any]:
    """The JSON object in a small file."""
    value = read_value(path, most=most)
    if not isinstance(value, dict):
        raise refusal(path, "is not a JSON object", got=brief(type(value).__name__))
    return value


def read_value(path: Path, *, most: int = MOST_CONFIG) -> Any:
    """What a small file of JSON holds."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise refusal(path, "is too long", expected=f"at most {most:,} bytes")
    value = parsed_json(content, where=path)
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise refusal(path, "is nested too deep", expected=f"at most {MOST_DEPTH} levels")
    return value


def check_claims(claims: object, *, where: Path | str, key: str = "") -> None:
    """Refuse a configuration of a size that no model has, before one is built of it.

    >>> check_claims({"depth": 10**9}, where="a.json")
    Traceback (most recent call last):
    vitkit.core.errors.WeightsError: a.json: depth is larger than any model's (expected at most 1,000, got 1000000000)
    """
    if isinstance(claims, Mapping):
        for name, claim in claims.items():
            check_claims(claim, where=where, key=str(name))
    elif isinstance(claims, list):
        for claim in claims:
            check_claims(claim, where=where, key=key)
    elif isinstance(claims, int | float):
        most = MOST_SAID.get(key, MOST_ON_AN_AXIS)
        if not abs(claims) <= most:
            raise refusal(
                where, f"{brief(key)} is larger than any model's", expected=f"at most {most:,}", got=brief(claims)
            )
