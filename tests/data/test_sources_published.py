"""Pets, Flowers-102 and ImageNet as published, and the detection of layouts."""

from pathlib import Path

import numpy as np
import pytest
from data.layouts import (
    CLASSES,
    class_folders,
    flowers,
    imagenet_folders,
    imagenet_tars,
    npz,
    pets,
    tiny_imagenet,
    write,
)
from scipy.io import savemat

from vitkit.core.errors import DataError, UnknownNameError
from vitkit.data.config import FractalConfig
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.layouts.registry import LAYOUTS, Layout, detect_layout, open_dataset

SYNSETS = "imagenet_2012_validation_synset_labels.txt"


def test_pets_are_sorted_by_class_id(tmp_path: Path) -> None:
    for name in ("Bengal_1", "Bengal_2", "american_bulldog_1", "american_bulldog_10"):
        write(tmp_path / "images" / f"{name}.jpg", name)
    write(
        tmp_path / "annotations" / "trainval.txt", "american_bulldog_10 1 2 1\nBengal_1 2 1 1\namerican_bulldog_1 1 2 1"
    )
    write(tmp_path / "annotations" / "test.txt", "Bengal_2 2 1 1\n")
    data = open_dataset(tmp_path)
    assert data.layout == "Oxford-IIIT Pets"
    assert data.classes == ("american_bulldog", "Bengal")
    assert {split: source.labels.tolist() for split, source in data.splits.items()} == {"train": [1, 0, 0], "test": [1]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n00000001_99 1 1 1", "lacks images/n00000001_99.jpg"),
        ("n00000001_0 2 1 1", "CLASS-ID 2 has two breeds"),
        ("n00000001_0 x", "expected name, CLASS-ID"),
        ("other_1 9 1 1", "gaps in its CLASS-IDs"),
        ("../../n00000001_0 1 1 1", "not a relative path"),
    ],
)
def test_invalid_pets_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with (pets(tmp_path) / "annotations" / "test.txt").open("a") as file:
        file.write(f"\n{line}")
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_flowers_have_their_standard_splits(tmp_path: Path) -> None:
    data = open_dataset(flowers(tmp_path))
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 8, "val": 8, "test": 8}
    assert data.classes == ("1", "2", "3")
    assert data.splits["val"].name(0) == "jpg/image_00009.jpg"
    write(tmp_path / "classes.txt", "rose\ntulip\nlily")
    assert open_dataset(tmp_path).classes == ("rose", "tulip", "lily")


