"""Pets, Flowers-102 and ImageNet as published, with lists that do not fit; and how kinds are told apart."""

from pathlib import Path

import numpy as np
import pytest
from data.layouts import CLASSES, class_folders, flowers, imagenet_folders, imagenet_tars, npz, pets, write
from scipy.io import savemat

from vitkit.core.errors import DataError, UnknownNameError
from vitkit.data.fractals import FractalConfig
from vitkit.data.sources.detect import detect, open_data

SYNSETS = "imagenet_2012_validation_synset_labels.txt"


def test_pets_are_ordered_by_class_id_and_split_by_the_lists(tmp_path: Path) -> None:
    for name in ("Bengal_1", "Bengal_2", "american_bulldog_1", "american_bulldog_10"):
        write(tmp_path / "images" / f"{name}.jpg", name)
    write(
        tmp_path / "annotations" / "trainval.txt", "american_bulldog_10 1 2 1\nBengal_1 2 1 1\namerican_bulldog_1 1 2 1"
    )
    write(tmp_path / "annotations" / "test.txt", "Bengal_2 2 1 1\n")
    data = open_data(tmp_path)
    assert data.kind == "Oxford-IIIT Pets"
    assert data.classes == ("american_bulldog", "Bengal")
    assert {split: source.labels.tolist() for split, source in data.splits.items()} == {"train": [1, 0, 0], "test": [1]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n00000001_99 1 1 1", "lacks images/n00000001_99.jpg"),
        ("n00000001_0 2 1 1", "CLASS-ID 2 is two breeds"),
        ("n00000001_0 x", "expected name, CLASS-ID"),
        ("other_1 9 1 1", "gaps in its CLASS-IDs"),
        ("../../n00000001_0 1 1 1", "not a relative path"),
    ],
)
def test_a_line_of_pets_that_does_not_fit_is_named(tmp_path: Path, line: str, message: str) -> None:
    with (pets(tmp_path) / "annotations" / "test.txt").open("a") as file:
        file.write(f"\n{line}")
    with pytest.raises(DataError, match=message):
        open_data(tmp_path)


def test_flowers_have_their_standard_splits(tmp_path: Path) -> None:
    data = open_data(flowers(tmp_path))
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 8, "val": 8, "test": 8}
    assert data.classes == ("1", "2", "3")
    assert data.splits["val"].name(0) == "jpg/image_00009.jpg"
    write(tmp_path / "classes.txt", "rose\ntulip\nlily")
    assert open_data(tmp_path).classes == ("rose", "tulip", "lily")


def test_flowers_with_a_part_missing_or_damaged_say_which(tmp_path: Path) -> None:
    place = flowers(tmp_path)
    (place / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(DataError, match=r"lacks jpg/image_00003\.jpg"):
        open_data(place)
    savemat(place / "setid.mat", {"trnid": np.array([1, 2, 99]), "valid": np.array([4]), "tstid": np.array([5])})
    with pytest.raises(DataError, match="trnid"):
        open_data(place)
    (place / "setid.mat").unlink()
    with pytest.raises(DataError, match=r"no .*setid\.mat"):
        open_data(place)
    write(place / "imagelabels.mat", b"noise")
    with pytest.raises(DataError, match="not a MATLAB 5 file"):
        open_data(place)


def test_imagenet_gives_the_same_names_and_labels_from_tars_and_folders(tmp_path: Path) -> None:
    tars, folders = open_data(imagenet_tars(tmp_path / "tars")), open_data(imagenet_folders(tmp_path / "folders"))
    assert (tars.kind, folders.kind) == ("ImageNet tars", "ImageNet folders")
    for split in ("train", "val"):
        one, other = tars.splits[split], folders.splits[split]
        assert [one.name(i) for i in range(12)] == [other.name(i) for i in range(12)]
        assert one.labels.tolist() == other.labels.tolist()
        assert [one.content(i) for i in range(12)] == [other.content(i) for i in range(12)]
    only = open_data(tmp_path / "tars" / "ILSVRC2012_img_train.tar")
    assert list(only.splits) == ["train"]


def test_imagenet_validation_labels_come_from_any_of_the_lists(tmp_path: Path) -> None:
    place = imagenet_tars(tmp_path)
    wanted = open_data(place).splits["val"].labels.tolist()
    (place / SYNSETS).unlink()
    names = [f"ILSVRC2012_val_{i + 1:08d}" for i in range(12)]
    lists = {
        "val.txt": "\n".join(f"{name}.JPEG {label}" for name, label in zip(names, wanted, strict=True)),
        "LOC_val_solution.csv": "ImageId,PredictionString\n"
        + "\n".join(f"{name},{CLASSES[label]} 1 2 3 4" for name, label in zip(names, wanted, strict=True)),
    }
    for name, content in lists.items():
        path = write(place / name, content)
        assert open_data(place).splits["val"].labels.tolist() == wanted
        path.unlink()
    truth = write(place / "ILSVRC2012_validation_ground_truth.txt", "\n".join(str(label + 1) for label in wanted))
    with pytest.raises(DataError, match=r"expected map_clsloc\.txt"):
        open_data(place)
    truth.unlink()
    with pytest.raises(DataError, match="have no labels"):
        open_data(place)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("n00000001", "no line for"),
        ("\n".join(["cat"] * 12), "no synsets"),
        ("\n".join(["n99999999"] * 12), "train lacks"),
    ],
)
def test_an_imagenet_list_that_does_not_fit_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    write(imagenet_tars(tmp_path) / SYNSETS, content)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path)


def test_imagenet_val_in_folders_by_synset_needs_no_list(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            write(tmp_path / split / name / "1.JPEG", name)
    data = open_data(tmp_path)
    assert detect(tmp_path) == "imagenet"
    assert data.splits["val"].labels.tolist() == [0, 1, 2]


def test_a_cut_imagenet_tar_is_named(tmp_path: Path) -> None:
    path = imagenet_tars(tmp_path) / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(DataError, match="ILSVRC2012_img_train"):
        open_data(tmp_path)


def test_a_place_that_can_be_read_in_two_ways_needs_the_kind_to_be_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    npz(tmp_path)
    with pytest.raises(DataError, match="2 ways: npz, folders") as caught:
        open_data(tmp_path)
    assert caught.value.hint is not None
    assert open_data(tmp_path, kind="folders").kind == "class folders"
    assert open_data(tmp_path, kind="npz").kind == ".npz arrays"


def test_unknown_kinds_and_places_come_with_the_nearest_that_is_known(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos")
    with pytest.raises(UnknownNameError, match="webdatset") as unknown:
        open_data(tmp_path, kind="webdatset")
    assert unknown.value.hint == "did you mean webdataset?"
    with pytest.raises(DataError, match="nothing at") as missing:
        open_data(tmp_path / "photo")
    assert missing.value.hint == "did you mean photos?"
    with pytest.raises(DataError, match="comes with vitkit"):
        open_data(tmp_path, kind="digits")
    with pytest.raises(DataError, match="no CIFAR"):
        open_data(write(tmp_path / "x.bin", b""), kind="cifar")
    with pytest.raises(DataError, match=r"ends with \.bin"):
        open_data(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "kind",
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
        "unlabelled",
    ],
)
def test_a_kind_that_is_named_but_not_there_is_a_data_error(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "notes.txt", "")
    with pytest.raises(DataError):
        open_data(tmp_path, kind=kind)


def test_fractals_are_a_place_with_a_configuration_of_their_own() -> None:
    assert len(open_data("fractals", fractals=FractalConfig(classes=3)).classes) == 3
