"""Files that lie, bite or are broken: each is refused with its reason, runs nothing, writes nothing, and takes little.

Every case is built here by hand, byte by byte where the libraries would not write such a thing.
"""

import gc
import gzip
import hashlib
import io
import json
import os
import pickle
import socket
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitkit
from vitkit.checkpoints.files.readers import open_tensors, save_npz, save_safetensors, save_torch
from vitkit.cli.weights import command
from vitkit.core.errors import VitkitError, WeightsError

Build = Callable[[Path], Path]
CASES: dict[str, tuple[str, Build]] = {}
MOST_SECONDS = 1.0
"""Of this process's own time; the clock on the wall depends on who else is at work."""
MOST_MEMORY = 64 << 20
"""The longest header that is read at all, 2 MiB of nothing but short numbers, makes about 20 MiB of them."""


def refused(reason: str) -> Callable[[Build], Build]:
    """Register the builder of a hostile file, and the words that must be in its refusal."""

    def register(build: Build) -> Build:
        CASES[build.__name__] = (reason, build)
        return build

    return register


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# --- the path itself


@refused("no such file")
def nothing_there(folder: Path) -> Path:
    return folder / "model.safetensors"


@refused("is empty")
def empty_file(folder: Path) -> Path:
    return written(folder / "model.pth", b"")


@refused("not a file .*a pipe")
def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder / "model.safetensors"


@refused("not a file .*a pipe")
def link_to_a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    (folder / "model.npz").symlink_to(folder / "pipe")
    return folder / "model.npz"


@refused("not a file .*a socket")
def listening_socket(folder: Path) -> Path:
    here = Path.cwd()
    os.chdir(folder)  # the names of sockets have at most 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("model.bin")
    finally:
        os.chdir(here)
    return folder / "model.bin"


@refused("not a file .*a device")
def endless_device(folder: Path) -> Path:
    (folder / "model.pth").symlink_to("/dev/zero")
    return folder / "model.pth"


@refused("cannot be opened")
def links_in_a_circle(folder: Path) -> Path:
    (folder / "a.pth").symlink_to(folder / "b.pth")
    (folder / "b.pth").symlink_to(folder / "a.pth")
    return folder / "a.pth"


@refused("no such file")
def link_to_nothing(folder: Path) -> Path:
    (folder / "model.pth").symlink_to(folder / "gone")
    return folder / "model.pth"


@refused("cannot be opened")
def name_with_a_zero_byte(folder: Path) -> Path:
    return folder / "model\0.pth"


@refused("not a file .*a folder")
def folder_named_as_a_file_in_a_folder(folder: Path) -> Path:
    (folder / "model.safetensors").mkdir()
    return folder


@refused("has no weights .*nothing")
def empty_folder(folder: Path) -> Path:
    (folder / "model").mkdir()
    return folder / "model"


@refused("has several files of weights")
def folder_with_a_choice(folder: Path) -> Path:
    for name in ("a.pth", "b.pth"):
        written(folder / name, b"x")
    return folder


@refused("does not begin as a file of weights does")
def noise(folder: Path) -> Path:
    return written(folder / "model.safetensors", bytes(range(1, 200)))


@refused("does not begin as a file of weights does")
def zeros(folder: Path) -> Path:
    return written(folder / "model.pth", bytes(4096))


@refused("pointer of Git LFS")
def pointer_of_git_lfs(folder: Path) -> Path:
    return written(folder / "pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@refused("is a web page")
def page_that_says_not_found(folder: Path) -> Path:
    return written(folder / "model.pth", b"<!DOCTYPE html><title>404</title>")


@refused("single array without a name")
def single_array(folder: Path) -> Path:
    np.save(folder / "model.npy", np.zeros(3))
    return folder / "model.npy"


# --- safetensors


def safetensors(folder: Path, header: object, body: bytes = b"", *, length: int | None = None) -> Path:
    line = header if isinstance(header, bytes) else json.dumps(header).encode()
    return written(
        folder / "model.safetensors", struct.pack("<Q", len(line) if length is None else length) + line + body
    )


def claim(shape: object = (2,), begin: object = 0, end: object = 8, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@refused("header is too long")
def header_of_exabytes(folder: Path) -> Path:
    return safetensors(folder, {}, length=2**63)


@refused("header is too long")
def header_of_300_000_tensors(folder: Path) -> Path:
    many = b",".join(b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % index for index in range(300_000))
    return safetensors(folder, b"{" + many + b"}", bytes(4))


@refused("too many tensors .*30,000")
def short_header_of_30_000_tensors(folder: Path) -> Path:
    return safetensors(folder, b"{" + b",".join(b'"%d":0' % index for index in range(30_000)) + b"}")


@refused("ends in the middle of its header")
def header_cut_short(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, length=1000)


@refused("is not JSON")
def header_of_noise(folder: Path) -> Path:
    return safetensors(folder, b"{\xff\xfe\x00noise}")


@refused("nested too deep")
def header_of_brackets(folder: Path) -> Path:
    return safetensors(folder, b'{"a":' + b"[" * 10_000)


@refused("holds too many lists")
def header_of_empty_lists(folder: Path) -> Path:
    return safetensors(folder, b'{"a":[' + b",".join([b"[]"] * 600_000) + b"]}")


@refused("does not say what a is")
def header_of_numbers(folder: Path) -> Path:
    return safetensors(folder, b'{"a":[' + b",".join([b"1.5"] * 500_000) + b"]}")


@refused("is not JSON")
def header_with_an_endless_number(folder: Path) -> Path:
    return safetensors(
        folder, b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[' + b"9" * 100_000 + b"]}}", bytes(8)
    )


@refused("holds no tensors")
def header_of_nothing(folder: Path) -> Path:
    return safetensors(folder, {"__metadata__": {"format": "pt"}})


@refused("has the name 'a' twice")
def tensor_twice(folder: Path) -> Path:
    one = json.dumps(claim())
    return safetensors(folder, f'{{"a":{one},"a":{one}}}'.encode(), bytes(8))


@refused("two tensors overlap")
def tensors_that_overlap(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(), "b": claim(begin=4, end=12)}, bytes(12))


@refused("two tensors overlap")
def thousand_tensors_in_one_place(folder: Path) -> Path:
    return safetensors(folder, {str(index): claim() for index in range(1000)}, bytes(8))


@refused("belong to no tensor")
def gap_between_tensors(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(), "b": claim(begin=12, end=20)}, bytes(20))


@refused("8 bytes at the end belong to no tensor")
def stowaway_at_the_end(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, bytes(16))


@refused("is cut short")
def tensors_cut_short(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((2, 1024), 0, 8192)}, bytes(100))


