"""Small datasets in every layout that vitkit reads."""

import gzip
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat

CLASSES = ("n00000001", "n00000002", "n00000003")
"""Called like ImageNet's, so that one set fits every layout; the names sort as the labels do."""
EACH = 8


@dataclass(frozen=True)
class Sample:
    pixels: NDArray[np.uint8]
    label: int

    @property
    def png(self) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, format="PNG")
        return buffer.getvalue()


def samples() -> list[Sample]:
    """24 different pictures of 32 × 32, of three classes in turn; red = green = blue, because IDX holds only gray."""
    rng = np.random.default_rng(2020)
    gray = rng.integers(0, 256, size=(len(CLASSES) * EACH, 32, 32, 1), dtype=np.uint8)
    return [Sample(np.repeat(gray[i], 3, axis=2), i % len(CLASSES)) for i in range(len(gray))]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tar_bytes(files: dict[str, bytes], *, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def halves() -> dict[str, list[Sample]]:
    return {"train": samples()[:12], "test": samples()[12:]}


def class_folders(place: Path) -> Path:
    for i, sample in enumerate(samples()):
        write(place / CLASSES[sample.label] / f"{i:02d}.png", sample.png)
    return place


def split_folders(place: Path) -> Path:
    for split, of_split in {"training": samples()[:12], "valid": samples()[12:18], "test": samples()[18:]}.items():
        for i, sample in enumerate(of_split):
            write(place / split / CLASSES[sample.label].replace("n", "class ") / f"{i:02d}.png", sample.png)
    return place


def csv_manifest(place: Path) -> Path:
    lines = ["file_name,label"]
    for i, sample in enumerate(samples()):
        write(place / "images" / f"{i:02d}.png", sample.png)
        lines.append(f"images/{i:02d}.png,{CLASSES[sample.label]}")
    write(place / "metadata.csv", "\n".join(lines))
    return place


def jsonl_manifest(place: Path) -> Path:
    lines = []
    for i, sample in enumerate(samples()):
        write(place / f"{i:02d}.png", sample.png)
        split = "train" if i < 12 else "validation"
        lines.append(json.dumps({"file_name": f"{i:02d}.png", "label": CLASSES[sample.label], "split": split}))
    return write(place / "list.jsonl", "\n".join(lines))


def parquet(place: Path) -> Path:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(CLASSES)}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    (place / "data").mkdir(parents=True)
    everything = samples()
    for shard, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        rows = everything[shard * 8 : shard * 8 + 8]
        table = pa.table(
            {
                "image": [{"bytes": row.png, "path": None} for row in rows],
                "label": pa.array([row.label for row in rows], pa.int64()),
            }
        ).replace_schema_metadata(metadata)
        pq.write_table(table, str(place / "data" / f"{name}.parquet"), row_group_size=3)
    return place


def webdataset_cls(place: Path) -> Path:
    for split, of_split in halves().items():
        files = {}
        for i, sample in enumerate(of_split):
            files[f"{i:04d}.png"] = sample.png
            files[f"{i:04d}.cls"] = str(sample.label).encode()
        write(place / f"{split}-000000.tar", tar_bytes(files))
    write(place / "classes.txt", "\n".join(CLASSES))
    return place


def webdataset_json(place: Path) -> Path:
    for shard in range(4):
        files = {}
        for i, sample in enumerate(samples()[shard * 6 : shard * 6 + 6]):
            files[f"a/{i:04d}.json"] = json.dumps({"label": CLASSES[sample.label]}).encode()
            files[f"a/{i:04d}.png"] = sample.png
        write(place / f"data-{shard:06d}.tar", tar_bytes(files))
    return place / "data-{000000..000003}.tar"


def cifar_rows(of_split: list[Sample]) -> NDArray[np.uint8]:
    return np.stack([sample.pixels.transpose(2, 0, 1).reshape(-1) for sample in of_split])


def cifar_python_files() -> dict[str, bytes]:
    files = {
        name: pickle.dumps(
            {b"data": cifar_rows(of_split), b"labels": [sample.label for sample in of_split]}, protocol=2
        )
        for name, of_split in (("data_batch_1", samples()[:12]), ("test_batch", samples()[12:]))
    }
    return {**files, "batches.meta": pickle.dumps({b"label_names": [name.encode() for name in CLASSES]}, protocol=2)}


def cifar_python(place: Path) -> Path:
    for name, content in cifar_python_files().items():
        write(place / "cifar-10-batches-py" / name, content)
    return place


def cifar_python_archive(place: Path) -> Path:
    files = {f"cifar-10-batches-py/{name}": content for name, content in cifar_python_files().items()}
    return write(place / "cifar-10-python.tar.gz", tar_bytes(files, mode="w:gz"))


def cifar_binary(place: Path) -> Path:
    for name, of_split in (("data_batch_1", samples()[:12]), ("test_batch", samples()[12:])):
        labels = np.array([[sample.label] for sample in of_split], dtype=np.uint8)
        write(place / f"{name}.bin", np.concatenate([labels, cifar_rows(of_split)], axis=1).tobytes())
    write(place / "batches.meta.txt", "\n".join(CLASSES) + "\n\n")
    return place


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files() -> dict[str, bytes]:
    files = {}
    for split, of_split in (("train", samples()[:12]), ("t10k", samples()[12:])):
        files[f"{split}-images-idx3-ubyte"] = idx_bytes(np.stack([sample.pixels[:, :, 0] for sample in of_split]))
        files[f"{split}-labels-idx1-ubyte"] = idx_bytes(np.array([sample.label for sample in of_split], np.uint8))
    return files


