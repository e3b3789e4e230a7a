"""A path goes in, the tensors of the file come out one at a time, and nothing in the file is ever run.

What kind a file is, its first bytes say and not its name. Shapes are known before any number is read.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import safetensors
import torch

from vitkit.checkpoints.files.guards import DAMAGED, Stored, brief, is_folder, open_file, read_json, refusal
from vitkit.checkpoints.files.npz import MAGIC as NUMPY_MAGIC
from vitkit.checkpoints.files.npz import stored_in_npz
from vitkit.checkpoints.files.safetensors import looks_like_safetensors, stored_in_safetensors
from vitkit.checkpoints.files.torch import OLD_MAGIC, PICKLE, Contents, stored_in_old_torch, stored_in_torch_zip
from vitkit.checkpoints.files.writers import save_npz, save_safetensors, save_torch
from vitkit.checkpoints.files.zips import END, LOCAL, checked_zip
from vitkit.checkpoints.formats.format import About
from vitkit.core.shapes import Tensor

__all__ = ["TensorFile", "open_tensors", "save_npz", "save_safetensors", "save_torch"]

CONFIG = "config.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""The names of weights in folders of ours, of timm and of Hugging Face, in the order of preference."""
INDEX = ".index.json"
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""
MOST_SHARDS = 100
"""The largest Vision Transformers fill about ten."""
OTHER_KINDS = (
    (b"version https://git-lfs", "is a pointer of Git LFS, not the file", "run `git lfs pull` where it came from"),
    (b"<!DOCTYPE", "is a web page", "the download went wrong: fetch the file itself"),
    (b"<html", "is a web page", "the download went wrong: fetch the file itself"),
    (b"\x89HDF", "is HDF5, as Keras writes", "export it as safetensors"),
    (b"\x1f\x8b", "is packed by gzip", "unpack it first"),
    (b"GGUF", "is GGUF", "fetch the safetensors file"),
    (NUMPY_MAGIC, "is a single array without a name", "fetch the .npz file"),
    (b"\x80", "is a pickle that torch did not write", "it could run anything: ask for safetensors"),
)
DAMAGE = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, OverflowError, MemoryError, EOFError),
    *(RecursionError, NotImplementedError, struct.error, zlib.error, zipfile.BadZipFile, safetensors.SafetensorError),
)
"""What libraries raise over damage that was not foreseen here: the file is still named."""

Kind = Literal["npz", "safetensors", "torch"]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file or folder by name, each read, or mapped into memory, when asked for.

    `about` is what the file says of itself; `notes` are what was done to it or left aside, for the user to see.
    """

    def __init__(self, contents: Contents, *, path: Path, about: About, resources: ExitStack) -> None:
        self.path = path
        self.about = about
        self.notes = contents.notes
        self.shapes: Mapping[str, tuple[int, ...]] = {name: item.shape for name, item in contents.stored.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: item.dtype for name, item in contents.stored.items()}
        self._stored = contents.stored
        self._resources = resources

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        try:
            return stored.read()
        except DAMAGE as error:
            raise refusal(self.path, f"{brief(name)} cannot be read: {brief(error)}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.shapes

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Tensors that were taken out stay good."""
        self._resources.close()


def open_tensors(path: Path | str) -> TensorFile:
    """Open the weights at a path: a `.safetensors`, `.npz` or torch file, or a folder with one of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_npz(Path(folder, "model.npz"), {"head/bias": torch.zeros(3)})
    ...     with open_tensors(Path(folder, "model.npz")) as tensors:
    ...         tensors.about.kind, dict(tensors.shapes), tensors["head/bias"]
    ('npz', {'head/bias': (3,)}, tensor([0., 0., 0.]))
    """
    path = Path(path)
    with ExitStack() as resources:
        try:
            folder = is_folder(path)
            kind, contents = opened_folder(path, resources) if folder else opened(path, resources)
            config = beside(path if folder else path.parent)
        except DAMAGE as error:
            raise refusal(path, f"cannot be read: {brief(error)}") from error
        about = About(kind=kind, container=contents.container, config=config)
        return TensorFile(unwrapped(contents), path=path, about=about, resources=resources.pop_all())