@refused("no possible place")
def negative_offset(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin=-8, end=0)}, bytes(8))


@refused("no possible place")
def offsets_that_are_texts(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin="0", end="8")}, bytes(8))


@refused("does not fill its place")
def offsets_backwards(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin=8, end=0)}, bytes(8))


@refused("does not fill its place")
def shape_larger_than_its_place(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((1000, 1000))}, bytes(8))


@refused("no possible shape")
def axis_of_a_trillion(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((10**12,), 0, 4 * 10**12)}, bytes(8))


@refused("no possible shape")
def shape_whose_product_wraps_to_two(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((2**32, 2**32 + 1, 2))}, bytes(8))


@refused("no possible shape")
def thousand_axes(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((1,) * 1000, 0, 4)}, bytes(4))


@refused("no possible shape")
def negative_axis(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((-1, -2))}, bytes(8))


@refused("no possible shape")
def axis_of_nothing(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((0, 768), 0, 0)})


@refused("no possible shape")
def axis_that_is_true(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((True, 2))}, bytes(8))


@refused("unknown type")
def elements_of_unknown_type(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(dtype="PICKLE")}, bytes(8))


@refused("holds more than texts")
def metadata_that_is_no_text(folder: Path) -> Path:
    return safetensors(folder, {"__metadata__": {"a": [1]}, "a": claim()}, bytes(8))


@refused("leads out of the file")
def name_that_climbs(folder: Path) -> Path:
    return safetensors(folder, {"../../.bashrc": claim()}, bytes(8))


@refused("is not the name of a tensor")
def name_that_rewrites_the_terminal(folder: Path) -> Path:
    return safetensors(folder, {"\x1b[2J\x1b[31mall is well": claim()}, bytes(8))


# --- zip files


def zipped(path: Path, entries: Sequence[tuple[str, bytes]], *, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return path


def array(shape: object = (2,), descr: object = "<f4", body: bytes = bytes(8), order: bool = False) -> bytes:
    return headed(repr({"descr": descr, "fortran_order": order, "shape": shape}).encode() + b"\n", body)


def headed(header: bytes, body: bytes = bytes(8), *, length: int | None = None) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header) if length is None else length) + header + body


def npz(folder: Path, content: bytes, name: str = "a.npy") -> Path:
    return zipped(folder / "model.npz", [(name, content)])


