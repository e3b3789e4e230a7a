"""A pickle goes in, the plain values in it come out; nothing that it names is ever looked up, imported or called.

To unpickle is to run. This reads the opcodes as data instead: numbers, texts, lists, tuples and dicts. What else a
pickle says, that it names this, calls that, gives it a state, is told to a reader of one kind of file, which knows what
such files hold and refuses the rest.
"""

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from io import BytesIO

PUSHES = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
"""Opcodes that carry their value. LONG4 is not among them: no file of data has numbers of more than 255 bytes."""
OLD_TEXTS = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING"})
MERGES = frozenset(
    (
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT"),
        *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"),
    )
)
DAMAGE = (
    *(ValueError, IndexError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
)


class Odd(Enum):
    """Values that are no data."""

    MARK = auto()
    OTHER = auto()


MARK, OTHER = Odd.MARK, Odd.OTHER
"""Where a list, tuple or dict begins on the stack; and something that a reader has no use for."""
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
class Name:
    """A name from a pickle: a mark, not what it stands for."""

    text: str


class PickleReader:
    """The stack and the memory of the pickle format. By itself it reads plain values, and refuses any other.

    >>> import os, pickle
    >>> PickleReader().read(BytesIO(pickle.dumps({"labels": [1, 2]})))
    {'labels': [1, 2]}
    >>> PickleReader().read(BytesIO(pickle.dumps(os.system)))
    Traceback (most recent call last):
    ValueError: it names posix.system
    """

    most = 250_000
    """How many opcodes are read: half a second of them."""
    allowed: frozenset[str] = frozenset()
    """The names that may be in a pickle, as "module name"."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memory: dict[int, object] = {}

    # What a reader of one kind of file says

    def old_text(self, text: str) -> object:
        """What Python 2 wrote as str: pickletools gives its bytes as Latin-1."""
        return text

    def called(self, text: str, arguments: tuple[object, ...]) -> object:
        """What an allowed name with these arguments stands for."""
        raise ValueError(f"it calls {dotted(text)}")

    def fill(self, built: object, state: object) -> None:
        """Take in the state of something that was made before."""
        raise ValueError("it gives a state to what has none")

    def stored(self, identity: object) -> object:
        """What lies elsewhere, under this identity."""
        raise ValueError("it refers to what is not in it")

    def dropped(self, what: str) -> object:
        """What stands in the place of a value that is no plain one: `OTHER`, where a reader can do without it."""
        raise ValueError(f"it has {what}")

    # The machine

    def read(self, stream: BytesIO) -> object:
        """The value at the stream's position; a ValueError where it is not one that this reader knows."""
        try:
            with warnings.catch_warnings(action="ignore"):  # over odd escapes in names that are refused anyway
                return self.run(stream)
        except DAMAGE as error:
            raise error if type(error) is ValueError else ValueError("it is damaged") from error

    def run(self, stream: BytesIO) -> object:
        """The value that is left when the opcodes end."""
        stack, memory = self.stack, self.memory
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            name = opcode.name
            if count > self.most:
                raise ValueError(f"it has more than {self.most:,} opcodes")
            if name in PUSHES:
                stack.append(argument)
            elif name in OLD_TEXTS:
                stack.append(self.old_text(str(argument)))
            elif name in CONSTANTS:
                stack.append(CONSTANTS[name]())
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memory[int(argument or 0)] = stack[-1]
            elif name == "MEMOIZE":
                memory[len(memory)] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memory[int(argument or 0)])
            elif name in MERGES:
                self.merge(name)
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self.build(name, argument)
        raise ValueError("it has no end")

    def merge(self, name: str) -> None:
        """The opcodes that make one value of several."""
        stack = self.stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
            return
        single = {"APPEND": 1, "SETITEM": 2}.get(name, 0)
        items = [stack.pop() for _ in range(single)][::-1] if single else self.since_mark()
        if name == "TUPLE":
            stack.append(tuple(items))
            return
        if name in ("LIST", "DICT"):
            stack.append([] if name == "LIST" else {})
        holder = stack[-1]
        if holder is OTHER:
            return
        if isinstance(holder, list) and name in ("APPEND", "APPENDS", "LIST"):
            holder.extend(items)
        elif isinstance(holder, dict) and name in ("SETITEM", "SETITEMS", "DICT"):
            holder.update(zip(map(self.key, items[::2]), items[1::2], strict=True))
        else:
            raise ValueError("it adds to what is not a list or dict")

    def key(self, value: object) -> object:
        """A key of a dict. A tuple of tuples of tuples … takes for ever to hash, and is no key that data has."""
        is_plain = isinstance(value, str | bytes | int | float | None)
        return value if is_plain else self.dropped("a key that is neither text nor number")

    def build(self, name: str, argument: object) -> None:
        """The opcodes that would look something up, call it, or give it a state."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(self.named(str(argument)))
        elif name == "STACK_GLOBAL":
            second, first = stack.pop(), stack.pop()
            if not isinstance(first, str) or not isinstance(second, str):
                raise ValueError("it names what has no name")
            stack.append(self.named(f"{first} {second}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, Name) or not isinstance(arguments, tuple):
                raise ValueError("it calls what has no name")
            stack.append(self.called(function.text, arguments))
        elif name == "BINPERSID":
            stack.append(self.stored(stack.pop()))
        elif name == "BUILD":
            state = stack.pop()
            self.fill(stack[-1], state)
        elif name == "EMPTY_SET":
            stack.append(self.dropped("a set"))
        else:
            raise ValueError(f"it has the opcode {name}")

    def named(self, text: str) -> Name:
        """The mark for a name that files of this kind have."""
        if text not in self.allowed:
            raise ValueError(f"it names {dotted(text)}")
        return Name(text)

    def since_mark(self) -> list[object]:
        """The values since the last mark."""
        items = []
        while (item := self.stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]


def dotted(text: str) -> str:
    """A name as Python spells it.

    >>> dotted("os system")
    'os.system'
    """
    return text.replace(" ", ".")[:80]
