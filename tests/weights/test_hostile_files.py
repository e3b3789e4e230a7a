"""Hostile and damaged weight files: each is rejected with the reason, runs nothing, writes nothing, and takes little
time and memory (guarantee X2).

The files are built byte by byte if libraries would not write them.
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
from vitkit.cli.weights import command
from vitkit.core.errors import VitkitError, WeightsError
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.io.writers import save_npz, save_safetensors, save_torch

Build = Callable[[Path], Path]
CASES: dict[str, tuple[str, Build]] = {}
MAX_SECONDS = 1.0
"""CPU time of this process, because wall time depends on other processes."""
MAX_MEMORY = 64 << 20
"""The longest header that is parsed, 2 MiB of short numbers, takes about 20 MiB."""


def rejected(reason: str) -> Callable[[Build], Build]:
    """Register the builder of a hostile file and a pattern for its error message."""

    def register(build: Build) -> Build:
        CASES[build.__name__] = (reason, build)
        return build

    return register


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# --- the path itself


@rejected("no such file")
def nothing_there(folder: Path) -> Path:
    return folder / "model.safetensors"


@rejected("is empty")
def empty_file(folder: Path) -> Path:
    return write_file(folder / "model.pth", b"")


@rejected("not a file .*a pipe")
def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder / "model.safetensors"


@rejected("not a file .*a pipe")
def link_to_a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    (folder / "model.npz").symlink_to(folder / "pipe")
    return folder / "model.npz"


@rejected("not a file .*a socket")
def listening_socket(folder: Path) -> Path:
    here = Path.cwd()
    os.chdir(folder)  # the names of sockets have at most 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("model.bin")
    finally:
        os.chdir(here)
    return folder / "model.bin"


@rejected("not a file .*a device")
def endless_device(folder: Path) -> Path:
    (folder / "model.pth").symlink_to("/dev/zero")
    return folder / "model.pth"


@rejected("cannot be opened")
def links_in_a_circle(folder: Path) -> Path:
    (folder / "a.pth").symlink_to(folder / "b.pth")
    (folder / "b.pth").symlink_to(folder / "a.pth")
    return folder / "a.pth"


@rejected("no such file")
def link_to_nothing(folder: Path) -> Path:
    (folder / "model.pth").symlink_to(folder / "gone")
    return folder / "model.pth"


@rejected("cannot be opened")
def name_with_a_zero_byte(folder: Path) -> Path:
    return folder / "model\0.pth"


@rejected("not a file .*a directory")
def folder_named_as_a_file_in_a_folder(folder: Path) -> Path:
    (folder / "model.safetensors").mkdir()
    return folder


@rejected("has no weight file .*nothing")
def empty_folder(folder: Path) -> Path:
    (folder / "model").mkdir()
    return folder / "model"


@rejected("has several weight files")
def folder_with_a_choice(folder: Path) -> Path:
    for name in ("a.pth", "b.pth"):
        write_file(folder / name, b"x")
    return folder


@rejected("is not a weight file")
def noise(folder: Path) -> Path:
    return write_file(folder / "model.safetensors", bytes(range(1, 200)))


@rejected("is not a weight file")
def zeros(folder: Path) -> Path:
    return write_file(folder / "model.pth", bytes(4096))


@rejected("Git LFS pointer")
def pointer_of_git_lfs(folder: Path) -> Path:
    return write_file(folder / "pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@rejected("is a web page")
def page_that_says_not_found(folder: Path) -> Path:
    return write_file(folder / "model.pth", b"<!DOCTYPE html><title>404</title>")


@rejected("single array without a name")
def single_array(folder: Path) -> Path:
    np.save(folder / "model.npy", np.zeros(3))
    return folder / "model.npy"


# --- safetensors, whose version 0.5 reports errors by the names of their types

INVALID_HEADER = "InvalidHeaderDeserialization"


def safetensors(folder: Path, header: object, body: bytes = b"", *, length: int | None = None) -> Path:
    line = header if isinstance(header, bytes) else json.dumps(header).encode()
    return write_file(
        folder / "model.safetensors", struct.pack("<Q", len(line) if length is None else length) + line + body
    )


def claim(shape: object = (2,), begin: object = 0, end: object = 8, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@rejected("header is too large")
def header_of_exabytes(folder: Path) -> Path:
    return safetensors(folder, {}, length=2**63)


@rejected("header is too large")
def header_of_300_000_tensors(folder: Path) -> Path:
    many = b",".join(b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % index for index in range(300_000))
    return safetensors(folder, b"{" + many + b"}", bytes(4))


@rejected("too many tensors .*30,000")
def short_header_of_30_000_tensors(folder: Path) -> Path:
    return safetensors(folder, b"{" + b",".join(b'"%d":0' % index for index in range(30_000)) + b"}")


@rejected("ends inside its header")
def header_cut_short(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, length=1000)


@rejected("is not JSON")
def header_of_noise(folder: Path) -> Path:
    return safetensors(folder, b"{\xff\xfe\x00noise}")


@rejected("nested too deeply")
def header_of_brackets(folder: Path) -> Path:
    return safetensors(folder, b'{"a":' + b"[" * 10_000)


@rejected("too many lists and objects")
def header_of_empty_lists(folder: Path) -> Path:
    return safetensors(folder, b'{"a":[' + b",".join([b"[]"] * 600_000) + b"]}")


@rejected("has a tensor without data_offsets")
def header_of_numbers(folder: Path) -> Path:
    return safetensors(folder, b'{"a":[' + b",".join([b"1.5"] * 500_000) + b"]}")


@rejected("is not JSON")
def header_with_an_endless_number(folder: Path) -> Path:
    return safetensors(
        folder, b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[' + b"9" * 100_000 + b"]}}", bytes(8)
    )


@rejected("holds no tensors")
def header_of_nothing(folder: Path) -> Path:
    return safetensors(folder, {"__metadata__": {"format": "pt"}})


@rejected("has the key 'a' twice")
def tensor_twice(folder: Path) -> Path:
    one = json.dumps(claim())
    return safetensors(folder, f'{{"a":{one},"a":{one}}}'.encode(), bytes(8))


@rejected(r"invalid offset for tensor `b`|InvalidOffset\(\"b\"\)")
def tensors_that_overlap(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(), "b": claim(begin=4, end=12)}, bytes(12))


@rejected("invalid offset for tensor|InvalidOffset")
def thousand_tensors_in_one_place(folder: Path) -> Path:
    return safetensors(folder, {str(index): claim() for index in range(1000)}, bytes(8))


@rejected(r"invalid offset for tensor `b`|InvalidOffset\(\"b\"\)")
def gap_between_tensors(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(), "b": claim(begin=12, end=20)}, bytes(20))


@rejected("not fully covered|MetadataIncompleteBuffer")
def stowaway_at_the_end(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, bytes(16))


@rejected("not fully covered|MetadataIncompleteBuffer")
def tensors_cut_short(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((2, 1024), 0, 8192)}, bytes(100))


@rejected(f"integer `-8`, expected usize|{INVALID_HEADER}")
def negative_offset(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin=-8, end=0)}, bytes(8))


@rejected(f"expected usize|{INVALID_HEADER}")
def offsets_that_are_texts(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin="0", end="8")}, bytes(8))


@rejected("invalid offset for tensor|InvalidOffset")
def offsets_backwards(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(begin=8, end=0)}, bytes(8))


@rejected("invalid shape, data type, or offset|TensorInvalidInfo")
def shape_larger_than_its_place(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((1000, 1000))}, bytes(8))


@rejected("not fully covered|MetadataIncompleteBuffer")
def axis_of_a_trillion(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((10**12,), 0, 4 * 10**12)}, bytes(8))


@rejected("overflow computing buffer size|ValidationOverflow")
def shape_whose_product_wraps_to_two(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((2**32, 2**32 + 1, 2))}, bytes(8))


@rejected("invalid shape")
def thousand_axes(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((1,) * 1000, 0, 4)}, bytes(4))


@rejected(f"integer `-1`, expected usize|{INVALID_HEADER}")
def negative_axis(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((-1, -2))}, bytes(8))


@rejected("invalid shape")
def axis_of_nothing(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((0, 768), 0, 0)})


@rejected(f"boolean `true`, expected usize|{INVALID_HEADER}")
def axis_that_is_true(folder: Path) -> Path:
    return safetensors(folder, {"a": claim((True, 2))}, bytes(8))


@rejected(f"unknown variant `PICKLE`|{INVALID_HEADER}")
def elements_of_unknown_type(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(dtype="PICKLE")}, bytes(8))


@rejected(f"expected a string|{INVALID_HEADER}")
def metadata_that_is_no_text(folder: Path) -> Path:
    return safetensors(folder, {"__metadata__": {"a": [1]}, "a": claim()}, bytes(8))


@rejected("points outside the file")
def name_that_climbs(folder: Path) -> Path:
    return safetensors(folder, {"../../.bashrc": claim()}, bytes(8))


@rejected("invalid tensor name")
def name_that_rewrites_the_terminal(folder: Path) -> Path:
    return safetensors(folder, {"\x1b[2J\x1b[31mall is well": claim()}, bytes(8))


# --- zip files


def write_zip(path: Path, entries: Sequence[tuple[str, bytes]], *, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return path


def array(shape: object = (2,), descr: object = "<f4", body: bytes = bytes(8), order: bool = False) -> bytes:
    return with_header(repr({"descr": descr, "fortran_order": order, "shape": shape}).encode() + b"\n", body)


def with_header(header: bytes, body: bytes = bytes(8), *, length: int | None = None) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header) if length is None else length) + header + body


def npz(folder: Path, content: bytes, name: str = "a.npy") -> Path:
    return write_zip(folder / "model.npz", [(name, content)])


def replace_bytes(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes of a file by as many others."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    return write_file(path, content.replace(old, new))


@rejected("holds no tensors")
def zip_of_nothing(folder: Path) -> Path:
    return write_zip(folder / "model.npz", [])


@rejected("too many entries .*300,000|too many entries .*65,535")
def zip_of_300_000_entries(folder: Path) -> Path:
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, *[0] * 14)
    directory = one * 300_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), 4, 0)
    return write_file(folder / "model.npz", b"PK\x03\x04" + directory + end)


@rejected("directory of the zip file is too large")
def zip_of_300_000_entries_that_says_one(folder: Path) -> Path:
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, *[0] * 14)
    directory = one * 300_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), 4, 0)
    return write_file(folder / "model.npz", b"PK\x03\x04" + directory + end)


@rejected("too many entries .*20,000")
def zip_of_20_000_arrays_that_says_one(folder: Path) -> Path:
    path = write_zip(folder / "model.npz", [(str(index), b"") for index in range(20_000)])
    content = path.read_bytes()
    return write_file(path, content[:-14] + struct.pack("<HH", 1, 1) + content[-10:])


@rejected("directory of the zip file is too large")
def zip64_with_a_directory_of_exabytes(folder: Path) -> Path:
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 2**62, 4)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 4, 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return write_file(folder / "model.npz", b"PK\x03\x04" + record + locator + end)


@rejected("truncated")
def zip_cut_short(folder: Path) -> Path:
    path = npz(folder, array())
    return write_file(path, path.read_bytes()[:-5])


@rejected("data after its end")
def zip_with_an_appendix(folder: Path) -> Path:
    path = npz(folder, array())
    return write_file(path, path.read_bytes() + b"#!/bin/sh")


@rejected("is a damaged zip file")
def zip_whose_directory_is_noise(folder: Path) -> Path:
    return replace_bytes(npz(folder, array()), b"PK\x01\x02", b"PKno")


@rejected("expands to far more")
def zip_bomb(folder: Path) -> Path:
    megabyte = array((1 << 18,), body=bytes(1 << 20))
    return write_zip(folder / "model.npz", [(f"{i}.npy", megabyte) for i in range(100)], method=zipfile.ZIP_DEFLATED)


@rejected("expands to far more")
def zip_bomb_that_only_says_so(folder: Path) -> Path:
    path = write_zip(folder / "model.npz", [("a.npy", array())], method=zipfile.ZIP_DEFLATED)
    size = struct.pack("<L", len(array()))
    return replace_bytes(path, size, struct.pack("<L", 0xFFFFFFF0))


@rejected("overlapping entries")
def zip_whose_entries_share_their_bytes(folder: Path) -> Path:
    path = write_zip(folder / "model.npz", [("a.npy", array()), ("b.npy", array())])
    content = bytearray(path.read_bytes())
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = bytes(4)
    return write_file(path, bytes(content))


@rejected("outside the file")
def zip_entry_beyond_the_end(folder: Path) -> Path:
    path = npz(folder, array())
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 42 : entry + 46] = struct.pack("<L", 1 << 30)
    return write_file(path, bytes(content))


@rejected("has a duplicate entry")
def zip_entry_twice(folder: Path) -> Path:
    path = write_zip(folder / "model.npz", [("a.npy", array()), ("b.npy", array())])
    return replace_bytes(path, b"b.npy", b"a.npy")


@rejected("is encrypted")
def zip_entry_with_a_password(folder: Path) -> Path:
    path = npz(folder, array())
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 8] |= 1
    return write_file(path, bytes(content))


@rejected("uses compression method 14")
def zip_entry_packed_by_lzma(folder: Path) -> Path:
    return write_zip(folder / "model.npz", [("a.npy", array())], method=zipfile.ZIP_LZMA)


@rejected("points outside the file")
def zip_entry_that_climbs(folder: Path) -> Path:
    return npz(folder, array(), name="../../escaped.npy")


@rejected("points outside the file")
def zip_entry_from_the_root(folder: Path) -> Path:
    return npz(folder, array(), name="/tmp/escaped.npy")


@rejected("points outside the file")
def zip_entry_that_climbs_on_windows(folder: Path) -> Path:
    return npz(folder, array(), name="..\\escaped.npy")


@rejected("invalid tensor name")
def zip_entry_with_a_zero_byte(folder: Path) -> Path:
    return replace_bytes(npz(folder, array(), name="aXb.npy"), b"aXb.npy", b"a\0b.npy")


# --- arrays in npz files


@rejected("is not an array")
def script_among_the_arrays(folder: Path) -> Path:
    return write_zip(folder / "model.npz", [("a.npy", array()), ("setup.py", b"print('hello')")])


@rejected("not an array of numbers .*O")
def array_of_objects(folder: Path) -> Path:
    np.savez(folder / "model.npz", a=np.array([Runs(os.system, f"touch {folder / 'ran'}")], dtype=object))
    return folder / "model.npz"


@rejected("not an array of numbers")
def array_of_records(folder: Path) -> Path:
    return npz(folder, array(descr=[("a", "<f4"), ("b", "|O")]))


@rejected("not an array of numbers")
def array_of_texts(folder: Path) -> Path:
    return npz(folder, array(descr="<U2"))


@rejected("magic string is not correct")
def array_that_is_a_pickle(folder: Path) -> Path:
    return npz(folder, pickle.dumps(Runs(os.system, f"touch {folder / 'ran'}")))


@rejected("not a valid NumPy array: EOF")
def array_without_a_header(folder: Path) -> Path:
    return npz(folder, b"\x93NUMPY\x01")


@rejected("not a valid NumPy array: EOF")
def array_with_a_header_of_gigabytes(folder: Path) -> Path:
    return npz(folder, with_header(b"{}", length=0xFFFFFFF0))


@rejected("not a valid NumPy array: malformed node")
def array_whose_header_is_code(folder: Path) -> Path:
    code = f"__import__('os').system('touch {folder / 'ran'}')".encode()[:900]
    return npz(folder, with_header(code))


@rejected("not a valid NumPy array")
def array_whose_header_is_brackets(folder: Path) -> Path:
    return npz(folder, with_header(b"(" * 900))


@rejected("not a valid NumPy array: malformed node")
def array_whose_header_is_a_power(folder: Path) -> Path:
    return npz(folder, with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"))


@rejected("Header is not a dictionary")
def array_whose_header_is_a_list(folder: Path) -> Path:
    return npz(folder, with_header(b"['<f4', False, (2,)]"))


@rejected("does not contain the correct keys")
def array_with_more_in_its_header(folder: Path) -> Path:
    return npz(folder, with_header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'run': 'it'}"))


@rejected("format version 9.0 is not supported")
def array_of_a_later_format(folder: Path) -> Path:
    return npz(folder, b"\x93NUMPY\x09\x00" + array()[8:])


@rejected("invalid shape")
def array_of_a_trillion(folder: Path) -> Path:
    return npz(folder, array((10**12,)))


@rejected("invalid shape")
def array_of_negative_shape(folder: Path) -> Path:
    return npz(folder, array((-2,)))


@rejected("does not fill its shape")
def array_larger_than_its_entry(folder: Path) -> Path:
    return npz(folder, array((10_000, 10_000)))


@rejected("cannot be unpacked: Bad CRC")
def array_with_a_flipped_bit(folder: Path) -> Path:
    return replace_bytes(npz(folder, array(body=b"weights!")), b"weights!", b"weighty!")


@rejected("cannot be unpacked")
def array_packed_into_noise(folder: Path) -> Path:
    path = write_zip(folder / "model.npz", [("a.npy", array((512,), body=bytes(2048)))], method=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    content[35:60] = b"\xff" * 25
    return write_file(path, bytes(content))


# --- torch files


class Runs:
    """An object whose pickle is a call."""

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


def tensor_opcodes(
    *,
    key: str = "0",
    count: int = 4,
    offset: int = 0,
    shape: bytes = numbers((4,)),
    stride: bytes = numbers((1,)),
    type_: bytes = b"ctorch\nFloatStorage\n",
) -> bytes:
    """Return the opcodes of a tensor."""
    storage = b"(" + text("storage") + type_ + text(key) + text("cpu") + number(count) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + stride + b"\x89" + hooks + b"tR"


def state(**tensors: bytes) -> bytes:
    """Return the opcodes of a state dict."""
    return b"\x80\x02}(" + b"".join(text(name) + content for name, content in tensors.items()) + b"u."


def torch_zip(folder: Path, content: bytes, *others: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    entries = [("archive/data.pkl", content), ("archive/data/0", bytes(16)), *others]
    return write_zip(folder / "model.pth", entries, method=method)


def old_torch(folder: Path, content: bytes, keys: Sequence[str] = ("0",), body: bytes | None = None) -> Path:
    head = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    numbers_ = struct.pack("<q", 4) + bytes(16) if body is None else body
    return write_file(folder / "model.pth", b"".join(head) + content + pickle.dumps(list(keys), 2) + numbers_)


@rejected("refers to posix.system")
def pickle_that_runs_a_command(folder: Path) -> Path:
    return torch_zip(folder, pickle.dumps({"a": Runs(os.system, f"touch {folder / 'ran'}")}, 2))


@rejected("refers to posix.system")
def old_pickle_that_runs_a_command(folder: Path) -> Path:
    return old_torch(folder, pickle.dumps({"a": Runs(os.system, f"touch {folder / 'ran'}")}, 2))


@rejected("refers to builtins.eval|refers to __builtin__.eval")
def pickle_that_evaluates(folder: Path) -> Path:
    return torch_zip(folder, pickle.dumps({"a": Runs(eval, f"open({str(folder / 'ran')!r}, 'w')")}, 4))


@rejected("refers to builtins.getattr")
def pickle_that_takes_attributes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\n" + text("system") + b"tR.")


@rejected("refers to runpy._run_code")
def pickle_that_runs_code_by_a_back_door(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02crunpy\n_run_code\n(" + text("import os") + b"}tR.")


@rejected("refers to torch.load")
def pickle_that_loads_another(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch\nload\n(" + text("other.pth") + b"tR.")


@rejected("refers to torch.hub.load_state_dict_from_url")
def pickle_that_asks_the_network(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch.hub\nload_state_dict_from_url\n(" + text("http://x.invalid") + b"tR.")


@rejected("refers to torch.Tensor")
def pickle_that_allocates_a_terabyte(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + text("a") + b"ctorch\nTensor\n" + numbers((10**6, 10**6)) + b"Rs.")


@rejected("holds no tensors")
def pickle_that_allocates_a_terabyte_of_bytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + text("a") + b"cbuiltins\nbytearray\n" + numbers((10**12,)) + b"Rs.")


@rejected("refers to timm.models.vision_transformer.VisionTransformer")
def pickle_of_a_whole_model(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctimm.models.vision_transformer\nVisionTransformer\n)\x81.")


@rejected("has the opcode INST")
def pickle_of_old_instances(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02(" + text("true") + b"ios\nsystem\n.")


@rejected("refers to o.+system")
def pickle_of_names_with_odd_escapes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02co\\s\nsystem\n.")


@rejected("has the opcode EXT1")
def pickle_that_uses_the_extension_registry(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02\x82\x01.")


@rejected("its pickle contains more than tensors")
def pickle_cut_short(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes())[:-20])


@rejected("its pickle contains more than tensors")
def pickle_of_noise(folder: Path) -> Path:
    return torch_zip(folder, bytes(range(256)))


@rejected("more than 250,000 opcodes")
def pickle_of_a_million_opcodes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + b"N" * 1_000_000 + b".")


@rejected("data.pkl is too large")
def pickle_of_megabytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + text("x" * (5 << 20)) + b".")


def nested_tuples(times: int) -> bytes:
    """Nest a tuple twice in another, repeatedly: a few bytes here, astronomic when hashed or printed."""
    return b")" + b"q\x00h\x00\x86" * times


@rejected("holds no tensors")
def pickle_with_a_key_that_takes_for_ever(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + nested_tuples(60) + b"Ns.")


@rejected("invalid shape")
def tensor_with_a_shape_that_takes_for_ever(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(shape=nested_tuples(60))))


@rejected("invalid stride or offset")
def tensor_with_steps_that_take_for_ever(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(stride=nested_tuples(60))))


@rejected("holds no tensors")
def pickle_that_holds_itself(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}q\x00" + text("model") + b"h\x00s.")


@rejected("has no named tensors")
def pickle_of_one_nameless_tensor(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + tensor_opcodes() + b".")


@rejected("invalid shape")
def tensor_of_a_trillion(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(shape=numbers((10**12,)))))


@rejected("exceeds its storage")
def tensor_that_is_one_number_a_million_times(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(shape=numbers((1000, 1000)), stride=numbers((0, 0)))))


@rejected("exceeds its storage")
def tensor_beyond_its_storage(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(offset=3, shape=numbers((2,)))))


@rejected("invalid stride or offset")
def tensor_before_its_storage(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(offset=-4)))


@rejected("invalid stride or offset")
def tensor_that_runs_backwards(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(stride=numbers((-1,)))))


@rejected("exceeds its storage")
def tensor_with_a_step_too_few(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(shape=numbers((2, 2)))))


@rejected("has the wrong size")
def storage_that_says_it_is_larger(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(count=10**9)))


@rejected("is missing")
def storage_that_is_missing(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(key="7")))


@rejected("is missing")
def storage_outside_of_the_file(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(key="../../../etc/passwd")))


@rejected("unknown type")
def storage_of_something_else(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes(type_=b"cargparse\nNamespace\n")))


@rejected("is compressed")
def storage_that_is_packed(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes()), method=zipfile.ZIP_DEFLATED)


@rejected("larger than the file")
def hundred_names_for_one_storage(folder: Path) -> Path:
    big = ("archive/data/1", bytes(1 << 20))
    many = {f"t{index}": tensor_opcodes(key="1", count=1 << 18, shape=numbers((1 << 18,))) for index in range(100)}
    return torch_zip(folder, state(**many), big)


@rejected("TorchScript")
def program_of_torchscript(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes()), ("archive/constants.pkl", b"\x80\x02)."))


@rejected("big-endian")
def numbers_of_a_big_endian_machine(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes()), ("archive/byteorder", b"big"))


@rejected("points outside the file")
def torch_zip_entry_that_climbs(folder: Path) -> Path:
    return torch_zip(folder, state(a=tensor_opcodes()), ("archive/../../escaped", b"x"))


@rejected("pickle that torch did not write")
def bare_pickle(folder: Path) -> Path:
    return write_file(folder / "model.pth", pickle.dumps(Runs(os.system, f"touch {folder / 'ran'}")))


@rejected("is truncated")
def old_file_cut_short(folder: Path) -> Path:
    return old_torch(folder, state(a=tensor_opcodes()), body=struct.pack("<q", 4) + bytes(3))


@rejected("is truncated")
def old_file_of_negative_size(folder: Path) -> Path:
    return old_torch(folder, state(a=tensor_opcodes()), body=struct.pack("<q", -(2**62)) + bytes(16))


@rejected("is truncated")
def old_file_of_exabytes(folder: Path) -> Path:
    return old_torch(folder, state(a=tensor_opcodes(count=2**60)), body=struct.pack("<q", 2**60) + bytes(16))


@rejected("is missing")
def old_file_with_two_sizes(folder: Path) -> Path:
    return old_torch(folder, state(a=tensor_opcodes(count=5)))


@rejected("is missing")
def old_file_with_two_types(folder: Path) -> Path:
    wide = tensor_opcodes(type_=b"ctorch\nDoubleStorage\n")
    return old_torch(folder, state(a=wide, b=tensor_opcodes()))


@rejected("invalid list of storages")
def old_file_with_keys_that_repeat(folder: Path) -> Path:
    return old_torch(folder, state(a=tensor_opcodes()), keys=["0", "0"])


# --- folders


def good(folder: Path) -> Path:
    save_safetensors(folder / "model.safetensors", {"a": torch.zeros(2)})
    return folder


@rejected("config.json: is nested too deeply")
def config_of_brackets(folder: Path) -> Path:
    write_file(good(folder) / "config.json", b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}")
    return folder


@rejected("config.json: is nested too deeply")
def config_a_hundred_deep(folder: Path) -> Path:
    write_file(good(folder) / "config.json", b'{"a":' * 100 + b"1" + b"}" * 100)
    return folder


@rejected("config.json: is too large")
def config_of_megabytes(folder: Path) -> Path:
    write_file(good(folder) / "config.json", b'{"a":"' + b"x" * (5 << 20) + b'"}')
    return folder


@rejected("config.json: is not a JSON object")
def config_that_is_a_list(folder: Path) -> Path:
    write_file(good(folder) / "config.json", b"[1, 2]")
    return folder / "model.safetensors"


@rejected("config.json: is not JSON")
def config_of_noise(folder: Path) -> Path:
    write_file(good(folder) / "config.json", b"\xff\xfe\0\0")
    return folder


@rejected("config.json: not a file .*a pipe")
def config_that_is_a_pipe(folder: Path) -> Path:
    os.mkfifo(good(folder) / "config.json")
    return folder


@rejected("is not a weight file")
def weights_that_are_a_link_to_a_secret(folder: Path) -> Path:
    (folder / "model.safetensors").symlink_to("/etc/passwd")
    return folder


@rejected("config.json: is not JSON: Expecting value")
def config_that_is_a_link_to_a_secret(folder: Path) -> Path:
    (good(folder) / "config.json").symlink_to("/etc/passwd")
    return folder


def index(folder: Path, places: object) -> Path:
    write_file(folder / "model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    return folder


@rejected("points outside the directory")
def index_that_climbs(folder: Path) -> Path:
    (folder / "model").mkdir()
    return index(good(folder) / "model", {"a": "../model.safetensors"})


@rejected("points outside the directory")
def index_from_the_root(folder: Path) -> Path:
    return index(folder, {"a": "/etc/passwd"})


@rejected("invalid number of files")
def index_of_thousands_of_files(folder: Path) -> Path:
    return index(folder, {str(number): f"{number}.safetensors" for number in range(5000)})


@rejected("does not map tensors to files")
def index_of_numbers(folder: Path) -> Path:
    return index(folder, {"a": 1})


@rejected("no such file")
def index_of_a_missing_file(folder: Path) -> Path:
    return index(folder, {"a": "model-00001-of-00001.safetensors"})


@rejected("does not agree with shard.safetensors on b")
def index_of_a_missing_tensor(folder: Path) -> Path:
    save_safetensors(folder / "shard.safetensors", {"a": torch.zeros(2)})
    return index(folder, {"a": "shard.safetensors", "b": "shard.safetensors"})


# --- archives and pickles that are something else


def write_tar(folder: Path, name: str, *, link: str = "") -> Path:
    entry = tarfile.TarInfo(name)
    if link:
        entry.type, entry.linkname = tarfile.SYMTYPE, link
    with tarfile.open(folder / "model.pth", "w") as archive:
        archive.addfile(entry)
    return folder / "model.pth"


@rejected("is not a weight file")
def tar_that_climbs(folder: Path) -> Path:
    return write_tar(folder, "../../escaped")


@rejected("is not a weight file")
def tar_with_a_link_to_the_root(folder: Path) -> Path:
    return write_tar(folder, "storages", link="/etc/passwd")


@rejected("compressed with gzip")
def tar_packed_by_gzip(folder: Path) -> Path:
    return write_file(folder / "model.pth", gzip.compress(write_tar(folder, "../escaped").read_bytes()))


@rejected("expands to far more")
def torch_zip_bomb(folder: Path) -> Path:
    big = [(f"archive/data/{number}", bytes(1 << 20)) for number in range(1, 101)]
    return torch_zip(folder, state(a=tensor_opcodes()), *big, method=zipfile.ZIP_DEFLATED)


@rejected("has the opcode OBJ")
def pickle_of_old_objects(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02(cargparse\nNamespace\n" + text("true") + b"o.")


@rejected("has the opcode NEWOBJ_EX")
def pickle_of_objects_with_keywords(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x04cargparse\nNamespace\n)}\x92.")


@rejected("has the opcode PERSID")
def pickle_with_a_text_for_a_storage(folder: Path) -> Path:
    return torch_zip(folder, b"Pstorage\n.")


@rejected("sets the state of a value that has none")
def pickle_that_sets_the_state_of_a_name(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02ctorch\nSize\n}" + text("__setstate__") + b"cbuiltins\nset\nsb.")


@rejected("refers to __main__.Evil")
def pickle_with_a_setstate_of_its_own(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02c__main__\nEvil\n)\x81}b.")


@rejected("calls a value that is not a global")
def pickle_that_calls_a_tensor(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02" + tensor_opcodes() + b")R.")


@rejected("global whose name is not text")
def pickle_that_names_a_number(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x04K\x01K\x02\x93.")


@rejected("refers to numpy.load")
def pickle_that_loads_an_array_of_objects(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02cnumpy\nload\n(" + text("other.npy") + b"tR.")


@rejected("holds no tensors")
def pickle_that_reconstructs_an_array_of_objects(folder: Path) -> Path:
    created = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + numbers((10**12,)) + text("O") + b"tR"
    return torch_zip(folder, b"\x80\x02}" + text("a") + created + b"s.")


@rejected("it is damaged|holds no")
def pickle_that_remembers_far_away(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02}" + b"r\xff\xff\xff\x7f" + b"h\x07s.")


@rejected("has the opcode LONG4")
def pickle_of_a_number_of_megabytes(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x02\x8b" + struct.pack("<i", 3 << 20) + b"\x7f" * (3 << 20) + b".")


@rejected("it is damaged|more than|has no end|contains more than tensors")
def pickle_of_protocol_99(folder: Path) -> Path:
    return torch_zip(folder, b"\x80\x63" + b"\x95" + b"\xff" * 8 + b".")


@rejected("header is too large")
def header_of_a_billion_bytes(folder: Path) -> Path:
    return safetensors(folder, {"a": claim()}, length=10**9)


@rejected("invalid shape|is not JSON|which is not valid JSON")
def axis_that_is_not_a_number(folder: Path) -> Path:
    return safetensors(folder, b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8))


@rejected("no possible place|is not JSON|which is not valid JSON")
def offset_that_is_infinite(folder: Path) -> Path:
    return safetensors(folder, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', bytes(8))


@rejected("invalid shape, data type, or offset|TensorInvalidInfo")
def elements_of_another_size(folder: Path) -> Path:
    return safetensors(folder, {"a": claim(dtype="F64")}, bytes(8))


# --- artifacts with valid checksums, because an attacker writes those too

ARTIFACTS: dict[str, tuple[str, Build]] = {}


def rejected_on_load(reason: str) -> Callable[[Build], Build]:
    """Register the builder of an artifact with valid weights and a hostile description."""

    def register(build: Build) -> Build:
        ARTIFACTS[build.__name__] = (reason, build)
        return build

    return register


def write_artifact(folder: Path) -> Path:
    """Write a small artifact."""
    sizes = {"depth": 1, "width": 16, "heads": 1, "mlp_dim": 16}
    vitkit.save(vitkit.create("B/16", image_size=32, num_classes=2, settings=sizes), folder / "own")
    return folder / "own"


def update_checksums(folder: Path) -> Path:
    """Update the checksums of an artifact."""
    recorded = json.loads((folder / "checksums.json").read_bytes())
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in recorded}
    write_file(folder / "checksums.json", json.dumps(sums).encode())
    return folder


def write_changed_artifact(folder: Path, file: str, keys: str, value: object) -> Path:
    """Write an artifact with one value of a file replaced."""
    path = write_artifact(folder) / file
    content = inner = json.loads(path.read_bytes())
    *outer, last = keys.split(".")
    for key in outer:
        inner = inner[key]
    inner[last] = value
    write_file(path, json.dumps(content).encode())
    return update_checksums(folder / "own")


@rejected_on_load("depth is too large for a model")
def model_a_billion_deep(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.depth", 10**9)


@rejected_on_load("width is too large for a model")
def model_a_billion_wide(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.width", 10**9)


@rejected_on_load("image_size is too large for a model")
def model_of_images_a_billion_wide(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.image_size", [10**9, 10**9])


@rejected_on_load("num_classes is too large for a model")
def model_of_a_billion_classes(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.num_classes", 10**9)


@rejected_on_load("registers is too large for a model")
def model_of_a_billion_registers(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.tokens.registers", 10**9)


@rejected_on_load("mlp_dim")
def model_of_negative_width(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.model.mlp_dim", -16)


@rejected_on_load("not the configuration of a vitkit model")
def model_of_an_unknown_kind(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.kind", "../../os")


@rejected_on_load("another artifact version")
def model_of_a_far_future(folder: Path) -> Path:
    return write_changed_artifact(folder, "config.json", "vitkit.version", 10**9)


@rejected_on_load("image_size is too large for a model")
def preprocessing_to_a_billion_pixels(folder: Path) -> Path:
    return write_changed_artifact(folder, "preprocessor_config.json", "vitkit.image_size", 10**9)


@rejected_on_load("which is not valid JSON")
def preprocessing_by_what_is_no_number(folder: Path) -> Path:
    return write_changed_artifact(folder, "preprocessor_config.json", "vitkit.mean", [float("nan")] * 3)


@rejected_on_load("not a file|is not a JSON object|not the configuration")
def preprocessing_that_is_a_list(folder: Path) -> Path:
    write_file(write_artifact(folder) / "preprocessor_config.json", b"[]")
    return update_checksums(folder / "own")


@rejected_on_load("labels.json: is too large")
def labels_of_megabytes(folder: Path) -> Path:
    write_file(write_artifact(folder) / "labels.json", json.dumps(["x" * 100] * 100_000).encode())
    return update_checksums(folder / "own")


@rejected_on_load("not the labels of the model")
def labels_of_other_classes(folder: Path) -> Path:
    write_file(write_artifact(folder) / "labels.json", json.dumps(["x"] * 100_000).encode())
    return update_checksums(folder / "own")


@rejected_on_load("not the labels of the model")
def labels_that_are_lists(folder: Path) -> Path:
    write_file(write_artifact(folder) / "labels.json", b"[[], []]")
    return update_checksums(folder / "own")


@rejected_on_load("nested too deeply")
def labels_of_brackets(folder: Path) -> Path:
    write_file(write_artifact(folder) / "labels.json", b"[" * 9_000 + b"]" * 9_000)
    return update_checksums(folder / "own")


@rejected_on_load("has the key 'vitkit' twice")
def config_with_two_models(folder: Path) -> Path:
    path = write_artifact(folder) / "config.json"
    write_file(path, path.read_bytes().rstrip()[:-1] + b', "vitkit": {}}')
    return update_checksums(folder / "own")


@rejected_on_load("labels.json: missing or unreadable")
def labels_that_are_a_pipe(folder: Path) -> Path:
    (write_artifact(folder) / "labels.json").unlink()
    os.mkfifo(folder / "own" / "labels.json")
    return folder / "own"


@rejected_on_load("missing or unreadable|not a file|no such file")
def weights_that_are_a_device(folder: Path) -> Path:
    (write_artifact(folder) / "model.safetensors").unlink()
    (folder / "own" / "model.safetensors").symlink_to("/dev/zero")
    return folder / "own"


@rejected_on_load("damaged")
def weights_exchanged_for_others(folder: Path) -> Path:
    path = write_artifact(folder) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    write_file(path, bytes(content))
    return folder / "own"


@rejected_on_load("header is too large")
def weights_of_300_000_tensors(folder: Path) -> Path:
    safetensors(write_artifact(folder), b"{}", length=10**9)
    return update_checksums(folder / "own")


@rejected_on_load("is not a JSON object|damaged")
def checksums_that_are_a_list(folder: Path) -> Path:
    write_file(write_artifact(folder) / "checksums.json", b"[1, 2]")
    return folder / "own"


@rejected_on_load("damaged")
def checksums_of_another_folder(folder: Path) -> Path:
    path = write_artifact(folder) / "checksums.json"
    write_file(path, json.dumps(dict.fromkeys(json.loads(path.read_bytes()), "../../x")).encode())
    return folder / "own"


@rejected_on_load("invalid hub name")
def hub_name_that_climbs(folder: Path) -> Path:
    return Path("hub:../../etc/passwd")


@rejected_on_load("invalid hub name")
def hub_name_of_an_owner_that_climbs(folder: Path) -> Path:
    return Path("hub:../name")


# --- the test


class AuditLog:
    """Audit hook for events that a reader of weights must not cause, active while armed; hooks cannot be removed."""

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
        self.events: list[str] = []
        sys.addaudithook(self.record)

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        opened_to_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & self.WRITES)
        if event.startswith((*self.NEVER, *self.CHANGES)) or opened_to_write:
            self.events.append(f"{event} {arguments[:2]}")


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory) -> AuditLog:
    folder = tmp_path_factory.mktemp("good")
    tensors = {"a": torch.zeros(2)}
    save_npz(folder / "a.npz", tensors)
    save_safetensors(folder / "a.safetensors", tensors)
    save_torch(folder / "a.pth", tensors, None)
    for path in sorted(folder.iterdir()):  # so that nothing is imported, compiled or cached while the log is armed
        with open_tensors(path) as opened:
            assert opened["a"].tolist() == [0, 0]
    for run in COMMANDS.values():
        run(write_artifact(folder))
        with pytest.raises(WeightsError):
            run(folder / "a.npz")
    return AuditLog()


@pytest.fixture
def armed_log(audit_log) -> Iterator[AuditLog]:
    gc.freeze()  # garbage of earlier tests is not the command's work
    yield audit_log
    gc.unfreeze()
    audit_log.armed = False
    audit_log.events.clear()


def tree(folder: Path) -> list[tuple[str, int, int]]:
    result = [(path, path.lstat()) for path in folder.rglob("*")]
    return sorted((str(path), status.st_size, status.st_mtime_ns) for path, status in result)


def read_all(path: Path) -> None:
    with open_tensors(path) as opened:
        assert all(opened[name].shape == shape for name, shape in opened.shapes.items())


def info(path: Path) -> None:
    """Run `vitkit weights info`."""
    command.main(["info", str(path), "--json"], standalone_mode=False)


COMMANDS: dict[str, Callable[[Path], object]] = {"load": vitkit.load, "info": info}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", CASES)
def test_hostile_file_is_rejected_with_the_reason(case, tmp_path, armed_log, monkeypatch) -> None:
    reason, build = CASES[case]
    path = build(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    tracemalloc.start()
    armed_log.armed = True
    try:
        with pytest.raises(WeightsError, match=reason) as caught:
            read_all(path)
    finally:
        armed_log.armed = False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    message = caught.value.summary
    assert str(tmp_path) in message
    assert caught.value.hint
    assert len(message) < 600
    assert message.isprintable()
    assert peak < MAX_MEMORY
    assert armed_log.events == []
    if "\0" not in str(path):  # which no command line can contain
        assert_commands_reject(path, None, armed_log)
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", ARTIFACTS)
def test_hostile_artifact_is_rejected_with_the_reason(case, tmp_path, armed_log, monkeypatch) -> None:
    reason, build = ARTIFACTS[case]
    path = build(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert_commands_reject(path, reason, armed_log)
    assert tree(tmp_path) == before


def assert_commands_reject(path: Path, reason: str | None, log: AuditLog) -> None:
    """Check that loading and `weights info` fail in time; a weight file alone may fail for another reason first."""
    for run in COMMANDS.values():
        log.armed = True
        started = time.process_time()
        try:
            with pytest.raises(VitkitError, match=reason) as caught:
                run(path)
        finally:
            seconds = time.process_time() - started
            log.armed = False
        assert seconds < MAX_SECONDS
        assert caught.value.summary.isprintable()
        assert log.events == []


def test_number_of_hostile_files() -> None:
    assert len(CASES) >= 60
    assert len(CASES | ARTIFACTS) == len(CASES) + len(ARTIFACTS)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "torch", "old torch"])
def test_damaged_file_never_crashes(kind, tmp_path) -> None:
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
        directory = int(generator.integers(len(content)))
        damaged = bytearray(content[:directory] if attempt % 3 == 0 else content)
        if attempt % 3:
            damaged[directory] ^= int(generator.integers(1, 256))
        other = tmp_path / f"damaged-{attempt}"  # a new file each time, because the old one may still be mapped
        other.write_bytes(damaged)
        try:
            read_all(other)
        except WeightsError:
            refusals += 1
        other.unlink()
    assert refusals >= 100  # every truncation, and most flips in headers


def test_audit_hook_records_events(armed_log, tmp_path) -> None:
    armed_log.armed = True
    pickle.loads(pickle.dumps(Runs(os.mkdir, str(tmp_path / "made"))))
    io.FileIO(tmp_path / "written", "w").close()
    armed_log.armed = False
    assert [event.split()[0] for event in armed_log.events] == ["pickle.find_class", "os.mkdir", "open"]
