"""Hostile datasets, configurations and models, built byte by byte.

Hostile weight files are in tests/weights/test_hostile_files.py. These cases are archives, tables, lists and arrays of
images, TOML files, and whole folders as arguments of commands.
"""

import csv
import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from onnx import TensorProto, helper
from PIL import Image

import vitkit

Build = Callable[[Path], Path]
Way = Literal["data", "toml", "model"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Builder of a hostile artifact, the command that reads it, and a pattern of the error message."""

    build: Build
    way: Way
    reason: str


CASES: dict[str, Case] = {}


def refused(way: Way, reason: str) -> Callable[[Build], Build]:
    """Register the builder of an artifact and a pattern of its error message."""

    def register(build: Build) -> Build:
        CASES[build.__name__] = Case(build=build, way=way, reason=reason)
        return build

    return register


def write_file(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def png(color: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def photos(folder: Path) -> Path:
    """Create a valid folder of two classes."""
    for number, name in enumerate(["cat", "dog"]):
        for each in range(2):
            write_file(folder / "photos" / name / f"{each}.png", png(100 * number + each))
    return folder / "photos"


# --- tar shards


def tarred(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, content in entries:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def shards(folder: Path, *more: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Create a tar of two valid examples, followed by other content."""
    sound = [
        (member(f"{n}.{end}"), png(n) if end == "png" else str(n).encode()) for n in (0, 1) for end in ("png", "cls")
    ]
    return tarred(folder / "shards" / "train-0.tar", *sound, *more).parent


def raw_header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """Create a tar header of 512 bytes with a given size field."""
    head = bytearray(512)
    head[0 : len(name)] = name
    head[100:108], head[108:116], head[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    head[124 : 124 + len(size)] = size
    head[136:148], head[156:157], head[257:265] = b"00000000000\0", kind, b"ustar  \0"
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head)


@refused("data", "outside of the archive")
def tar_that_climbs(folder: Path) -> Path:
    return shards(folder, (member("../../escaped.png"), png(3)), (member("../../escaped.cls"), b"1"))


@refused("data", "outside of the archive")
def tar_from_the_root(folder: Path) -> Path:
    return shards(folder, (member("/tmp/escaped.png"), png(3)), (member("/tmp/escaped.cls"), b"1"))


@refused("data", "has no images")
def tar_of_symbolic_links(folder: Path) -> Path:
    link = member("0.png", kind=tarfile.SYMTYPE, link="/etc/passwd")
    return tarred(folder / "shards" / "train-0.tar", (link, b""), (member("0.cls"), b"0")).parent


@refused("data", "has no images")
def tar_of_hard_links(folder: Path) -> Path:
    link = member("0.png", kind=tarfile.LNKTYPE, link="../../secret.png")
    return tarred(folder / "shards" / "train-0.tar", (link, b""), (member("0.cls"), b"0")).parent


@refused("data", "has no images")
def tar_of_devices_and_pipes(folder: Path) -> Path:
    kinds = [member("0.png", kind=tarfile.CHRTYPE), member("1.png", kind=tarfile.FIFOTYPE)]
    return tarred(folder / "shards" / "train-0.tar", *((entry, b"") for entry in kinds)).parent


@refused("data", "not a complete tar|is damaged")
def tar_of_a_negative_size(folder: Path) -> Path:
    head = raw_header(b"0.txt", b"\xff" * 10 + b"\xfe\x00")  # -512: the next header would be this one again
    return write_file(folder / "shards" / "train-0.tar", head + bytes(1024)).parent


@refused("data", "not a complete tar|is damaged")
def tar_of_a_size_of_exabytes(folder: Path) -> Path:
    head = raw_header(b"0.png", b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7)
    return write_file(folder / "shards" / "train-0.tar", head + bytes(1024)).parent


@refused("data", "not a complete tar|is damaged")
def tar_of_names_before_names(folder: Path) -> Path:
    piece = raw_header(b"././@LongLink", b"00000000005\0", b"L") + b"a.png".ljust(512, b"\0")
    return write_file(folder / "shards" / "train-0.tar", piece * 5000 + bytes(1024)).parent


@refused("data", "not a complete tar|is damaged")
def tar_of_headers_before_headers(folder: Path) -> Path:
    record = b"20 comment=deeperr\n\n"
    piece = raw_header(b"x", f"{len(record):011o}\0".encode(), b"x") + record.ljust(512, b"\0")
    return write_file(folder / "shards" / "train-0.tar", piece * 5000 + bytes(1024)).parent


@refused("data", "not a complete tar|is damaged")
def tar_whose_header_exaggerates_a_size(folder: Path) -> Path:
    record = b"30 size=9999999999999999999999"
    record = record.replace(b"30", str(len(record) + 1).encode()) + b"\n"
    head = raw_header(b"x", f"{len(record):011o}\0".encode(), b"x") + record.ljust(512, b"\0")
    return write_file(
        folder / "shards" / "train-0.tar", head + raw_header(b"0.png", b"00000000010\0") + bytes(2048)
    ).parent


@refused("data", "is damaged|not a complete tar")
def tar_of_holes(folder: Path) -> Path:
    head = bytearray(raw_header(b"0.png", b"00000000000\0", b"S"))
    head[386:398], head[398:410], head[483:495] = b"00000000000\0", b"77777777777\0", b"77777777777\0"
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return write_file(folder / "shards" / "train-0.tar", bytes(head) + bytes(1024)).parent


@refused("data", "is damaged|not a complete tar|ends within")
def tar_cut_short(folder: Path) -> Path:
    place = shards(folder) / "train-0.tar"
    return write_file(place, place.read_bytes()[:600]).parent


@refused("data", "not a complete tar")
def tar_of_noise(folder: Path) -> Path:
    return write_file(folder / "shards" / "train-0.tar", bytes(range(256)) * 8).parent


@refused("data", "too long for a label")
def tar_with_a_label_of_megabytes(folder: Path) -> Path:
    return shards(folder, (member("2.png"), png(2)), (member("2.cls"), b"1" * (2 << 20)))


@refused("data", "is not JSON")
def tar_with_a_label_of_brackets(folder: Path) -> Path:
    return shards(folder, (member("2.png"), png(2)), (member("2.json"), b"[" * 100_000))


@refused("data", "label out of range")
def tar_of_a_billion_classes(folder: Path) -> Path:
    return shards(folder, (member("2.png"), png(2)), (member("2.cls"), b"999999999"))


@refused("data", "has two images")
def tar_with_two_images_for_a_key(folder: Path) -> Path:
    return shards(folder, (member("1.jpg"), png(2)))


@refused("data", "is damaged|not a complete tar|has no|expected")
def imagenet_of_tars_that_are_none(folder: Path) -> Path:
    place = folder / "imagenet" / "ILSVRC2012_img_train.tar"
    return tarred(place, (member("n01440764.tar"), b"\x7fELF" * 400)).parent


@refused("data", "outside of the archive")
def imagenet_that_climbs(folder: Path) -> Path:
    inner = tarred(folder / "inner.tar", (member("../../../x.jpg"), png(1))).read_bytes()
    place = folder / "imagenet" / "ILSVRC2012_img_train.tar"
    return tarred(place, (member("n01440764.tar"), inner), (member("n01440765.tar"), inner)).parent


# --- lists


def manifest(folder: Path, *rows: Sequence[str], name: str = "metadata.csv") -> Path:
    place = photos(folder)
    stream = io.StringIO()
    csv.writer(stream).writerows([["file_name", "label"], ["cat/0.png", "cat"], ["dog/0.png", "dog"], *rows])
    write_file(place / name, stream.getvalue().encode("utf-8", "surrogateescape"))
    return place


@refused("data", "not a relative path")
def list_that_climbs(folder: Path) -> Path:
    return manifest(folder, ["../../../../etc/passwd", "cat"])


@refused("data", "not a relative path")
def list_from_the_root(folder: Path) -> Path:
    return manifest(folder, ["/etc/passwd", "cat"])


@refused("data", "not a relative path")
def list_that_climbs_on_windows(folder: Path) -> Path:
    return manifest(folder, ["..\\secret.png", "cat"])


@refused("data", "not a relative path|cannot be read")
def list_with_a_zero_byte(folder: Path) -> Path:
    return manifest(folder, ["cat/0\0.png", "cat"])


@refused("data", "outside of")
def list_of_a_link_that_leads_out(folder: Path) -> Path:
    secret = write_file(folder / "secret.png", png(9))
    place = manifest(folder, ["cat/link.png", "cat"])
    (place / "cat" / "link.png").symlink_to(secret)
    return place


@refused("data", "is not a file")
def list_of_a_pipe(folder: Path) -> Path:
    place = manifest(folder, ["cat/pipe.png", "cat"])
    os.mkfifo(place / "cat" / "pipe.png")
    return place


@refused("data", "has no layout|does not exist|no such|not a file|is a pipe")
def list_that_is_a_pipe(folder: Path) -> Path:
    (folder / "photos").mkdir()
    os.mkfifo(folder / "photos" / "metadata.csv")
    return folder / "photos"


@refused("data", "cannot be read|is not JSON")
def list_of_brackets(folder: Path) -> Path:
    write_file(photos(folder) / "metadata.jsonl", '{"file_name": ' + "[" * 100_000)
    return folder / "photos"


@refused("data", "cannot be read")
def list_with_a_field_of_megabytes(folder: Path) -> Path:
    return manifest(folder, ["cat/1.png", "x" * 300_000])


@refused("data", "class_index")
def list_of_a_billion_classes(folder: Path) -> Path:
    place = photos(folder)
    write_file(place / "metadata.csv", "file_name,label,class_index\ncat/0.png,cat,0\ndog/0.png,dog,999999999\n")
    return place


@refused("data", "cannot be read")
def list_that_is_no_text(folder: Path) -> Path:
    write_file(photos(folder) / "metadata.csv", b"file_name,label\n\xff\xfe\xfa.png,cat\n")
    return folder / "photos"


@refused("data", "not a relative path")
def pets_that_climb(folder: Path) -> Path:
    place = folder / "pets"
    write_file(place / "images" / "Cat_1.jpg", png(1))
    for name in ("trainval.txt", "test.txt"):
        write_file(place / "annotations" / name, "../../../etc/Cat_1 1 1 1\nDog_1 2 1 1\n")
    return place


@refused("data", "not a relative path")
def vtab_that_climbs(folder: Path) -> Path:
    for name in ("train800.txt", "val200.txt", "test.txt"):
        write_file(folder / "task" / name, "../../etc/passwd 0\nimages/1.jpg 1\n")
    return folder / "task"


# --- folders of images


@refused("data", "pipe|not a file")
def photo_that_is_a_pipe(folder: Path) -> Path:
    place = photos(folder)
    os.mkfifo(place / "cat" / "pipe.png")
    return place


@refused("data", "device|not a file")
def photo_without_an_end(folder: Path) -> Path:
    place = photos(folder)
    (place / "cat" / "endless.png").symlink_to("/dev/zero")
    return place


@refused("data", "too many bytes")
def photo_of_a_terabyte(folder: Path) -> Path:
    place = photos(folder)
    with (place / "cat" / "huge.png").open("wb") as file:
        file.write(png(7))
        file.truncate(1 << 40)
    return place


@refused("data", "nested too deep|too deep")
def folders_in_folders(folder: Path) -> Path:
    place = photos(folder)
    place.joinpath("cat", *["d"] * 150).mkdir(parents=True)  # at a thousand, what cleans up after tests fails too
    return place


# --- arrays


def idx(folder: Path, images: bytes, labels: bytes = b"\0\0\x08\x01\0\0\0\x02\0\x01", end: str = "") -> Path:
    place = folder / "idx"
    write_file(place / f"train-images-idx3-ubyte{end}", gzip.compress(images) if end else images)
    write_file(place / f"train-labels-idx1-ubyte{end}", gzip.compress(labels) if end else labels)
    return place


def sides(*numbers: int) -> bytes:
    return b"\0\0\x08" + bytes([len(numbers)]) + struct.pack(f">{len(numbers)}I", *numbers)


@refused("data", "is damaged")
def idx_of_exabytes(folder: Path) -> Path:
    return idx(folder, sides(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF) + bytes(100))


@refused("data", "decompresses to far more|is damaged")
def idx_bomb(folder: Path) -> Path:
    return idx(folder, sides(2, 10_000, 10_000) + bytes(200_000_000), end=".gz")


@refused("data", "is damaged")
def idx_with_a_stowaway(folder: Path) -> Path:
    return idx(folder, sides(2, 4, 4) + bytes(33))


@refused("data", "not an IDX file of bytes")
def idx_of_floats(folder: Path) -> Path:
    return idx(folder, b"\0\0\x0d\x03" + struct.pack(">3I", 2, 4, 4) + bytes(128))


@refused("data", "one label per image|has no labels|is damaged")
def idx_of_other_labels(folder: Path) -> Path:
    return idx(folder, sides(2, 4, 4) + bytes(32), sides(5) + bytes(5))


@refused("data", "is damaged|not an IDX")
def idx_cut_short_in_gzip(folder: Path) -> Path:
    place = idx(folder, sides(2, 4, 4) + bytes(range(32)), end=".gz")
    path = place / "train-images-idx3-ubyte.gz"
    return write_file(path, path.read_bytes()[:-9]).parent


def npz(folder: Path, arrays: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED) -> Path:
    place = folder / "arrays.npz"
    with zipfile.ZipFile(place, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return place


def array(shape: object, descr: str = "|u1", body: bytes = b"") -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


LABELS = array((2,), "<i8", struct.pack("<2q", 0, 1))


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("it-ran",)


@refused("data", "arrays? of objects|cannot be read")
def npz_of_objects(folder: Path) -> Path:
    stream = io.BytesIO()
    np.save(stream, np.array([Runs(), Runs()], dtype=object), allow_pickle=True)
    return npz(folder, {"images": stream.getvalue(), "labels": LABELS})


@refused("data", "cannot be read")
def npz_that_is_a_pickle(folder: Path) -> Path:
    return write_file(folder / "arrays.npz", pickle.dumps(Runs()))


@refused("data", "cannot be read|decompresses to far more")
def npz_of_a_trillion(folder: Path) -> Path:
    return npz(folder, {"images": array((10**6, 1000, 1000)), "labels": LABELS})


@refused("data", "decompresses to far more")
def npz_bomb(folder: Path) -> Path:
    images = array((2, 10_000, 10_000), body=bytes(200_000_000))
    return npz(folder, {"images": images, "labels": LABELS}, method=zipfile.ZIP_DEFLATED)


@refused("data", "expected uint8")
def npz_of_floats(folder: Path) -> Path:
    return npz(folder, {"images": array((2, 1, 1), "<f8", bytes(16)), "labels": LABELS})


@refused("data", "label out of range")
def npz_of_a_billion_classes(folder: Path) -> Path:
    images = array((2, 4, 4), body=bytes(32))
    return npz(folder, {"images": images, "labels": array((2,), "<i8", struct.pack("<2q", 0, 10**9))})


@refused("data", "cannot be read|no images with labels")
def npz_of_100_000_entries(folder: Path) -> Path:
    one = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, *[0] * 14)
    directory = one * 100_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), 4, 0)
    return write_file(folder / "arrays.npz", b"PK\x03\x04" + directory + end)


