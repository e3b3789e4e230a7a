"""Finding a run's images: bad ones left out once, splits as they are or made, the same at every start."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.core.stopping import Stop, Stopped
from vitkit.train.config import DataConfig, RunConfig
from vitkit.train.folder import RunFolder
from vitkit.train.images import Images, find_images, fingerprint
from vitkit.train.parallel import Ranks
from vitkit.train.watch import Watcher


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def write(place: Path, *, count: int = 10, bad: int = 0) -> None:
    place.mkdir(parents=True)
    for number in range(count):
        path = place / f"{number}.png"
        Image.fromarray(np.full((4, 4), number, dtype=np.uint8)).save(path)
        if number < bad:
            path.write_bytes(b"")


def find(place: Path, folder: RunFolder, *, stop: Stop | None = None, **changes: object) -> Images:
    config = RunConfig(data=replace(DataConfig(path=str(place), channels=1), **changes))
    ranks = Ranks(device=torch.device("cpu"))
    return find_images(config, folder=folder, ranks=ranks, workers=0, watcher=Watcher(), stop=stop or Stop())


def names(source: object) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def test_validation_images_are_held_out_of_training_and_bad_ones_of_both(tmp_path, folder) -> None:
    for label in "ab":
        write(tmp_path / "set" / label, bad=1)
    found = find(tmp_path / "set", folder, val_share=0.2)
    assert (len(found.train), len(found.val or ()), found.test, found.bad) == (14, 4, None, 2)
    everything = names(found.train) + names(found.val)
    assert len(set(everything)) == 18
    assert not {"a/0.png", "b/0.png"} & set(everything)
    assert found.judged_by is not None
    assert found.judged_by[0] == "val"


def test_splits_of_their_own_are_used_and_all_can_be_learned_from(tmp_path, folder) -> None:
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        for label in "ab":
            write(tmp_path / "set" / split / label, count=count)
    found = find(tmp_path / "set", folder)
    assert [len(part) for part in (found.train, found.val, found.test)] == [12, 6, 4]
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    found = find(tmp_path / "set", other, train_on="all")
    assert (len(found.train), found.val, len(found.test)) == (18, None, 4)


def test_without_a_share_there_is_no_validation(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a")
    write(tmp_path / "set" / "b")
    found = find(tmp_path / "set", folder, val_share=0.0)
    assert (len(found.train), found.val, found.judged_by) == (20, None, None)


def test_too_many_bad_images_stop_the_run(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a", bad=5)
    write(tmp_path / "set" / "b")
    with pytest.raises(DataError, match="5 of 20"):
        find(tmp_path / "set", folder)


def test_images_are_checked_once_in_a_run(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a", bad=1)
    write(tmp_path / "set" / "b")
    first = find(tmp_path / "set", folder)
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(tmp_path / "set" / "a" / "0.png")
    again = find(tmp_path / "set", folder)
    assert names(again.train) == names(first.train), "a file that was mended meanwhile would change the order"


def test_checking_can_be_stopped(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a")
    write(tmp_path / "set" / "b")
    with pytest.raises(Stopped):
        find(tmp_path / "set", folder, stop=Stop("SIGTERM"))
    assert not folder.bad_files.exists()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("change", ["renamed", "added"])
def test_images_that_changed_since_the_run_began_are_refused(tmp_path, folder, split, change) -> None:
    for each in ("train", "val"):
        for label in "ab":
            write(tmp_path / "set" / each / label)
    find(tmp_path / "set", folder)
    image = tmp_path / "set" / split / "a" / "3.png"
    if change == "renamed":
        image.rename(image.with_name("3b.png"))
    else:
        image.with_name("3b.png").write_bytes(image.read_bytes())
    with pytest.raises(DataError, match="not those that the run began with"):
        find(tmp_path / "set", folder)


def test_a_damaged_note_of_the_images_is_named(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a")
    write(tmp_path / "set" / "b")
    find(tmp_path / "set", folder)
    assert json.loads(folder.data.read_bytes())["images"] == {"train": 18, "val": 2}
    folder.data.write_bytes(b"[3")
    with pytest.raises(DataError, match=r"data\.json"):
        find(tmp_path / "set", folder)


def test_a_fingerprint_is_of_names_labels_and_order(tmp_path, folder) -> None:
    write(tmp_path / "set" / "a")
    write(tmp_path / "set" / "b")
    found = find(tmp_path / "set", folder, val_share=0.0)
    assert fingerprint(found.train) == fingerprint(found.train)
    found.train.labels = found.train.labels[::-1].copy()
    other = fingerprint(found.train)
    found.train.labels = found.train.labels[::-1].copy()
    assert fingerprint(found.train) != other


def test_images_without_labels_are_refused_with_a_cure(tmp_path, folder) -> None:
    write(tmp_path / "set")
    with pytest.raises(DataError) as caught:
        find(tmp_path / "set", folder)
    assert caught.value.hint
