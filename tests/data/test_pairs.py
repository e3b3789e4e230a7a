"""Datasets of pairs in memory: names, classes, fingerprints, and errors that name the pair."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.dataset import StoredImage
from vitkit.data.decode import decode
from vitkit.data.fingerprint import fingerprint_contents
from vitkit.data.layouts.base import check_several_classes
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import verify_images

BLACK, WHITE = np.zeros((6, 8), dtype=np.uint8), np.full((6, 8), 255, dtype=np.uint8)
PAIRS = [(BLACK, "night"), (WHITE, "day"), (BLACK + 9, "night")]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_pairs_have_sorted_classes_and_numbered_names() -> None:
    source = open_dataset(PAIRS).splits["all"]
    assert (source.classes, source.labels.tolist()) == (("day", "night"), [1, 0, 1])
    assert [source.name(index) for index in range(3)] == ["image-00001", "image-00002", "image-00003"]
    assert source.layout == "pairs in memory"
    assert np.array_equal(source.read(1), WHITE)


def test_mapping_has_splits_that_share_classes() -> None:
    dataset = open_dataset({"train": PAIRS, "validation": [(WHITE, "day")]})
    assert {split: len(source) for split, source in dataset.splits.items()} == {"train": 3, "val": 1}
    assert dataset.splits["val"].classes == ("day", "night")
    assert dataset.splits["val"].name(0) == "val/image-00001"  # unlike the first image of train


def test_every_form_of_an_image_decodes_to_the_same_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "image.png")
    forms = [pixels, image, image.convert("RGBA"), png(image), torch.from_numpy(pixels).permute(2, 0, 1)]
    forms += [tmp_path / "image.png", str(tmp_path / "image.png")]
    source = open_dataset([(form, label) for form in forms for label in ("a", "b")]).splits["all"]
    assert not verify_images(source).bad
    for index in range(len(source)):
        decoded: StoredImage = np.asarray(decode(source.read(index)))
        assert np.array_equal(decoded, pixels), source.name(index)


def test_files_are_named_as_class_folders_name_them(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(WHITE).save(tmp_path / name)
    files = sorted(tmp_path.rglob("*.png"))
    pairs, folders = open_dataset([(file, file.parent.name) for file in files]), open_dataset(tmp_path)
    names = [[source.name(index) for index in range(3)] for source in (pairs.splits["all"], folders.splits["all"])]
    assert names[0] == names[1] == ["cat/1.png", "cat/2.png", "dog/1.png"]
    assert pairs.classes == folders.classes
    again = open_dataset([(files[0], "cat"), (files[0], "cat"), (files[2], "dog")]).splits["all"]
    assert [again.name(index) for index in range(3)] == ["cat/1.png", "cat/1.png (2)", "dog/1.png"]


def test_path_is_a_fingerprint_of_contents_and_labels() -> None:
    first, same = open_dataset(PAIRS), open_dataset([(pixels.copy(), label) for pixels, label in PAIRS])
    assert first.path == same.path
    assert fingerprint_contents(first.splits["all"]).checksum == fingerprint_contents(same.splits["all"]).checksum
    assert first.path != open_dataset([*PAIRS[:2], (BLACK + 8, "night")]).path
    assert first.path != open_dataset([*PAIRS[:2], (BLACK + 9, "dusk")]).path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([*PAIRS, (BLACK,)], r"pair 3 is not a pair \(expected \(image, label\), got 1 values"),
        ([*PAIRS, BLACK], "pair 3 is not a pair .*got ndarray"),
        ([(BLACK, 1)], "pair 0: the label is not a class name .*got int 1.*\nhint: use str"),
        ({"train": PAIRS, "test": [(WHITE, "")]}, "pair 0 of test: the label is not a class name"),
        ([("cat.jpg", "cat")], "pair 0: cat.jpg: no such file"),
        ([("https://example.org/cat.jpg", "cat")], "pair 0: https://.*: URLs are not opened"),
        ([(BLACK.astype(np.float32), "a")], "pair 0: the array is not an image .*float32"),
        ([(torch.zeros(3, 8, 8), "a")], "pair 0: a tensor is not an image"),
        ([(object(), "a")], "pair 0: object is not an image"),
        ({"train": PAIRS, "holdout": PAIRS}, "there is no split called holdout"),
        ({"val": PAIRS, "valid": PAIRS}, "two splits called val"),
        ({"train": PAIRS, "test": [(WHITE, "noon")]}, "test of pairs-.* has classes that train lacks: noon"),
        ([(BLACK, "night")], "only one class"),
        ([], "has no images"),
        (iter(PAIRS), "list_iterator is not a dataset"),
        ("https://example.org/photos", "URLs are not opened"),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_wrong_data_is_refused_with_the_pair(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_several_classes(open_dataset(data))  # type: ignore[arg-type]


def test_pairs_have_no_layout() -> None:
    with pytest.raises(DataError, match="no other layout"):
        open_dataset(PAIRS, layout="folders")
