"""A pickle of plain values and byte arrays goes in, the values come out; nothing in it is ever called or imported.

CIFAR's python version is a pickle, and to unpickle a file is to run it. This reads the opcodes as data instead. It
knows numbers, texts, lists, tuples, dicts and NumPy's uint8 arrays, by the names under which NumPy writes them, and
refuses any other.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitkit.core.errors import DataError

ENCODE = "_codecs encode"
DTYPE = "numpy dtype"
NDARRAY = "numpy ndarray"
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
FROM_BUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")
BYTES = "__builtin__ bytes"
"""How old protocols write empty bytes: a call without arguments."""
ALLOWED = frozenset({BYTES, ENCODE, DTYPE, NDARRAY, *RECONSTRUCT, *FROM_BUFFER})


@dataclass(frozen=True)
class Name:
    """A name from the pickle: a mark, not what it stands for."""

    text: str


@dataclass(frozen=True)
class Mark:
    """Where a list, tuple or dict begins on the stack."""


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
    vitkit.core.errors.DataError: data_batch_1 is not a plain pickle: it names posix system
    """
    try:
        return finished(Reader().read(content))
    except (ValueError, IndexError, KeyError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise DataError(f"{where} is not a plain pickle: {error}", hint="fetch it again from its publisher") from error


PUSHES = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
BYTE_TEXTS = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING"})
CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": Mark,
}


class Reader:
    """The stack and the memory of the pickle format, for the few opcodes that plain values need."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memory: dict[int, object] = {}

    def read(self, content: bytes) -> object:
        """The value that is left when the opcodes end."""
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in PUSHES:
                self.stack.append(argument)
            elif name in BYTE_TEXTS:  # Python 2's str: pickletools gives it as Latin-1
                self.stack.append(str(argument).encode("latin-1"))
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                self.memory[int(argument or 0)] = self.stack[-1]
            elif name == "MEMOIZE":
                self.memory[len(self.memory)] = self.stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                self.stack.append(self.memory[int(argument or 0)])
            elif name == "STOP":
                return self.stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self.build(name, argument)
        raise ValueError("it has no end")

    def build(self, name: str, argument: object) -> None:
        """The opcodes that make one value of several."""
        stack = self.stack
        if name in ("GLOBAL", "STACK_GLOBAL"):
            second, first = (None, argument) if name == "GLOBAL" else (stack.pop(), stack.pop())
            stack.append(allowed(str(first) if second is None else f"{first} {second}"))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(reduced(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            fill(stack[-1], state)
        elif name in ("TUPLE", "LIST"):
            items = self.since_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self.since_mark()
            if not isinstance(stack[-1], list):
                raise ValueError("it adds to what is not a list")
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self.since_mark()
            if not isinstance(stack[-1], dict):
                raise ValueError("it adds to what is not a dict")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "DICT":
            items = self.since_mark()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        else:
            raise ValueError(f"it has the opcode {name}")

    def since_mark(self) -> list[object]:
        """The values since the last mark."""
        items = []
        while not isinstance(item := self.stack.pop(), Mark):
            items.append(item)
        return items[::-1]


def allowed(text: str) -> Name:
    """The mark for a name that NumPy's own pickles have."""
    if text not in ALLOWED:
        raise ValueError(f"it names {text[:80]}")
    return Name(text)


def reduced(called: object, arguments: object) -> object:
    """What NumPy's name with these arguments stands for."""
    text = called.text if isinstance(called, Name) else ""
    if not isinstance(arguments, tuple):
        raise ValueError("it has arguments that are no tuple")
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
    raise ValueError(f"it calls {text or type(called).__name__}")


def fill(built: object, state: object) -> None:
    """Take in the state of an array or of its element type."""
    if isinstance(built, Pixels) and isinstance(state, tuple):
        _, shape, element, column_first, buffer = state
        built.array = pixels(shape, element, bool(column_first), buffer)
    elif not isinstance(built, Element):  # an element type's state is its byte order: single bytes have none
        raise ValueError(f"it gives a state to a {type(built).__name__}")


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