# --- CIFAR


@refused("data", "not a plain pickle")
def cifar_that_runs_a_command(folder: Path) -> Path:
    return write_file(folder / "cifar" / "data_batch_1", pickle.dumps({b"data": Runs()})).parent


@refused("data", "decompresses to far more|too long|too large")
def cifar_bomb(folder: Path) -> Path:
    place = folder / "cifar" / "cifar-10-python.tar.gz"
    packer = zlib.compressobj(1, wbits=31)
    blocks = [packer.compress(raw_header(b"data_batch_1", b"07777777000\0"))]
    blocks += [packer.compress(bytes(1 << 20)) for _ in range(300)]
    return write_file(place, b"".join([*blocks, packer.flush()])).parent


@refused("data", "decompresses to far more|none of CIFAR")
def cifar_bomb_in_what_is_passed_over(folder: Path) -> Path:
    place = folder / "cifar" / "cifar-10-python.tar.gz"
    packer = zlib.compressobj(1, wbits=31)
    blocks = [packer.compress(raw_header(b"readme.html", b"77777777000\0"))]
    blocks += [packer.compress(bytes(1 << 20)) for _ in range(2000)]
    return write_file(place, b"".join([*blocks, packer.flush()])).parent


@refused("data", "none of CIFAR")
def cifar_of_links(folder: Path) -> Path:
    place = folder / "cifar" / "cifar-10-python.tar.gz"
    place.parent.mkdir()
    with tarfile.open(place, "w:gz") as tar:
        tar.addfile(member("../../data_batch_1", kind=tarfile.SYMTYPE, link="/etc/passwd"))
    return place.parent


