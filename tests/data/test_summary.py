"""Summaries of datasets, their warnings, and contact sheets."""

import io

import numpy as np
import pytest
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.contact_sheet import write_contact_sheet
from vitkit.data.dataset import Dataset, ImageSource, StoredImage
from vitkit.data.summary import SizeRange, summarize_dataset
from vitkit.data.verify import BadFile


class Records(ImageSource):
    """Images of (name, label, content)."""

    layout = "records"

    def __init__(self, classes: tuple[str, ...], records: list[tuple[str, int, StoredImage]]) -> None:
        self.classes = classes
        self.records = records
        self.labels = np.array([label for _, label, _ in records], dtype=np.int64)

    def name(self, index: int) -> str:
        return self.records[index][0]

    def read(self, index: int) -> StoredImage:
        return self.records[index][2]


def png(seed: int, height: int = 40, width: int = 60, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    colors = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(colors).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def records(*counts: int, seed: int = 0, classes: tuple[str, ...] = ("cat", "dog", "eel")) -> Records:
    """So many images of each class, all different."""
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    return Records(
        classes[: len(counts)],
        [(f"{classes[label]}/{index}.png", label, png(seed + index)) for index, label in enumerate(labels)],
    )


def append_records(first: Records, *more: tuple[str, int, StoredImage]) -> Records:
    return Records(first.classes, [*first.records, *more])


def warnings_of(**splits: ImageSource) -> str:
    return "\n".join(summarize_dataset(Dataset("place", splits)).warnings)


@pytest.mark.parametrize("workers", [0, 2])
def test_summary_counts_images(workers):
    train = append_records(records(6, 8), ("cat/x.png", 0, png(50, 20, 200, "L")), ("dog/y.png", 1, b"<html>"))
    told: list[int] = []
    found = summarize_dataset(
        Dataset("place", {"train": train, "val": records(1, 2, seed=90)}), workers=workers, progress=told.append
    )
    assert (found.path, found.layout, found.classes, found.images) == ("place", "records", ("cat", "dog"), 19)
    assert found.splits == {"train": 16, "val": 3}
    assert found.split_counts == {"train": (7, 9), "val": (1, 2)}
    assert found.counts == {"cat": 8, "dog": 11}
    assert found.unlabeled == 0
    assert found.sizes == (SizeRange(20, 40, 40), SizeRange(60, 60, 200))
    assert found.modes == {"PNG RGB": 17, "PNG L": 1}
    assert found.bad == (
        ("train", BadFile("dog/y.png", "not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file")),
    )
    assert found.duplicates == ()
    assert told == [1] * 19
    assert found.warnings == ("1 of 19 images cannot be used (5.3%)",)


def test_good_dataset_has_no_warnings():
    assert warnings_of(train=records(5, 50), val=records(1, 1, seed=90)) == ""


def test_small_classes_are_named():
    assert "2 classes have fewer than 5 images in train: cat (4), eel (0)" in warnings_of(train=records(4, 5, 0))


def test_imbalanced_classes_are_named():
    assert "imbalanced in all: dog has 51 images, cat has 5" in warnings_of(all=records(5, 51))


def test_class_missing_in_a_split_is_named():
    assert "one class has no images in val: dog" in warnings_of(train=records(5, 5), val=records(2, 0, seed=90))


def test_single_class_is_a_warning():
    assert "only one class" in warnings_of(train=records(9))


def test_empty_dataset_is_a_warning():
    found = summarize_dataset(Dataset("place", {"all": Records(("cat", "dog"), [])}))
    assert (found.images, found.sizes, found.modes) == (0, None, {})
    assert "there are no images" in found.warnings


def test_duplicates_are_classified():
    train = append_records(records(5, 5), ("cat/again.png", 0, png(1)), ("dog/other.png", 1, png(0)))
    found = summarize_dataset(
        Dataset("place", {"train": train, "val": append_records(records(1, 1, seed=90), ("cat/v.png", 0, png(2)))})
    )
    groups = [[f"{member.split}:{member.name}" for member in group.members] for group in found.duplicates]
    assert groups == [
        ["train:cat/0.png", "train:dog/other.png"],
        ["train:cat/1.png", "train:cat/again.png"],
        ["train:cat/2.png", "val:cat/v.png"],
    ]
    assert [(group.across_splits, group.conflicting_labels) for group in found.duplicates] == [
        (False, True),
        (False, False),
        (True, False),
    ]
    text = "\n".join(found.warnings)
    assert "one image is in more than one split, so scores will be too high: train: cat/2.png = val: cat/v.png" in text
    assert "one image is labeled differently: train: cat/0.png = train: dog/other.png" in text
    assert "one image is duplicated" in text


def test_equal_pixels_of_other_shape_are_different():
    flat = np.arange(24, dtype=np.uint8)
    shapes = [flat.reshape(4, 6), flat.reshape(6, 4), flat.reshape(4, 6).copy()]
    found = summarize_dataset(
        Dataset("place", {"all": Records((), [(str(i), -1, array) for i, array in enumerate(shapes)])})
    )
    assert [[member.name for member in group.members] for group in found.duplicates] == [["0", "2"]]
    assert found.unlabeled == 3
    assert found.modes == {"array 1 channel": 3}


def test_bad_files_are_not_duplicates():
    found = summarize_dataset(
        Dataset("place", {"all": append_records(records(5, 5), ("cat/a", 0, b""), ("cat/b", 0, b""))})
    )
    assert found.duplicates == ()
    assert len(found.bad) == 2


def test_much_smaller_images_are_a_warning():
    large = [(f"{seed}", 0, png(seed, 200, 200)) for seed in range(9)]
    assert "one image is very small: down to 8 pixels, where others have 200" in warnings_of(
        all=Records(("a",), [*large, ("s", 0, png(99, 8, 300))])
    )
    assert "small" not in warnings_of(all=Records(("a",), [(f"{seed}", 0, png(seed, 8, 8)) for seed in range(9)]))


# The contact sheet


def sheet_of(dataset: Dataset, path) -> np.ndarray:
    write_contact_sheet(dataset, path)
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        return np.asarray(sheet.convert("RGB"))


def test_contact_sheet_has_a_row_per_class(tmp_path):
    colors = {0: (200, 0, 0), 1: (0, 0, 200)}
    squares = [
        (f"{index}", label, np.full((50, 50, 3), colors[label], dtype=np.uint8))
        for index, label in enumerate([0, 1, 1, 0, 1])
    ]
    dataset = Dataset("somewhere/pets", {"train": Records(("red", "blue"), squares)})
    sheet = sheet_of(dataset, tmp_path / "sheet.png")
    for label, count in ((0, 2), (1, 3)):
        rows, columns = np.nonzero((sheet == colors[label]).all(axis=2))
        assert len(rows) == count * 112 * 112
        assert rows.max() - rows.min() == 111
        assert columns.max() - columns.min() == (count - 1) * 120 + 111


@pytest.mark.parametrize(("classes", "rows"), [(3, 3), (30, 20)])
def test_contact_sheet_height_fits_its_rows(tmp_path, classes, rows):
    names = tuple(f"class {label}" for label in range(classes))
    gray = np.full((8, 8), 100, dtype=np.uint8)
    source = Records(names, [(f"{label}/{index}", label, gray) for label in range(classes) for index in range(10)])
    sheet = sheet_of(Dataset("d", {"all": source}), tmp_path / "sheet.png")
    assert sheet.shape[0] == 28 + 64 + rows * 120 - 8 + 28


def test_contact_sheet_handles_odd_names_and_images(tmp_path):
    names = ("\x1b[31m\n", "空 ü Ж", "a very long name " * 20, "oneverylongword" * 20, "empty", "")
    contents: list[StoredImage] = [b"", png(0, 1, 300), png(1, 300, 1), png(2, mode="1"), b"<html>"]
    source = Records(names, [(f"{label}", label, content) for label, content in enumerate(contents)])
    assert sheet_of(Dataset("/new\nline", {"train": source}), tmp_path / "sheet.png").size
    unlabeled = Records((), [(f"{index}", -1, png(index)) for index in range(11)])
    assert sheet_of(Dataset("tree", {"all": unlabeled}), tmp_path / "sheet.png").shape[0] == 28 + 64 + 260
    assert sheet_of(Dataset("none", {"all": Records((), [])}), tmp_path / "sheet.png").size


def test_contact_sheet_write_error_names_the_file(tmp_path):
    with pytest.raises(DataError, match=r"no/sheet\.png: cannot be written: No such file or directory"):
        write_contact_sheet(Dataset("d", {"all": records(1)}), tmp_path / "no" / "sheet.png")
