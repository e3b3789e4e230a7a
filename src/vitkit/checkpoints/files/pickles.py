"""The pickle of a torch file goes in, the places of its tensors come out; nothing in it is ever called or imported.

`torch.load(weights_only=True)` runs only what it knows, but among that are calls that allocate whatever they are told.
Here the opcodes are data: dicts, lists, numbers, texts, and tensors by the names under which torch rebuilds them. What
training scripts add and weights do not need, such as the arguments of the command line, becomes `OTHER`; any other name
is refused.
"""

from dataclasses import dataclass
from io import BytesIO

import torch

from vitkit.core.pickles import OTHER, Name, PickleReader, dotted

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
    reader = TorchReader()
    return reader.read(stream), reader.storages


class TorchReader(PickleReader):
    """Tensors by the names under which torch rebuilds them, and what training scripts leave beside them."""

    most = MOST_OPCODES
    allowed = ALLOWED

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []

    def called(self, text: str, arguments: tuple[object, ...]) -> object:
        """What a name with these arguments stands for."""
        if text in HARMLESS:
            return OTHER
        if text in DICTS and all(isinstance(argument, Name) for argument in arguments):
            return {}
        if text == SIZE and len(arguments) == 1 and isinstance(arguments[0], tuple):
            return arguments[0]
        if text in PARAMETERS and arguments and isinstance(arguments[0], Placed):
            return arguments[0]
        if text in TENSORS and len(arguments) >= 4 and isinstance(arguments[0], Storage):
            return Placed(arguments[0], *arguments[1:4])
        raise ValueError(f"it calls {dotted(text)} in a way that torch does not")

    def fill(self, built: object, state: object) -> None:
        """Attributes of an ordered dict or a tensor, which weights do not need."""
        if not isinstance(built, dict | Placed) and built is not OTHER:
            super().fill(built, state)

    def stored(self, identity: object) -> Storage:
        """The storage that torch names by a tuple: the word, the type, the key, the device and the count."""
        match identity:
            case ("storage", Name(text), str(key), _, int(count), *rest) if text in STORAGES and rest in ([], [None]):
                self.storages.append(Storage(STORAGES[text], key, count))
                return self.storages[-1]
        raise ValueError("it has numbers of an unknown type, or not where torch puts them")

    def dropped(self, what: str) -> object:
        """Sets, and dicts under odd keys: training states have them, and weights do not."""
        return OTHER
