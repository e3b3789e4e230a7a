"""Registry of dataset layouts. A layout is a module with a detection and an open function, and an entry here."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from vitkit.core.errors import DataError, UnknownNameError, did_you_mean
from vitkit.data.config import FractalConfig
from vitkit.data.dataset import Dataset
from vitkit.data.decode import refuse_url
from vitkit.data.fractals import make_fractals
from vitkit.data.layouts.arrays import find_idx_files, find_npz_files, open_digits, open_idx, open_npz
from vitkit.data.layouts.cifar import find_cifar, open_cifar
from vitkit.data.layouts.files import count_suffixes, find_shards, is_image, is_pattern, walk_files
from vitkit.data.layouts.folders import has_class_folders, has_images, open_folders, open_unlabeled
from vitkit.data.layouts.manifests import find_manifests, has_vtab, open_manifest, open_vtab
from vitkit.data.layouts.pairs import Pairs, open_pairs
from vitkit.data.layouts.published import has_flowers, has_imagenet, has_pets, open_flowers, open_imagenet, open_pets
from vitkit.data.layouts.shards import open_parquet, open_webdataset
from vitkit.data.layouts.tiny_imagenet import has_tiny_imagenet, open_tiny_imagenet


@dataclass(frozen=True)
class Layout:
    """A layout of datasets.

    Args:
        example: Files by which users recognize it, for messages.
        detect: Return what a path has of this layout; nothing, or False, if it has another one.
        open: Open the dataset at a path.
        is_fallback: Used only if no other layout matches; of several, the first in the registry.
        is_one_file: Detected by a single file, which may be a stray one next to class folders.
    """

    example: str
    detect: Callable[[Path], object]
    open: Callable[[Path], Dataset]
    is_fallback: bool = False
    is_one_file: bool = False


def open_val_as_test(path: Path) -> Dataset:
    """Open a dataset with train and val, and use val as the test split, as papers do with ImageNet.

    Nothing is then selected on it or trained on it.
    """
    dataset = open_layout(path, LAYOUTS[detect_layout(path)])
    if "test" in dataset.splits or "val" not in dataset.splits:
        raise DataError(f"{path} has no val split to test on", expected="train and val", got=", ".join(dataset.splits))
    splits = {"train" if split == "train" else "test": source for split, source in dataset.splits.items()}
    return replace(dataset, splits=splits)


LAYOUTS: dict[str, Layout] = {
    "imagenet": Layout(
        "ILSVRC2012_img_train.tar or train/n01440764/",
        lambda path: has_imagenet(path) and not has_tiny_imagenet(path),
        open_imagenet,
    ),
    "tiny-imagenet": Layout("val/val_annotations.txt and words.txt", has_tiny_imagenet, open_tiny_imagenet),
    "pets": Layout("images/ and annotations/trainval.txt", has_pets, open_pets),
    "flowers": Layout("jpg/ and imagelabels.mat", has_flowers, open_flowers),
    "vtab": Layout("train800.txt, val200.txt and test.txt", has_vtab, open_vtab),
    "cifar": Layout("data_batch_1[.bin] or cifar-10-python.tar.gz", find_cifar, open_cifar),
    "idx": Layout("train-images-idx3-ubyte[.gz]", find_idx_files, open_idx),
    "manifest": Layout("metadata.csv, labels.csv or .jsonl with file_name, label", find_manifests, open_manifest),
    "parquet": Layout(
        "train-00000-of-00001.parquet", partial(find_shards, suffix=".parquet"), open_parquet, is_one_file=True
    ),
    "webdataset": Layout("train-000000.tar", partial(find_shards, suffix=".tar"), open_webdataset, is_one_file=True),
    "npz": Layout("an .npz file", find_npz_files, open_npz, is_one_file=True),
    "folders": Layout("CLASS/IMAGE or train/CLASS/IMAGE", has_class_folders, open_folders, is_fallback=True),
    "unlabeled": Layout("images in no folder", has_images, open_unlabeled, is_fallback=True),
    "val-as-test": Layout("train and val, where val is for testing", lambda _: False, open_val_as_test),
}
EMBEDDED = ("digits", "fractals")


def open_dataset(
    data: str | os.PathLike[str] | Pairs | Mapping[str, Pairs],
    *,
    layout: str | None = None,
    fractals: FractalConfig | None = None,
) -> Dataset:
    """Open "digits", "fractals", a directory, a file, a pattern such as data-{0000..0009}.tar, or pairs in memory.

    >>> dataset = open_dataset("digits")
    >>> dataset.layout, len(dataset.classes), len(dataset.splits["train"])
    ('digits, embedded', 10, 1438)
    >>> open_dataset("digits", layout="folder")
    Traceback (most recent call last):
    vitkit.core.errors.UnknownNameError: there is no layout called folder
    hint: did you mean folders?
    """
    names = (*LAYOUTS, *EMBEDDED)
    if layout is not None and layout not in names:
        hint = did_you_mean(layout, names) or f"one of {', '.join(names)}"
        raise UnknownNameError(f"there is no layout called {layout}", hint=hint)
    if not isinstance(data, str | os.PathLike):
        if layout is not None:
            raise DataError("pairs of image and label have no other layout", got=layout, hint="leave the layout out")
        return open_pairs(data)
    if str(data) in EMBEDDED and layout in (None, str(data)):
        return open_digits() if str(data) == "digits" else make_fractals(fractals or FractalConfig())
    if layout in EMBEDDED:
        raise DataError(f"{layout} is part of vitkit and has no path", expected=layout, got=data)
    refuse_url(data)
    path = Path(os.path.expanduser(data))  # noqa: PTH111 - Path.expanduser would make "./digits" "digits"
    if not path.exists() and not is_pattern(path):
        parent = path.absolute().parent
        siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        if any(character in path.name for character in "*?"):
            hint = f'name the directory, or list the files: glob.glob("{path}")'
            raise DataError(f"{path} is a pattern, not a path", hint=hint)
        usage = "give a folder of images, or digits or fractals, which are part of vitkit"
        raise DataError(f"{path} does not exist", hint=did_you_mean(path.name, [*siblings, *EMBEDDED]) or usage)
    return open_layout(path, LAYOUTS[layout or detect_layout(path)])


def open_layout(path: Path, layout: Layout) -> Dataset:
    """Open the dataset at a path. Image files next to archives of images are left out."""
    dataset = layout.open(path)
    if not layout.is_one_file or not path.is_dir():
        return dataset
    return replace(dataset, left_out=(*dataset.left_out, *sorted(filter(is_image, walk_files(path)))))


def find_layouts(path: Path) -> list[str]:
    """Return the names of the layouts at a path, other than plain folders of images."""
    return [name for name, layout in LAYOUTS.items() if not layout.is_fallback and layout.detect(path)]


def detect_layout(path: Path) -> str:
    """Return the name of the layout at a path. Published layouts come before plain folders of images."""
    matches = find_layouts(path)
    if matches and LAYOUTS[matches[0]].is_one_file and has_class_folders(path):
        matches.append("folders")
    if len(matches) > 1:
        got = "; ".join(f"{name}: {LAYOUTS[name].example}" for name in matches)
        hint = f"set the layout, for example {matches[0]}, or give the path of the file or folder itself"
        raise DataError(f"{path} matches {len(matches)} layouts: {', '.join(matches)}", got=got, hint=hint)
    if matches:
        return matches[0]
    for name, layout in LAYOUTS.items():
        if layout.is_fallback and layout.detect(path):
            return name
    message = f"{path} has no layout that vitkit knows"
    expected = "CLASS/IMAGE, train/CLASS/IMAGE, a manifest, shards or a published dataset"
    raise DataError(message, expected=expected, got=describe_contents(path), hint="use one directory per class")


def describe_contents(path: Path) -> str:
    """Summarize the files at a path."""
    if not path.is_dir():
        return f"a file that ends with {path.suffix}" if path.suffix else "a file"
    suffixes = count_suffixes(name for name in islice(walk_files(path), 100_000) if not name.endswith("/"))
    if not suffixes:
        return "an empty directory"
    return "files: " + ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
