"""A pickle of plain values and byte arrays goes in, the values come out; nothing in it is ever called or imported.

CIFAR's python version is a pickle, and to unpickle a file is to run it. Here the opcodes are data: numbers, texts,
lists, tuples, dicts and NumPy's uint8 arrays. Any other is refused.
"""

import math
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.pickles import Name, PickleReader

ENCODE = "_codecs encode"
DTYPE = "numpy dtype"
NDARRAY = "numpy ndarray"
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
FROM_BUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")
BYTES = "__builtin__ bytes"
"""How old protocols write empty bytes: a call without arguments."""
ALLOWED = frozenset({BYTES, ENCODE, DTYPE, NDARRAY, *RECONSTRUCT, *FROM_BUFFER})


@dataclass
class Element:
    """An array's element type, by NumPy's code."""

    code: object


@dataclass
class Pixels:
    """An array whose content is still to come."""

    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None = None


def read_pickle(content: bytes, *, where: str) -> object:
    """The value in a pickle, where it is a plain one.

    >>> import os, pickle
    >>> read_pickle(pickle.dumps({b"labels": [1, 2]}, protocol=2), where="data_batch_1")
    {b'labels': [1, 2]}
    >>> read_pickle(pickle.dumps(os.system), where="data_batch_1")
    Traceback (most recent call last):
    vitkit.core.errors.DataError: data_batch_1 is not a plain pickle: it names posix.system
    """
    try:
        return finished(ArrayReader().read(BytesIO(content)))
    except ValueError as error:
        raise DataError(f"{where} is not a plain pickle: {error}", hint="fetch it again from its publisher") from error


class ArrayReader(PickleReader):
    """NumPy's uint8 arrays, by the names under which NumPy writes them."""

    most = 2_000_000
    """CIFAR-100's 50,000 images take 300,000."""
    allowed = ALLOWED

    def old_text(self, text: str) -> bytes:
        """Python 2's str is bytes."""
        return text.encode("latin-1")

    def called(self, text: str, arguments: tuple[object, ...]) -> object:
        """What NumPy's name with these arguments stands for."""
        if text == ENCODE and isinstance(arguments[0], str) and arguments[1] in ("latin1", b"latin1"):
            return arguments[0].encode("latin-1")
        if text == BYTES and arguments == ():
            return b""
        if text == DTYPE:
            return Element(arguments[0])
        if text in RECONSTRUCT and arguments[0] == Name(NDARRAY):
            return Pixels()
        if text in FROM_BUFFER:
            buffer, element, shape, order = arguments
            return Pixels(pixels(shape, element, order in ("F", b"F"), buffer))
        return super().called(text, arguments)

    def fill(self, built: object, state: object) -> None:
        """Take in the state of an array or of its element type."""
        if isinstance(built, Pixels) and isinstance(state, tuple):
            _, shape, element, column_first, buffer = state
            built.array = pixels(shape, element, bool(column_first), buffer)
        elif not isinstance(built, Element):  # an element type's state is its byte order: single bytes have none
            super().fill(built, state)


def pixels(
    shape: object, element: object, column_first: bool, buffer: object
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes as an array of that shape."""
    if not isinstance(element, Element) or element.code not in ("u1", b"u1", "|u1", b"|u1"):
        raise ValueError("it has an array of other than uint8")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("it has an array without a shape")
    if not isinstance(buffer, bytes | bytearray) or len(buffer) != math.prod(shape):
        raise ValueError(f"it has an array whose bytes do not fill the shape {shape}")
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape, order="F" if column_first else "C")


def finished(value: object) -> object:
    """The value with arrays in their places, for one level of dict, which is as deep as data files go."""
    if isinstance(value, dict):
        return {key: item.array if isinstance(item, Pixels) else item for key, item in value.items()}
    return value.array if isinstance(value, Pixels) else value
