"""Interpreter of pickles that never imports or calls anything.

Unpickling runs code. `PickleReader` treats the opcodes as data instead: numbers, strings, lists, tuples and dicts.
Globals, calls and object states are passed to a subclass for one kind of file, which accepts the few that such files
contain and rejects all others.
"""

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from io import BytesIO

VALUE_OPCODES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""Opcodes that push their argument. LONG4 is excluded: no data file has integers of more than 255 bytes."""
STR_OPCODES = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
CONTAINER_OPCODES = {
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"),
}
READ_ERRORS = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)


class Marker(Enum):
    """Stack items that are not data."""

    MARK = auto()
    IGNORED = auto()


MARK, IGNORED = Marker.MARK, Marker.IGNORED
"""The start of a list, tuple or dict on the stack; and a value that the reader has no use for."""
CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: MARK,
}


@dataclass(frozen=True)
class GlobalName:
    """The name of a global in a pickle, as "module name"; it is never resolved."""

    text: str


class PickleReader:
    """Stack machine for pickles. The base class reads plain values and rejects everything else.

    >>> import os, pickle
    >>> PickleReader().read(BytesIO(pickle.dumps({"labels": [1, 2]})))
    {'labels': [1, 2]}
    >>> PickleReader().read(BytesIO(pickle.dumps(os.system)))
    Traceback (most recent call last):
    ValueError: it refers to posix.system
    """

    max_opcodes = 250_000
    """Limit on the opcodes, about half a second of work."""
    allowed_globals: frozenset[str] = frozenset()
    """Globals that a pickle may refer to, as "module name"."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    # Hooks for one kind of file

    def decode_str(self, text: str) -> object:
        """Convert a `str` of Python 2, which pickletools decodes as Latin-1."""
        return text

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return the value that stands for a call of an allowed global."""
        raise ValueError(f"it calls {format_global(name)}")

    def set_state(self, instance: object, state: object) -> None:
        """Apply the state of an object that `call` returned."""
        raise ValueError("it sets the state of a value that has none")

    def load_persistent(self, identifier: object) -> object:
        """Return the value of a persistent id, which is stored outside the pickle."""
        raise ValueError("it refers to data outside of it")

    def replace_unsupported(self, description: str) -> object:
        """Return a substitute for a value that is not plain, such as `IGNORED`."""
        raise ValueError(f"it contains {description}")

    # Interpreter

    def read(self, stream: BytesIO) -> object:
        """Return the next value of the stream, or raise ValueError if this reader does not accept it."""
        try:
            with warnings.catch_warnings(action="ignore"):  # about invalid escapes in names that are rejected anyway
                return self._run(stream)
        except READ_ERRORS as error:
            raise error if type(error) is ValueError else ValueError("it is damaged") from error

    def _run(self, stream: BytesIO) -> object:
        stack, memo = self.stack, self.memo
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            name = opcode.name
            if count > self.max_opcodes:
                raise ValueError(f"it has more than {self.max_opcodes:,} opcodes")
            if name in VALUE_OPCODES:
                stack.append(argument)
            elif name in STR_OPCODES:
                stack.append(self.decode_str(str(argument)))
            elif name in CONSTANTS:
                stack.append(CONSTANTS[name]())
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[int(argument or 0)] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name in CONTAINER_OPCODES:
                self._build_container(name)
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self._handle_object(name, argument)
        raise ValueError("it has no end")

    def _build_container(self, name: str) -> None:
        stack = self.stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
            return
        single = {"APPEND": 1, "SETITEM": 2}.get(name, 0)
        items = [stack.pop() for _ in range(single)][::-1] if single else self._pop_mark()
        if name == "TUPLE":
            stack.append(tuple(items))
            return
        if name in ("LIST", "DICT"):
            stack.append([] if name == "LIST" else {})
        container = stack[-1]
        if container is IGNORED:
            return
        if isinstance(container, list) and name in ("APPEND", "APPENDS", "LIST"):
            container.extend(items)
        elif isinstance(container, dict) and name in ("SETITEM", "SETITEMS", "DICT"):
            container.update(zip(map(self._check_key, items[::2]), items[1::2], strict=True))
        else:
            raise ValueError("it adds items to a value that is not a list or dict")

    def _check_key(self, value: object) -> object:
        # Hashing a tuple that contains another one twice, 40 levels deep, would take forever.
        is_plain = isinstance(value, str | bytes | int | float | None)
        return value if is_plain else self.replace_unsupported("a key that is neither text nor number")

    def _handle_object(self, name: str, argument: object) -> None:
        stack = self.stack
        if name == "GLOBAL":
            stack.append(self._check_global(str(argument)))
        elif name == "STACK_GLOBAL":
            second, first = stack.pop(), stack.pop()
            if not isinstance(first, str) or not isinstance(second, str):
                raise ValueError("it has a global whose name is not text")
            stack.append(self._check_global(f"{first} {second}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, GlobalName) or not isinstance(arguments, tuple):
                raise ValueError("it calls a value that is not a global")
            stack.append(self.call(function.text, arguments))
        elif name == "BINPERSID":
            stack.append(self.load_persistent(stack.pop()))
        elif name == "BUILD":
            state = stack.pop()
            self.set_state(stack[-1], state)
        elif name == "EMPTY_SET":
            stack.append(self.replace_unsupported("a set"))
        else:
            raise ValueError(f"it has the opcode {name}")

    def _check_global(self, name: str) -> GlobalName:
        if name not in self.allowed_globals:
            raise ValueError(f"it refers to {format_global(name)}")
        return GlobalName(name)

    def _pop_mark(self) -> list[object]:
        items = []
        while (item := self.stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]


def format_global(name: str) -> str:
    """Format the name of a global as a dotted path.

    >>> format_global("os system")
    'os.system'
    """
    return name.replace(" ", ".")[:80]


def describe_array_error(error: Exception) -> str:
    """Describe an error of NumPy while reading arrays. Some of its messages advise to allow pickles, which run code.

    >>> describe_array_error(ValueError("Object arrays cannot be loaded when allow_pickle=False"))
    'it contains objects, or is not an array'
    """
    if "max_header_size" in str(error):
        return "its header is too large"
    return "it contains objects, or is not an array" if "pickle" in str(error) else str(error)