def changed(path: Path, old: bytes, new: bytes) -> Path:
    """The file with some of its bytes exchanged for as many others."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    return written(path, content.replace(old, new))


@refused("holds no tensors")
def zip_of_nothing(folder: Path) -> Path:
    return zipped(folder / "model.npz", [])


@refused("too many entries .*300,000|too many entries .*65,535")
def zip_of_300_000_entries(folder: Path) -> Path:
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, *[0] * 14)
    directory = one * 300_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), 4, 0)
    return written(folder / "model.npz", b"PK\x03\x04" + directory + end)


@refused("directory is too long")
def zip_of_300_000_entries_that_says_one(folder: Path) -> Path:
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, *[0] * 14)
    directory = one * 300_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), 4, 0)
    return written(folder / "model.npz", b"PK\x03\x04" + directory + end)


@refused("too many entries .*20,000")
def zip_of_20_000_arrays_that_says_one(folder: Path) -> Path:
    path = zipped(folder / "model.npz", [(str(index), b"") for index in range(20_000)])
    content = path.read_bytes()
    return written(path, content[:-14] + struct.pack("<HH", 1, 1) + content[-10:])


@refused("directory is too long")
def zip64_with_a_directory_of_exabytes(folder: Path) -> Path:
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 2**62, 4)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 4, 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return written(folder / "model.npz", b"PK\x03\x04" + record + locator + end)


@refused("cut short")
def zip_cut_short(folder: Path) -> Path:
    path = npz(folder, array())
    return written(path, path.read_bytes()[:-5])


@refused("something after its end")
def zip_with_an_appendix(folder: Path) -> Path:
    path = npz(folder, array())
    return written(path, path.read_bytes() + b"#!/bin/sh")


@refused("is a damaged zip")
def zip_whose_directory_is_noise(folder: Path) -> Path:
    return changed(npz(folder, array()), b"PK\x01\x02", b"PKno")


@refused("unpacks to far more")
def zip_bomb(folder: Path) -> Path:
    megabyte = array((1 << 18,), body=bytes(1 << 20))
    return zipped(folder / "model.npz", [(f"{i}.npy", megabyte) for i in range(100)], method=zipfile.ZIP_DEFLATED)


@refused("unpacks to far more")
def zip_bomb_that_only_says_so(folder: Path) -> Path:
    path = zipped(folder / "model.npz", [("a.npy", array())], method=zipfile.ZIP_DEFLATED)
    size = struct.pack("<L", len(array()))
    return changed(path, size, struct.pack("<L", 0xFFFFFFF0))


@refused("entries that overlap")
def zip_whose_entries_share_their_bytes(folder: Path) -> Path:
    path = zipped(folder / "model.npz", [("a.npy", array()), ("b.npy", array())])
    content = bytearray(path.read_bytes())
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = bytes(4)
    return written(path, bytes(content))


@refused("outside of the file")
def zip_entry_beyond_the_end(folder: Path) -> Path:
    path = npz(folder, array())
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 42 : entry + 46] = struct.pack("<L", 1 << 30)
    return written(path, bytes(content))


@refused("has an entry twice")
def zip_entry_twice(folder: Path) -> Path:
    path = zipped(folder / "model.npz", [("a.npy", array()), ("b.npy", array())])
    return changed(path, b"b.npy", b"a.npy")


@refused("is encrypted")
def zip_entry_with_a_password(folder: Path) -> Path:
    path = npz(folder, array())
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 8] |= 1
    return written(path, bytes(content))


@refused("packed by method 14")
def zip_entry_packed_by_lzma(folder: Path) -> Path:
    return zipped(folder / "model.npz", [("a.npy", array())], method=zipfile.ZIP_LZMA)


@refused("leads out of the file")
def zip_entry_that_climbs(folder: Path) -> Path:
    return npz(folder, array(), name="../../escaped.npy")


@refused("leads out of the file")
def zip_entry_from_the_root(folder: Path) -> Path:
    return npz(folder, array(), name="/tmp/escaped.npy")


@refused("leads out of the file")
def zip_entry_that_climbs_on_windows(folder: Path) -> Path:
    return npz(folder, array(), name="..\\escaped.npy")


@refused("is not the name of a tensor")
def zip_entry_with_a_zero_byte(folder: Path) -> Path:
    return changed(npz(folder, array(), name="aXb.npy"), b"aXb.npy", b"a\0b.npy")


# --- arrays in npz files


@refused("is not an array")
def script_among_the_arrays(folder: Path) -> Path:
    return zipped(folder / "model.npz", [("a.npy", array()), ("setup.py", b"print('hello')")])


@refused("not an array of numbers .*O")
def array_of_objects(folder: Path) -> Path:
    np.savez(folder / "model.npz", a=np.array([Runs(os.system, f"touch {folder / 'ran'}")], dtype=object))
    return folder / "model.npz"


@refused("not an array of numbers")
def array_of_records(folder: Path) -> Path:
    return npz(folder, array(descr=[("a", "<f4"), ("b", "|O")]))


@refused("not an array of numbers")
def array_of_texts(folder: Path) -> Path:
    return npz(folder, array(descr="<U2"))


@refused("is not a NumPy array")
def array_that_is_a_pickle(folder: Path) -> Path:
    return npz(folder, pickle.dumps(Runs(os.system, f"touch {folder / 'ran'}")))


@refused("is not a NumPy array")
def array_without_a_header(folder: Path) -> Path:
    return npz(folder, b"\x93NUMPY\x01")


@refused("header of a is too long")
def array_with_a_header_of_gigabytes(folder: Path) -> Path:
    return npz(folder, headed(b"{}", length=0xFFFFFFF0))


@refused("not plain values")
def array_whose_header_is_code(folder: Path) -> Path:
    code = f"__import__('os').system('touch {folder / 'ran'}')".encode()[:900]
    return npz(folder, headed(code))


@refused("not plain values")
def array_whose_header_is_brackets(folder: Path) -> Path:
    return npz(folder, headed(b"(" * 900))


@refused("not plain values")
def array_whose_header_is_a_power(folder: Path) -> Path:
    return npz(folder, headed(b"{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"))


@refused("is not NumPy's")
def array_whose_header_is_a_list(folder: Path) -> Path:
    return npz(folder, headed(b"['<f4', False, (2,)]"))


@refused("is not NumPy's")
def array_with_more_in_its_header(folder: Path) -> Path:
    return npz(folder, headed(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'run': 'it'}"))


@refused("NumPy's format 9")
def array_of_a_later_format(folder: Path) -> Path:
    return npz(folder, b"\x93NUMPY\x09\x00" + array()[8:])


@refused("no possible shape")
def array_of_a_trillion(folder: Path) -> Path:
    return npz(folder, array((10**12,)))


@refused("no possible shape")
def array_of_negative_shape(folder: Path) -> Path:
    return npz(folder, array((-2,)))


@refused("does not fill its shape")
def array_larger_than_its_entry(folder: Path) -> Path:
    return npz(folder, array((10_000, 10_000)))


@refused("cannot be unpacked: Bad CRC")
def array_with_a_flipped_bit(folder: Path) -> Path:
    return changed(npz(folder, array(body=b"weights!")), b"weights!", b"weighty!")


@refused("cannot be unpacked")
def array_packed_into_noise(folder: Path) -> Path:
    path = zipped(folder / "model.npz", [("a.npy", array((512,), body=bytes(2048)))], method=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    content[35:60] = b"\xff" * 25
    return written(path, bytes(content))


# --- torch files


class Runs:
    """Anything whose pickle calls something."""

    def __init__(self, called: object, *arguments: object) -> None:
        self.parts = (called, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:  # type: ignore[override]
        return self.parts


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    content = value.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + content


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def placed(
    *,
    key: str = "0",
    count: int = 4,
    offset: int = 0,
    shape: bytes = numbers((4,)),
    stride: bytes = numbers((1,)),
    type_: bytes = b"ctorch\nFloatStorage\n",
) -> bytes:
    """The opcodes of a tensor."""
    storage = b"(" + text("storage") + type_ + text(key) + text("cpu") + number(count) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + stride + b"\x89" + hooks + b"tR"


def state(**tensors: bytes) -> bytes:
    """The opcodes of a state dict."""
    return b"\x80\x02}(" + b"".join(text(name) + content for name, content in tensors.items()) + b"u."


def torch_zip(folder: Path, content: bytes, *others: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    entries = [("archive/data.pkl", content), ("archive/data/0", bytes(16)), *others]
    return zipped(folder / "model.pth", entries, method=method)


def old_torch(folder: Path, content: bytes, keys: Sequence[str] = ("0",), body: bytes | None = None) -> Path:
    head = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    numbers_ = struct.pack("<q", 4) + bytes(16) if body is None else body
    return written(folder / "model.pth", b"".join(head) + content + pickle.dumps(list(keys), 2) + numbers_)


@refused("names posix.system")
def pickle_that_runs_a_command(folder: Path) -> Path:
    return torch_zip(folder, pickle.dumps({"a": Runs(os.system, f"touch {folder / 'ran'}")}, 2))


@refused("names posix.system")
def old_pickle_that_runs_a_command(folder: Path) -> Path:
    return old_torch(folder, pickle.dumps({"a": Runs(os.system, f"touch {folder / 'ran'}")}, 2))


@refused("names builtins.eval|names __builtin__.eval")
def pickle_that_evaluates(folder: Path) -> Path:
    return torch_zip(folder, pickle.dumps({"a": Runs(eval, f"open({str(folder / 'ran')!r}, 'w')")}, 4))


@refused("names builtins.getattr")
def pickle_that_takes_attributes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\n" + text("system") + b"tR.")


@refused("names runpy._run_code")
def pickle_that_runs_code_by_a_back_door(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02crunpy\n_run_code\n(" + text("import os") + b"}tR.")


@refused("names torch.load")
def pickle_that_loads_another(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch\nload\n(" + text("other.pth") + b"tR.")


@refused("names torch.hub.load_state_dict_from_url")
def pickle_that_asks_the_network(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch.hub\nload_state_dict_from_url\n(" + text("http://x.invalid") + b"tR.")


@refused("names torch.Tensor")
def pickle_that_allocates_a_terabyte(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + text("a") + b"ctorch\nTensor\n" + numbers((10**6, 10**6)) + b"Rs.")


@refused("holds no tensors")
def pickle_that_allocates_a_terabyte_of_bytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + text("a") + b"cbuiltins\nbytearray\n" + numbers((10**12,)) + b"Rs.")


@refused("names timm.models.vision_transformer.VisionTransformer")
def pickle_of_a_whole_model(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctimm.models.vision_transformer\nVisionTransformer\n)\x81.")


@refused("has the opcode INST")
def pickle_of_old_instances(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02(" + text("true") + b"ios\nsystem\n.")


@refused("names o.+system")
def pickle_of_names_with_odd_escapes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02co\\s\nsystem\n.")


@refused("has the opcode EXT1")
def pickle_that_uses_the_extension_registry(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02\x82\x01.")


@refused("its pickle is not of tensors alone")
def pickle_cut_short(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed())[:-20])


@refused("its pickle is not of tensors alone")
def pickle_of_noise(folder: Path) -> Path:
    return torch_zip(folder, bytes(range(256)))


@refused("more than 250,000 opcodes")
def pickle_of_a_million_opcodes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + b"N" * 1_000_000 + b".")


@refused("data.pkl is too long")
def pickle_of_megabytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + text("x" * (5 << 20)) + b".")


def doubled(times: int) -> bytes:
    """A tuple of a tuple twice, of a tuple twice, and so on: a few bytes here, astronomic when written out."""
    return b")" + b"q\x00h\x00\x86" * times


@refused("holds no tensors")
def pickle_with_a_key_that_takes_for_ever(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + doubled(60) + b"Ns.")


@refused("no possible shape")
def tensor_with_a_shape_that_takes_for_ever(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(shape=doubled(60))))


@refused("no possible place in its storage")
def tensor_with_steps_that_take_for_ever(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(stride=doubled(60))))


@refused("holds no tensors")
def pickle_that_holds_itself(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}q\x00" + text("model") + b"h\x00s.")


@refused("holds no named tensors")
def pickle_of_one_nameless_tensor(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + placed() + b".")


@refused("no possible shape")
def tensor_of_a_trillion(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(shape=numbers((10**12,)))))


@refused("does not lie in its storage")
def tensor_that_is_one_number_a_million_times(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(shape=numbers((1000, 1000)), stride=numbers((0, 0)))))


@refused("does not lie in its storage")
def tensor_beyond_its_storage(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(offset=3, shape=numbers((2,)))))


@refused("no possible place in its storage")
def tensor_before_its_storage(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(offset=-4)))


@refused("no possible place in its storage")
def tensor_that_runs_backwards(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(stride=numbers((-1,)))))


@refused("does not lie in its storage")
def tensor_with_a_step_too_few(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(shape=numbers((2, 2)))))


@refused("has another size")
def storage_that_says_it_is_larger(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(count=10**9)))


@refused("are missing")
def storage_that_is_missing(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(key="7")))


@refused("are missing")
def storage_outside_of_the_file(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(key="../../../etc/passwd")))


@refused("unknown type")
def storage_of_something_else(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed(type_=b"cargparse\nNamespace\n")))


@refused("is packed")
def storage_that_is_packed(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed()), method=zipfile.ZIP_DEFLATED)


@refused("larger than the file")
def thousand_names_for_one_storage(folder: Path) -> Path:
    big = ("archive/data/1", bytes(1 << 20))
    many = {f"t{index}": placed(key="1", count=1 << 18, shape=numbers((1 << 18,))) for index in range(1000)}
    return torch_zip(folder, state(**many), big)


@refused("TorchScript")
def program_of_torchscript(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed()), ("archive/constants.pkl", b"\x80\x02)."))


@refused("big-endian")
def numbers_of_a_big_endian_machine(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed()), ("archive/byteorder", b"big"))


@refused("leads out of the file")
def torch_zip_entry_that_climbs(folder: Path) -> Path:
    return torch_zip(folder, state(a=placed()), ("archive/../../escaped", b"x"))


@refused("pickle that torch did not write")
def bare_pickle(folder: Path) -> Path:
    return written(folder / "model.pth", pickle.dumps(Runs(os.system, f"touch {folder / 'ran'}")))


@refused("is cut short")
def old_file_cut_short(folder: Path) -> Path:
    return old_torch(folder, state(a=placed()), body=struct.pack("<q", 4) + bytes(3))


@refused("is cut short")
def old_file_of_negative_size(folder: Path) -> Path:
    return old_torch(folder, state(a=placed()), body=struct.pack("<q", -(2**62)) + bytes(16))


@refused("is cut short")
def old_file_of_exabytes(folder: Path) -> Path:
    return old_torch(folder, state(a=placed(count=2**60)), body=struct.pack("<q", 2**60) + bytes(16))


@refused("are missing")
def old_file_with_two_sizes(folder: Path) -> Path:
    return old_torch(folder, state(a=placed(count=5)))


@refused("are missing")
def old_file_with_two_types(folder: Path) -> Path:
    wide = placed(type_=b"ctorch\nDoubleStorage\n")
    return old_torch(folder, state(a=wide, b=placed()))


@refused("does not say where its numbers are")
def old_file_with_keys_that_repeat(folder: Path) -> Path:
    return old_torch(folder, state(a=placed()), keys=["0", "0"])


# --- folders


def good(folder: Path) -> Path:
    save_safetensors(folder / "model.safetensors", {"a": torch.zeros(2)})
    return folder


@refused("config.json: is nested too deep")
def config_of_brackets(folder: Path) -> Path:
    written(good(folder) / "config.json", b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}")
    return folder


@refused("config.json: is nested too deep")
def config_a_hundred_deep(folder: Path) -> Path:
    written(good(folder) / "config.json", b'{"a":' * 100 + b"1" + b"}" * 100)
    return folder


@refused("config.json: is too long")
def config_of_megabytes(folder: Path) -> Path:
    written(good(folder) / "config.json", b'{"a":"' + b"x" * (5 << 20) + b'"}')
    return folder


@refused("config.json: is not a JSON object")
def config_that_is_a_list(folder: Path) -> Path:
    written(good(folder) / "config.json", b"[1, 2]")
    return folder / "model.safetensors"


@refused("config.json: is not JSON")
def config_of_noise(folder: Path) -> Path:
    written(good(folder) / "config.json", b"\xff\xfe\0\0")
    return folder


@refused("config.json: not a file .*a pipe")
def config_that_is_a_pipe(folder: Path) -> Path:
    os.mkfifo(good(folder) / "config.json")
    return folder


@refused("does not begin as a file of weights does")
def weights_that_are_a_link_to_a_secret(folder: Path) -> Path:
    (folder / "model.safetensors").symlink_to("/etc/passwd")
    return folder


@refused("config.json: is not JSON: Expecting value")
def config_that_is_a_link_to_a_secret(folder: Path) -> Path:
    (good(folder) / "config.json").symlink_to("/etc/passwd")
    return folder


def index(folder: Path, places: object) -> Path:
    written(folder / "model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    return folder


@refused("leads out of the folder")
def index_that_climbs(folder: Path) -> Path:
    (folder / "model").mkdir()
    return index(good(folder) / "model", {"a": "../model.safetensors"})


@refused("leads out of the folder")
def index_from_the_root(folder: Path) -> Path:
    return index(folder, {"a": "/etc/passwd"})


@refused("no possible number of files")
def index_of_thousands_of_files(folder: Path) -> Path:
    return index(folder, {str(number): f"{number}.safetensors" for number in range(5000)})


@refused("does not say in which files")
def index_of_numbers(folder: Path) -> Path:
    return index(folder, {"a": 1})


@refused("no such file")
def index_of_a_missing_file(folder: Path) -> Path:
    return index(folder, {"a": "model-00001-of-00001.safetensors"})


@refused("does not agree with shard.safetensors on b")
def index_of_a_missing_tensor(folder: Path) -> Path:
    save_safetensors(folder / "shard.safetensors", {"a": torch.zeros(2)})
    return index(folder, {"a": "shard.safetensors", "b": "shard.safetensors"})


# --- archives and pickles that are something else


def tarred(folder: Path, name: str, *, link: str = "") -> Path:
    entry = tarfile.TarInfo(name)
    if link:
        entry.type, entry.linkname = tarfile.SYMTYPE, link
    with tarfile.open(folder / "model.pth", "w") as archive:
        archive.addfile(entry)
    return folder / "model.pth"


@refused("does not begin as a file of weights does")
def tar_that_climbs(folder: Path) -> Path:
    return tarred(folder, "../../escaped")


@refused("does not begin as a file of weights does")
def tar_with_a_link_to_the_root(folder: Path) -> Path:
    return tarred(folder, "storages", link="/etc/passwd")


@refused("packed by gzip")
def tar_packed_by_gzip(folder: Path) -> Path:
    return written(folder / "model.pth", gzip.compress(tarred(folder, "../escaped").read_bytes()))


@refused("unpacks to far more")
def torch_zip_bomb(folder: Path) -> Path:
    big = [(f"archive/data/{number}", bytes(1 << 20)) for number in range(1, 101)]
    return torch_zip(folder, state(a=placed()), *big, method=zipfile.ZIP_DEFLATED)


@refused("has the opcode OBJ")
def pickle_of_old_objects(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02(cargparse\nNamespace\n" + text("true") + b"o.")


@refused("has the opcode NEWOBJ_EX")
def pickle_of_objects_with_keywords(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x04cargparse\nNamespace\n)}\x92.")


@refused("has the opcode PERSID")
def pickle_with_a_text_for_a_storage(folder: Path) -> Path:
    return torch_zip(folder, b"Pstorage\n.")


@refused("gives a state to what has none")
def pickle_that_sets_the_state_of_a_name(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch\nSize\n}" + text("__setstate__") + b"cbuiltins\nset\nsb.")


@refused("names __main__.Evil")
def pickle_with_a_setstate_of_its_own(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02c__main__\nEvil\n)\x81}b.")


@refused("calls what has no name")
def pickle_that_calls_a_tensor(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + placed() + b")R.")


@refused("names what has no name")
def pickle_that_names_a_number(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x04K\x01K\x02\x93.")


@refused("names numpy.load")
def pickle_that_loads_an_array_of_objects(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02cnumpy\nload\n(" + text("other.npy") + b"tR.")


@refused("holds no tensors")
def pickle_that_reconstructs_an_array_of_objects(folder: Path) -> Path:
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + numbers((10**12,)) + text("O") + b"tR"
    return torch_zip(folder, b"\x80\x02}" + text("a") + made + b"s.")


@refused("it is damaged|holds no")
def pickle_that_remembers_far_away(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + b"r\xff\xff\xff\x7f" + b"h\x07s.")


@refused("has the opcode LONG4")
def pickle_of_a_number_of_megabytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02\x8b" + struct.pack("<i", 3 << 20) + b"\x7f" * (3 << 20) + b".")


@refused("it is damaged|more than|has no end|not of tensors alone")
def pickle_of_protocol_99(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x63" + b"\x95" + b"\xff" * 8 + b".")


@refused("header is too long")
def header_of_a_billion_bytes(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, length=10**9)


@refused("no possible shape|is not JSON|which is no number")
def axis_that_is_not_a_number(folder: Path) -> Path:
    return safetensors(folder, b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8))


@refused("no possible place|is not JSON|which is no number")
def offset_that_is_infinite(folder: Path) -> Path:
    return safetensors(folder, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', bytes(8))


@refused("does not fill its place")
def elements_of_another_size(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(dtype="F64")}, bytes(8))


# --- whole artefacts: checksums are right, because whoever lies writes those too

OWN: dict[str, tuple[str, Build]] = {}


def refused_when_loaded(reason: str) -> Callable[[Build], Build]:
    """Register the builder of a folder whose weights are sound and whose descriptions lie."""

    def register(build: Build) -> Build:
        OWN[build.__name__] = (reason, build)
        return build

    return register


def own(folder: Path) -> Path:
    """A small artefact."""
    sizes = ["depth=1", "width=16", "heads=1", "mlp_dim=16"]
    vitkit.save(vitkit.create("B/16", image_size=32, classes=2, settings=sizes), folder / "own")
    return folder / "own"


def resigned(folder: Path) -> Path:
    """The artefact with checksums of what is in it now."""
    recorded = json.loads((folder / "checksums.json").read_bytes())
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in recorded}
    written(folder / "checksums.json", json.dumps(sums).encode())
    return folder


def lying(folder: Path, file: str, keys: str, value: object) -> Path:
    """An artefact in which one file says something else."""
    path = own(folder) / file
    content = inner = json.loads(path.read_bytes())
    *outer, last = keys.split(".")
    for key in outer:
        inner = inner[key]
    inner[last] = value
    written(path, json.dumps(content).encode())
    return resigned(folder / "own")


@refused_when_loaded("depth is larger than any model's")
def model_a_billion_deep(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.depth", 10**9)


@refused_when_loaded("width is larger than any model's")
def model_a_billion_wide(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.width", 10**9)


@refused_when_loaded("image_size is larger than any model's")
def model_of_images_a_billion_wide(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.image_size", [10**9, 10**9])


@refused_when_loaded("classes is larger than any model's")
def model_of_a_billion_classes(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.classes", 10**9)


@refused_when_loaded("registers is larger than any model's")
def model_of_a_billion_registers(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.tokens.registers", 10**9)


@refused_when_loaded("mlp_dim")
def model_of_negative_width(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.model.mlp_dim", -16)


@refused_when_loaded("not the description of a vitkit model")
def model_of_an_unknown_kind(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.kind", "../../os")


@refused_when_loaded("written by a later vitkit")
def model_of_a_far_future(folder: Path) -> Path:
    return lying(folder, "config.json", "vitkit.version", 10**9)


@refused_when_loaded("image_size is larger than any model's")
def preprocessing_to_a_billion_pixels(folder: Path) -> Path:
    return lying(folder, "preprocessor_config.json", "vitkit.image_size", 10**9)


@refused_when_loaded("which is no number")
def preprocessing_by_what_is_no_number(folder: Path) -> Path:
    return lying(folder, "preprocessor_config.json", "vitkit.mean", [float("nan")] * 3)


@refused_when_loaded("not a file|is not a JSON object|not the description")
def preprocessing_that_is_a_list(folder: Path) -> Path:
    written(own(folder) / "preprocessor_config.json", b"[]")
    return resigned(folder / "own")


@refused_when_loaded("labels.json: is too long")
def labels_of_megabytes(folder: Path) -> Path:
    written(own(folder) / "labels.json", json.dumps(["x" * 100] * 100_000).encode())
    return resigned(folder / "own")


@refused_when_loaded("not the names of the model's classes")
def labels_of_other_classes(folder: Path) -> Path:
    written(own(folder) / "labels.json", json.dumps(["x"] * 100_000).encode())
    return resigned(folder / "own")


@refused_when_loaded("not the names of the model's classes")
def labels_that_are_lists(folder: Path) -> Path:
    written(own(folder) / "labels.json", b"[[], []]")
    return resigned(folder / "own")


@refused_when_loaded("nested too deep")
def labels_of_brackets(folder: Path) -> Path:
    written(own(folder) / "labels.json", b"[" * 9_000 + b"]" * 9_000)
    return resigned(folder / "own")


@refused_when_loaded("has the name 'vitkit' twice")
def config_with_two_models(folder: Path) -> Path:
    path = own(folder) / "config.json"
    written(path, path.read_bytes().rstrip()[:-1] + b', "vitkit": {}}')
    return resigned(folder / "own")


@refused_when_loaded("labels.json: missing or unreadable")
def labels_that_are_a_pipe(folder: Path) -> Path:
    (own(folder) / "labels.json").unlink()
    os.mkfifo(folder / "own" / "labels.json")
    return folder / "own"


@refused_when_loaded("missing or unreadable|not a file|no such file")
def weights_that_are_a_device(folder: Path) -> Path:
    (own(folder) / "model.safetensors").unlink()
    (folder / "own" / "model.safetensors").symlink_to("/dev/zero")
    return folder / "own"


@refused_when_loaded("damaged")
def weights_exchanged_for_others(folder: Path) -> Path:
    path = own(folder) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    written(path, bytes(content))
    return folder / "own"


@refused_when_loaded("header is too long")
def weights_of_300_000_tensors(folder: Path) -> Path:
    safetensors(own(folder), b"{}", length=10**9)
    return resigned(folder / "own")


@refused_when_loaded("not a list of checksums|damaged")
def checksums_that_are_a_list(folder: Path) -> Path:
    written(own(folder) / "checksums.json", b"[1, 2]")
    return folder / "own"


@refused_when_loaded("damaged")
def checksums_of_another_folder(folder: Path) -> Path:
    path = own(folder) / "checksums.json"
    written(path, json.dumps(dict.fromkeys(json.loads(path.read_bytes()), "../../x")).encode())
    return folder / "own"


@refused_when_loaded("no name on the hub")
def hub_name_that_climbs(folder: Path) -> Path:
    return Path("hub:../../etc/passwd")


@refused_when_loaded("no name on the hub")
def hub_name_of_an_owner_that_climbs(folder: Path) -> Path:
    return Path("hub:../name")


# --- the test


class Watch:
    """What Python does that a reader of weights has no business to do, while armed; hooks cannot be taken off again."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.", "pickle.", "shutil.")
    CHANGES = (
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.link",
        "os.symlink",
        "os.rmdir",
        "os.truncate",
        "ctypes.dlopen",
    )

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        opened_to_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & self.WRITES)
        if event.startswith((*self.NEVER, *self.CHANGES)) or opened_to_write:
            self.seen.append(f"{event} {arguments[:2]}")