def opened(path: Path, resources: ExitStack) -> tuple[Kind, Contents]:
    """One file, read by the kind that its first bytes show."""
    file = resources.enter_context(open_file(path))
    start = file.read(len(OLD_MAGIC) + 16)
    if not start:
        raise refusal(path, "is empty")
    if start.startswith((LOCAL, END)):
        return opened_zip(file, path, resources)
    if start.startswith(OLD_MAGIC):
        return "torch", stored_in_old_torch(file, path=path)
    if looks_like_safetensors(start):
        stored = stored_in_safetensors(file, path=path, resources=resources)
        return "safetensors", Contents(stored=stored, container=None, notes=())
    reason, hint = next(
        ((reason, hint) for magic, reason, hint in OTHER_KINDS if start.startswith(magic)),
        ("does not begin as a file of weights does", DAMAGED),
    )
    raise refusal(path, reason, expected="safetensors, .npz or a torch file", hint=hint)


def opened_zip(file: BinaryIO, path: Path, resources: ExitStack) -> tuple[Kind, Contents]:
    """A zip: torch's if it has a pickle, else NumPy's."""
    archive = resources.enter_context(checked_zip(file, path=path))
    if any(name.rpartition("/")[2] == PICKLE for name in archive.namelist()):
        return "torch", stored_in_torch_zip(archive, file, path=path)
    return "npz", Contents(stored=stored_in_npz(archive, path=path), container=None, notes=())


def opened_folder(folder: Path, resources: ExitStack) -> tuple[Kind, Contents]:
    """The weights of a folder: whole or in shards under the known names, else the one file of weights in it."""
    for name in WHOLE:
        if (folder / name).exists():
            return opened(folder / name, resources)
        if (folder / (name + INDEX)).exists():
            return opened_shards(folder / (name + INDEX), resources)
    names = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in names if name.endswith(SUFFIXES)]
    if len(weights) != 1:
        got = f"{', '.join(map(brief, (weights or names)[:5]))}{' …' if len(weights or names) > 5 else ''}" or "nothing"
        reason = "has several files of weights" if weights else "has no weights"
        raise refusal(folder, reason, expected=WHOLE[0], got=got, hint="name the file in it")
    return opened(folder / weights[0], resources)


def opened_shards(index: Path, resources: ExitStack) -> tuple[Kind, Contents]:
    """Tensors that are spread over several files of one folder, as the index says."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise refusal(index, "does not say in which files the tensors are", expected="weight_map")
    names = sorted(set(places.values()))
    if len(names) > MOST_SHARDS or not names:
        raise refusal(index, "names no possible number of files", expected=f"1 to {MOST_SHARDS}", got=len(names))
    stored: dict[str, Stored] = {}
    kind: Kind = "safetensors"
    for name in names:
        if Path(name).name != name or "\\" in name or name[1:2] == ":":
            raise refusal(index, f"the name '{brief(name)}' leads out of the folder")
        kind, contents = opened(index.parent / name, resources)
        due = {tensor for tensor, place in places.items() if place == name}
        if odd := sorted(due ^ contents.stored.keys()):
            raise refusal(index, f"does not agree with {brief(name)} on {brief(odd[0])}")
        stored |= contents.stored
    return kind, Contents(stored=stored, container=None, notes=(f"read from {len(names)} files",))


def beside(folder: Path) -> Mapping[str, Any]:
    """The config.json in a folder, if it has one."""
    path = folder / CONFIG
    return read_json(path) if path.exists() or path.is_symlink() else {}


def unwrapped(contents: Contents) -> Contents:
    """The tensors without what training wrapped around all their names."""
    stored, taken = contents.stored, ""
    while prefix := next((prefix for prefix in WRAPPERS if all(name.startswith(prefix) for name in stored)), ""):
        stored, taken = {name.removeprefix(prefix): item for name, item in stored.items()}, taken + prefix
    if not taken:
        return contents
    return replace(contents, stored=stored, notes=(*contents.notes, f"took {taken!r} off every name"))