def test_incomplete_flowers_are_rejected(tmp_path: Path) -> None:
    place = flowers(tmp_path)
    (place / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(DataError, match=r"lacks jpg/image_00003\.jpg"):
        open_dataset(place)
    savemat(place / "setid.mat", {"trnid": np.array([1, 2, 99]), "valid": np.array([4]), "tstid": np.array([5])})
    with pytest.raises(DataError, match="trnid"):
        open_dataset(place)
    (place / "setid.mat").unlink()
    with pytest.raises(DataError, match=r"setid\.mat does not exist"):
        open_dataset(place)
    write(place / "imagelabels.mat", b"noise")
    with pytest.raises(DataError, match="not a MATLAB 5 file"):
        open_dataset(place)


def test_imagenet_tars_equal_folders(tmp_path: Path) -> None:
    tars, folders = open_dataset(imagenet_tars(tmp_path / "tars")), open_dataset(imagenet_folders(tmp_path / "folders"))
    assert (tars.layout, folders.layout) == ("ImageNet tars", "ImageNet folders")
    for split in ("train", "val"):
        one, other = tars.splits[split], folders.splits[split]
        assert [one.name(i) for i in range(12)] == [other.name(i) for i in range(12)]
        assert one.labels.tolist() == other.labels.tolist()
        assert [one.read(i) for i in range(12)] == [other.read(i) for i in range(12)]
    only = open_dataset(tmp_path / "tars" / "ILSVRC2012_img_train.tar")
    assert list(only.splits) == ["train"]


def test_imagenet_val_labels_of_each_list_are_read(tmp_path: Path) -> None:
    place = imagenet_tars(tmp_path)
    wanted = open_dataset(place).splits["val"].labels.tolist()
    (place / SYNSETS).unlink()
    names = [f"ILSVRC2012_val_{i + 1:08d}" for i in range(12)]
    lists = {
        "val.txt": "\n".join(f"{name}.JPEG {label}" for name, label in zip(names, wanted, strict=True)),
        "LOC_val_solution.csv": "ImageId,PredictionString\n"
        + "\n".join(f"{name},{CLASSES[label]} 1 2 3 4" for name, label in zip(names, wanted, strict=True)),
    }
    for name, content in lists.items():
        path = write(place / name, content)
        assert open_dataset(place).splits["val"].labels.tolist() == wanted
        path.unlink()
    truth = write(place / "ILSVRC2012_validation_ground_truth.txt", "\n".join(str(label + 1) for label in wanted))
    with pytest.raises(DataError, match=r"expected map_clsloc\.txt"):
        open_dataset(place)
    truth.unlink()
    with pytest.raises(DataError, match="have no labels"):
        open_dataset(place)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("n00000001", "no line for"),
        ("\n".join(["cat"] * 12), "not synsets"),
        ("\n".join(["n99999999"] * 12), "train lacks"),
    ],
)
def test_invalid_imagenet_list_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    write(imagenet_tars(tmp_path) / SYNSETS, content)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_imagenet_val_folders_need_no_list(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            write(tmp_path / split / name / "1.JPEG", name)
    write(tmp_path / "test" / "ILSVRC2012_test_00000001.JPEG", "without a label")
    write(tmp_path / "train" / CLASSES[0] / "1.svg", "<svg/>")
    write(tmp_path / "train" / "loose.JPEG", "in no class")
    (tmp_path / "val" / "n09999999").mkdir()
    data = open_dataset(tmp_path)
    assert sorted(data.left_out) == [
        "test/ILSVRC2012_test_00000001.JPEG",
        "train/loose.JPEG",
        f"train/{CLASSES[0]}/1.svg",
        "val/n09999999/",
    ]
    assert detect_layout(tmp_path) == "imagenet"
    assert data.splits["val"].labels.tolist() == [0, 1, 2]


def test_truncated_imagenet_tar_is_named(tmp_path: Path) -> None:
    path = imagenet_tars(tmp_path) / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(DataError, match="ILSVRC2012_img_train"):
        open_dataset(tmp_path)


def test_ambiguous_layout_must_be_set(tmp_path: Path) -> None:
    class_folders(tmp_path)
    npz(tmp_path)
    with pytest.raises(DataError, match="2 layouts: npz, folders") as caught:
        open_dataset(tmp_path)
    assert caught.value.hint is not None
    assert open_dataset(tmp_path, layout="folders").layout == "class folders"
    assert open_dataset(tmp_path, layout="npz").layout == ".npz arrays"


def test_unknown_layout_suggests_the_nearest(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos")
    with pytest.raises(UnknownNameError, match="webdatset") as unknown:
        open_dataset(tmp_path, layout="webdatset")
    assert unknown.value.hint == "did you mean webdataset?"
    with pytest.raises(DataError, match="does not exist") as missing:
        open_dataset(tmp_path / "photo")
    assert missing.value.hint == "did you mean photos?"
    with pytest.raises(DataError, match="is part of vitkit"):
        open_dataset(tmp_path, layout="digits")
    with pytest.raises(DataError, match="no CIFAR"):
        open_dataset(write(tmp_path / "x.bin", b""), layout="cifar")
    with pytest.raises(DataError, match=r"ends with \.bin"):
        open_dataset(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "layout",
    [
        "imagenet",
        "pets",
        "flowers",
        "cifar",
        "idx",
        "manifest",
        "parquet",
        "webdataset",
        "npz",
        "folders",
        "unlabeled",
    ],
)
def test_layout_that_does_not_match_is_an_error(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "notes.txt", "")
    with pytest.raises(DataError):
        open_dataset(tmp_path, layout=layout)


def test_fractals_are_configurable() -> None:
    assert len(open_dataset("fractals", fractals=FractalConfig(num_classes=3)).classes) == 3


def test_layout_is_added_through_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(
        example="a file called my.layout",
        detect=lambda path: (path / "my.layout").is_file(),
        open=lambda path: Dataset(str(path), open_digits().splits),
    )
    monkeypatch.setitem(LAYOUTS, "mine", layout)
    (tmp_path / "my.layout").touch()
    assert open_dataset(tmp_path).layout == "digits, embedded"
    assert len(open_dataset(tmp_path, layout="mine").classes) == 10


def test_tiny_imagenet_has_the_names_of_words_txt(tmp_path: Path) -> None:
    words = dict.fromkeys(CLASSES[:2], "crane, a crane") | {CLASSES[2]: "goldfish, Carassius auratus"}
    tiny_imagenet(tmp_path)
    write(tmp_path / "train" / "other" / "1.JPEG", "in no class")
    write(tmp_path / "train" / CLASSES[0] / "1.svg", "<svg/>")
    write(tmp_path / "words.txt", "".join(f"{synset}\t{name}\n" for synset, name in words.items()))
    data = open_dataset(tmp_path)
    assert data.layout == "Tiny-ImageNet"
    assert data.classes == (f"crane ({CLASSES[0]})", f"crane ({CLASSES[1]})", "goldfish")
    assert list(data.splits) == ["train", "val"]
    assert data.left_out == ("test/images/test_0.JPEG", f"train/{CLASSES[0]}/1.svg", "train/other/1.JPEG")
    (tmp_path / "val/images/new.JPEG").write_bytes(b"")
    with pytest.raises(DataError, match=r"val_annotations.txt has no line for val/images/new.JPEG"):
        open_dataset(tmp_path)


def test_tiny_imagenet_with_missing_images_is_refused(tmp_path: Path) -> None:
    tiny_imagenet(tmp_path)
    annotations = tmp_path / "val/val_annotations.txt"
    annotations.write_text(annotations.read_text() + f"\nval_99.JPEG\t{CLASSES[0]}\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"validation images are missing: val_99.JPEG.*\n.*download"):
        open_dataset(tmp_path)