@refused("data", "is damaged")
def cifar_of_half_a_row(folder: Path) -> Path:
    return write_file(folder / "cifar" / "data_batch_1.bin", bytes(3073 + 100)).parent


# --- tables


def parquet(folder: Path, columns: Mapping[str, object], *, metadata: bytes | None = None) -> Path:
    table = pyarrow.table(dict(columns))
    if metadata is not None:
        table = table.replace_schema_metadata({b"huggingface": metadata})
    place = folder / "table" / "train-0.parquet"
    place.parent.mkdir()
    pyarrow.parquet.write_table(table, place)
    return place.parent


@refused("data", "not a parquet file")
def table_of_noise(folder: Path) -> Path:
    return write_file(
        folder / "table" / "train-0.parquet", b"PAR1" + bytes(range(256)) + b"\xff\xff\xff\x7fPAR1"
    ).parent


@refused("data", "more rows than bytes")
def table_of_millions_of_equal_rows(folder: Path) -> Path:
    count = 5_000_000
    image = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(count, np.int32)), pyarrow.array([png()]))
    return parquet(folder, {"image": image, "label": pyarrow.array(np.zeros(count, np.int64))})


@refused("data", "column of images|no images|expected bytes|expected")
def table_whose_images_are_numbers(folder: Path) -> Path:
    return parquet(folder, {"image": [1, 2], "label": [0, 1]})