@pytest.fixture(scope="module")
def watch(tmp_path_factory) -> Watch:
    folder = tmp_path_factory.mktemp("good")
    tensors = {"a": torch.zeros(2)}
    save_npz(folder / "a.npz", tensors)
    save_safetensors(folder / "a.safetensors", tensors)
    save_torch(folder / "a.pth", tensors, None)
    for path in sorted(folder.iterdir()):  # so that nothing is imported, compiled or cached while the watch is armed
        with open_tensors(path) as opened:
            assert opened["a"].tolist() == [0, 0]
    for way in WAYS.values():
        way(own(folder))
        with pytest.raises(WeightsError):
            way(folder / "a.npz")
    return Watch()


@pytest.fixture
def quiet(watch) -> Iterator[Watch]:
    gc.freeze()  # to look through what earlier tests left is no work of a command's
    yield watch
    gc.unfreeze()
    watch.armed = False
    watch.seen.clear()


def tree(folder: Path) -> list[tuple[str, int, int]]:
    found = [(path, path.lstat()) for path in folder.rglob("*")]
    return sorted((str(path), status.st_size, status.st_mtime_ns) for path, status in found)


def read_all(path: Path) -> None:
    with open_tensors(path) as opened:
        assert all(opened[name].shape == shape for name, shape in opened.shapes.items())