def idx(place: Path) -> Path:
    for name, content in idx_files().items():
        write(place / name, content)
    return place


def idx_gzip(place: Path) -> Path:
    for name, content in idx_files().items():
        write(place / f"{name}.gz", gzip.compress(content))
    return place


def npz(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, of_split in halves().items():
        arrays[f"x_{split}"] = np.stack([sample.pixels for sample in of_split])
        arrays[f"y_{split}"] = np.array([sample.label for sample in of_split])
    np.savez_compressed(place / "set.npz", classes=np.array(CLASSES), **arrays)
    return place / "set.npz"


def pets(place: Path) -> Path:
    lists: dict[str, list[str]] = {"trainval": ["# name CLASS-ID species breed"], "test": []}
    for i, sample in enumerate(samples()):
        name = f"{CLASSES[sample.label]}_{i}"
        write(place / "images" / f"{name}.jpg", sample.png)  # PNG content: the set must stay the same to the bit
        lists["trainval" if i < 12 else "test"].append(f"{name} {sample.label + 1} 1 1")
    for name, lines in lists.items():
        write(place / "annotations" / f"{name}.txt", "\n".join(lines))
    return place


def flowers(place: Path) -> Path:
    for i, sample in enumerate(samples(), start=1):
        write(place / "jpg" / f"image_{i:05d}.jpg", sample.png)
    numbers = np.arange(1, 25, dtype=np.uint16)
    savemat(place / "imagelabels.mat", {"labels": np.array([sample.label + 1 for sample in samples()], np.uint8)})
    splits = {"trnid": numbers[:8].astype(np.float64), "valid": numbers[8:16], "tstid": numbers[16:]}
    savemat(place / "setid.mat", splits, do_compression=True)
    return place


def imagenet_tars(place: Path) -> Path:
    inner: dict[str, dict[str, bytes]] = {name: {} for name in CLASSES}
    val, synsets = {}, []
    for i, sample in enumerate(samples()):
        name = CLASSES[sample.label]
        if i < 12:
            inner[name][f"{name}_{i}.JPEG"] = sample.png
        else:
            synsets.append(name)
            val[f"ILSVRC2012_val_{len(synsets):08d}.JPEG"] = sample.png
    write(place / "ILSVRC2012_img_train.tar", tar_bytes({f"{n}.tar": tar_bytes(files) for n, files in inner.items()}))
    write(place / "ILSVRC2012_img_val.tar", tar_bytes(val))
    write(place / "imagenet_2012_validation_synset_labels.txt", "\n".join(synsets))
    return place


def imagenet_folders(place: Path) -> Path:
    numbers = []
    for i, sample in enumerate(samples()):
        name = CLASSES[sample.label]
        if i < 12:
            write(place / "train" / name / f"{name}_{i}.JPEG", sample.png)
        else:
            numbers.append(str(3 - sample.label))
            write(place / "val" / f"ILSVRC2012_val_{len(numbers):08d}.JPEG", sample.png)
    kit = place / "ILSVRC2012_devkit_t12" / "data"
    write(kit / "ILSVRC2012_validation_ground_truth.txt", "\n".join(numbers))
    write(kit / "map_clsloc.txt", "\n".join(f"{name} {3 - label} thing" for label, name in enumerate(CLASSES)))
    return place


def tiny_imagenet(place: Path) -> Path:
    lines = []
    for i, sample in enumerate(samples()):
        name = CLASSES[sample.label]
        if i < 12:
            write(place / "train" / name / "images" / f"{name}_{i}.JPEG", sample.png)
        else:
            lines.append(f"val_{i}.JPEG\t{name}\t0\t32\t44\t62")
            write(place / "val" / "images" / f"val_{i}.JPEG", sample.png)
    for name in CLASSES:
        write(place / "train" / name / f"{name}_boxes.txt", "x 0 0 1 1")
    write(place / "val" / "val_annotations.txt", "\n".join(lines))
    write(place / "test" / "images" / "test_0.JPEG", samples()[0].png)
    return place


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "class folders": (class_folders, "folders"),
    "Tiny-ImageNet": (tiny_imagenet, "tiny-imagenet"),
    "split folders": (split_folders, "folders"),
    "CSV manifest": (csv_manifest, "manifest"),
    "JSONL manifest": (jsonl_manifest, "manifest"),
    "parquet": (parquet, "parquet"),
    "WebDataset, cls": (webdataset_cls, "webdataset"),
    "WebDataset, json, braces": (webdataset_json, "webdataset"),
    "CIFAR python": (cifar_python, "cifar"),
    "CIFAR python archive": (cifar_python_archive, "cifar"),
    "CIFAR binary": (cifar_binary, "cifar"),
    "IDX": (idx, "idx"),
    "IDX gzip": (idx_gzip, "idx"),
    "npz": (npz, "npz"),
    "Pets": (pets, "pets"),
    "Flowers": (flowers, "flowers"),
    "ImageNet tars": (imagenet_tars, "imagenet"),
    "ImageNet folders": (imagenet_folders, "imagenet"),
}
"""Each layout: what writes it and returns the place to open, and the layout it must be seen to be."""