@refused("data", "column of images|no images|expected bytes|expected")
def table_whose_images_have_no_bytes(folder: Path) -> Path:
    return parquet(folder, {"image": [{"path": "/etc/passwd"}, {"path": "../x"}], "label": [0, 1]})


@refused("data", "label out of range")
def table_of_a_billion_classes(folder: Path) -> Path:
    return parquet(folder, {"image": [png(0), png(1)], "label": [0, 10**9]})


@refused("data", "too long for a label")
def table_with_a_label_of_megabytes(folder: Path) -> Path:
    return parquet(folder, {"image": [png(0), png(1)], "label": ["a", "x" * (4 << 20)]})


@refused("data", "label out of range")
def table_with_a_description_of_brackets(folder: Path) -> Path:
    return parquet(folder, {"image": [png(0), png(1)], "label": [0, 10**9]}, metadata=b"[" * 100_000)


@refused("data", "is damaged|not a MATLAB|more than 64 MB")
def flowers_bomb(folder: Path) -> Path:
    place = folder / "flowers"
    write_file(place / "jpg" / "image_00001.jpg", png(1))
    packed = zlib.compress(bytes(100 << 20), 1)
    head = b"MATLAB 5.0".ljust(124) + b"\0\x01IM"
    write_file(place / "setid.mat", head)
    return write_file(place / "imagelabels.mat", head + struct.pack("<II", 15, len(packed)) + packed).parent