def info(path: Path) -> None:
    """What `vitkit weights info` does."""
    command.main(["info", str(path), "--json"], standalone_mode=False)


WAYS: dict[str, Callable[[Path], object]] = {"load": vitkit.load, "info": info}


@pytest.mark.usefixtures("at_full_speed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [*CASES, *OWN])
def test_no_command_takes_a_hostile_file_nor_a_second(case, way, tmp_path, quiet, monkeypatch) -> None:
    reason, build = (CASES | OWN)[case]
    path = build(tmp_path)
    if "\0" in str(path):
        pytest.skip("no command line can hold it")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    quiet.armed = True
    started = time.process_time()
    try:
        # What is not there at all may be told in other words, and the files of a case make no whole model.
        with pytest.raises(VitkitError, match=reason if case in OWN else None) as caught:
            WAYS[way](path)
    finally:
        taken = time.process_time() - started
        quiet.armed = False
    assert taken < MOST_SECONDS
    assert str(caught.value).isprintable()
    assert quiet.seen == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_with_its_reason(case, tmp_path, quiet, monkeypatch) -> None:
    reason, build = CASES[case]
    path = build(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    tracemalloc.start()
    quiet.armed = True
    try:
        with pytest.raises(WeightsError, match=reason) as caught:
            read_all(path)
    finally:
        quiet.armed = False
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    message = str(caught.value)
    assert str(tmp_path) in message
    assert caught.value.hint
    assert len(message) < 600
    assert message.isprintable()
    assert quiet.seen == []
    assert tree(tmp_path) == before
    assert most < MOST_MEMORY


def test_there_are_at_least_sixty_of_them() -> None:
    assert len(CASES) >= 60
    assert len(CASES | OWN) == len(CASES) + len(OWN)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "torch", "old torch"])
