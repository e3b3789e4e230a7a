"""The pickle of a torch file goes in, the places of its tensors come out; nothing in it is ever called or imported.

To unpickle is to run. `torch.load(weights_only=True)` runs only what it knows, but among that are calls that allocate
whatever they are told. This reads the opcodes as data instead, and knows what torch writes: dicts, lists, numbers,
texts, and tensors by the names under which torch rebuilds them. What training scripts add and weights do not need, such
as the arguments of the command line, becomes `OTHER`; any other name is refused.
"""

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from io import BytesIO

import torch

MOST_OPCODES = 250_000
"""A tensor takes about 30, so this is a model of 2,000 with both moments of an optimiser; read in half a second."""
STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
DICTS = frozenset({"collections OrderedDict", "collections defaultdict"})
SIZE = "torch Size"
TENSORS = frozenset({"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2"})
PARAMETERS = frozenset({"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"})
HARMLESS = frozenset(
    (
        *("argparse Namespace", "pathlib PosixPath", "collections Counter"),
        *("builtins set", "__builtin__ set", "builtins dict", "__builtin__ dict", "builtins list", "__builtin__ list"),
        *("builtins int", "__builtin__ int", "builtins bytearray", "_codecs encode", "torch device"),
        *("numpy dtype", "numpy ndarray", "numpy.core.multiarray scalar", "numpy._core.multiarray scalar"),
        *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"),
        *("torch float64", "torch float32", "torch float16", "torch bfloat16", "torch int64", "torch uint8"),
    )
)
"""Names that training scripts leave in their files. They are not looked up either: their values are dropped."""
ALLOWED = frozenset({SIZE, *DICTS, *STORAGES, *TENSORS, *PARAMETERS, *HARMLESS})


class Odd(Enum):
    """Values that are no data."""

    MARK = auto()
    OTHER = auto()


MARK, OTHER = Odd.MARK, Odd.OTHER
"""Where a list, tuple or dict begins on the stack; and something that no weight needs."""


@dataclass(frozen=True, eq=False)
class Name:
    """A name from the pickle: a mark, not what it stands for."""

    text: str


@dataclass(frozen=True, eq=False)
class Storage:
    """A run of numbers elsewhere in the file."""

    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True, eq=False, repr=False)
class Placed:
    """A tensor: which numbers of which storage. The claims are not yet checked."""

    storage: Storage
    offset: object
    shape: object
    stride: object


def read_torch_pickle(stream: BytesIO) -> tuple[object, list[Storage]]:
    """The value at the stream's position, with tensors as `Placed`, and all storages that it names.

    A pickle that torch does not write is a ValueError.

    >>> import os, pickle
    >>> read_torch_pickle(BytesIO(pickle.dumps({"epoch": 3})))
    ({'epoch': 3}, [])
    >>> read_torch_pickle(BytesIO(pickle.dumps(os.system)))
    Traceback (most recent call last):
    ValueError: it names posix.system
    """
    reader = Reader()
    try:
        with warnings.catch_warnings(action="ignore"):  # over odd escapes in names that are refused anyway
            return reader.read(stream), reader.storages
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError("it is damaged") from error


PUSHES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINBYTES", "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING"),
    )
)
CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: OTHER,
    "MARK": lambda: MARK,
}


class Reader:
    """The stack and the memory of the pickle format, for the opcodes that torch writes."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memory: dict[int, object] = {}
        self.storages: list[Storage] = []

    def read(self, stream: BytesIO) -> object:
        """The value that is left when the opcodes end."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            name = opcode.name
            if count > MOST_OPCODES:
                raise ValueError(f"it has more than {MOST_OPCODES:,} opcodes")
            if name in PUSHES:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name in ("BINPUT", "LONG_BINPUT"):
                self.memory[int(argument or 0)] = self.stack[-1]
            elif name == "MEMOIZE":
                self.memory[len(self.memory)] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memory[int(argument or 0)])
            elif name == "STOP":
                return self.stack.pop()
            elif name in (
                "TUPLE",
                "TUPLE1",
                "TUPLE2",
                "TUPLE3",
                "APPEND",
                "APPENDS",
                "SETITEM",
                "SETITEMS",
                "ADDITEMS",
            ):
                self.collect(name)
            elif name not in ("PROTO", "FRAME"):
                self.build(name, argument)
        raise ValueError("it has no end")

    def collect(self, name: str) -> None:
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
        elif stack[-1] is OTHER:
            pass
        elif name in ("APPEND", "APPENDS") and isinstance(stack[-1], list):
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS") and isinstance(stack[-1], dict):
            # a tuple of tuples of tuples … takes for ever to hash, and is no key that weights have
            keys = [key if isinstance(key, str | bytes | int | float | None) else OTHER for key in items[::2]]
            stack[-1].update(zip(keys, items[1::2], strict=True))
        else:
            raise ValueError("it adds to what is not a list or dict")

    def build(self, name: str, argument: object) -> None:
        """The opcodes that would look something up, call it, or give it a state."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(allowed(str(argument)))
        elif name == "STACK_GLOBAL":
            second, first = stack.pop(), stack.pop()
            if not isinstance(first, str) or not isinstance(second, str):
                raise ValueError("it names what has no name")
            stack.append(allowed(f"{first} {second}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(made(called, arguments))
        elif name == "BINPERSID":
            self.storages.append(storage(stack.pop()))
            stack.append(self.storages[-1])
        elif name == "BUILD":  # attributes of an ordered dict or a tensor, which weights do not need
            stack.pop()
            if not isinstance(stack[-1], dict | Placed) and stack[-1] is not OTHER:
                raise ValueError("it gives a state to what has none")
        else:
            raise ValueError(f"it has the opcode {name}")

    def since_mark(self) -> list[object]:
        """The values since the last mark."""
        items = []
        while (item := self.stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]


def allowed(text: str) -> Name:
    """The mark for a name that files of weights have."""
    if text not in ALLOWED:
        raise ValueError(f"it names {'.'.join(text.split(' '))[:80]}")
    return Name(text)


def made(called: object, arguments: object) -> object:
    """What a name with these arguments stands for."""
    if not isinstance(called, Name) or not isinstance(arguments, tuple):
        raise ValueError("it calls what has no name")
    text = called.text
    if text in HARMLESS:
        return OTHER
    if text in DICTS and all(isinstance(argument, Name) for argument in arguments):
        return {}
    if text == SIZE and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return arguments[0]
    if text in PARAMETERS and arguments and isinstance(arguments[0], Placed):
        return arguments[0]
    if text in TENSORS and len(arguments) >= 4 and isinstance(arguments[0], Storage):
        return Placed(*arguments[:4])
    raise ValueError(f"it calls {text.replace(' ', '.')} in a way that torch does not")


def storage(identity: object) -> Storage:
    """The storage that torch names by a tuple: the word, the type, the key, the device and the count."""
    match identity:
        case ("storage", Name(text), str(key), _, int(count), *rest) if text in STORAGES and rest in ([], [None]):
            return Storage(STORAGES[text], key, count)
    raise ValueError("it has numbers of an unknown type, or not where torch puts them")