# --- configurations


def toml(folder: Path, text: str | bytes) -> Path:
    return write_file(folder / "run.toml", text)


@refused("toml", "nested too deep")
def toml_of_brackets(folder: Path) -> Path:
    return toml(folder, "steps = " + "[" * 50_000)


@refused("toml", "nested too deep")
def toml_of_tables_in_tables(folder: Path) -> Path:
    return toml(folder, "a = " + "{a = " * 10_000)


@refused("toml", "too many bytes")
def toml_of_megabytes(folder: Path) -> Path:
    return toml(folder, 'name = "' + "x" * (8 << 20) + '"')


@refused("toml", "too many bytes|not a known key|nested too deep")
def toml_of_dots(folder: Path) -> Path:
    return toml(folder, ".".join(["a"] * 200_000) + " = 1")


@refused("toml", "its own base")
def toml_that_is_its_own_base(folder: Path) -> Path:
    return toml(folder, 'base = "run.toml"')


@refused("toml", "not a file")
def toml_without_an_end(folder: Path) -> Path:
    (folder / "endless.toml").symlink_to("/dev/zero")
    return toml(folder, 'base = "endless.toml"')


@refused("toml", "not a file")
def toml_that_is_a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.toml")
    return folder / "pipe.toml"


@refused("toml", "not a TOML file")
def toml_with_an_endless_number(folder: Path) -> Path:
    return toml(folder, "steps = " + "9" * 10_000)