def test_a_file_cut_anywhere_or_with_a_flipped_byte_is_refused_or_read_but_never_crashes(kind, tmp_path) -> None:
    tensors = {"blocks.0.weight": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(2)}
    path = tmp_path / "model"
    if kind == "npz":
        save_npz(path, tensors)
    elif kind == "safetensors":
        save_safetensors(path, tensors, {"format": "pt"})
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "torch")
    content = path.read_bytes()
    refusals = 0
    generator = np.random.default_rng(0)
    for attempt in range(300):
        place = int(generator.integers(len(content)))
        damaged = bytearray(content[:place] if attempt % 3 == 0 else content)
        if attempt % 3:
            damaged[place] ^= int(generator.integers(1, 256))
        other = tmp_path / f"damaged-{attempt}"  # another file each time: the old one may still be mapped
        other.write_bytes(damaged)
        try:
            read_all(other)
        except WeightsError:
            refusals += 1
        other.unlink()
    assert refusals >= 100  # every cut, and most of the flips in headers


def test_the_watch_itself_works(quiet, tmp_path) -> None:
    quiet.armed = True
    pickle.loads(pickle.dumps(Runs(os.mkdir, str(tmp_path / "made"))))
    io.FileIO(tmp_path / "written", "w").close()
    quiet.armed = False
    assert [seen.split()[0] for seen in quiet.seen] == ["pickle.find_class", "os.mkdir", "open"]