@refused("toml", "larger than any|too large|at most")
def toml_of_a_model_a_billion_wide(folder: Path) -> Path:
    return toml(folder, 'base = "folder"\n[model]\nsettings = ["width=1000000000", "heads=1"]\n')


@refused("toml", "larger than any|too large|at most")
def toml_of_a_model_a_billion_deep(folder: Path) -> Path:
    return toml(folder, 'base = "folder"\n[model]\nsettings = ["depth=1000000000"]\n')


@refused("toml", "larger than any|too large|at most")
def toml_of_images_a_billion_wide(folder: Path) -> Path:
    return toml(folder, 'base = "folder"\n[model]\nimage_size = 1000000000\n')


# --- models, as every command that takes one is given them


def own(folder: Path, labels: Sequence[str] = ("cat", "dog")) -> Path:
    """Create a small valid artifact."""
    sizes = {"depth": 1, "width": 16, "heads": 1, "mlp_dim": 16}
    model = vitkit.create("B/16", image_size=32, num_classes=len(labels), settings=sizes)
    vitkit.save(model, folder / "own", labels=list(labels))
    return folder / "own"


@refused("model", "refers to|is not a whole model")
def model_that_is_a_pickle(folder: Path) -> Path:
    torch.save({"model": Runs()}, folder / "model.pt")
    return folder / "model.pt"


@refused("model", "is not a weight file|ONNX")
def model_of_onnx(folder: Path) -> Path:
    return write_file(folder / "model.onnx", b"\x08\x07\x12\x04test:\x10" + bytes(64))


@refused("model", "is not a weight file|ONNX")
def model_of_onnx_with_its_numbers_elsewhere(folder: Path) -> Path:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../../../etc/passwd")
    graph = helper.make_graph([], "g", [], [], [tensor])
    return write_file(folder / "model.onnx", helper.make_model(graph).SerializeToString())


@refused("model", "damaged|checksum")
def run_whose_checksums_lie(folder: Path) -> Path:
    place = own(folder)
    sums = json.loads((place / "checksums.json").read_bytes())
    write_file(place / "checksums.json", json.dumps(dict.fromkeys(sums, "0" * 64)))
    return place


@refused("model", "damaged")
def run_with_a_link_to_a_secret(folder: Path) -> Path:
    place = own(folder)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to("/etc/passwd")
    return place


@refused("model", "is nested too deep|damaged")
def run_with_a_config_of_brackets(folder: Path) -> Path:
    write_file(own(folder) / "config.json", '{"vitkit":' + "[" * 100_000)
    return folder / "own"


@refused("model", "damaged|pipe|not a file|missing or unreadable")
def run_with_a_link_to_the_endless(folder: Path) -> Path:
    place = own(folder)
    (place / "labels.json").unlink()
    (place / "labels.json").symlink_to("/dev/zero")
    return place


@refused("model", "no such file|cannot be opened|there is nothing|no model|in a circle|neither")
def run_in_a_circle_of_links(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"
