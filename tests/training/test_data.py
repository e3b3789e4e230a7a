"""Datasets of a run: unreadable files, splits, and changes between starts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.dataset import fingerprint_source
from vitkit.data.layouts.registry import open_dataset
from vitkit.training.callbacks import Callback
from vitkit.training.config import DataConfig, RunConfig
from vitkit.training.data import RunData, apply_run_splits, open_run_data
from vitkit.training.distributed import Ranks
from vitkit.training.run_dir import RunContext, RunDir


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def write_images(path: Path, *, count: int = 10, bad: int = 0) -> None:
    path.mkdir(parents=True)
    for number in range(count):
        file = path / f"{number}.png"
        Image.fromarray(np.full((4, 4), number, dtype=np.uint8)).save(file)
        if number < bad:
            file.write_bytes(b"")


class Warnings(Callback):
    """Callback that collects warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_warning(self, text: str) -> None:
        self.texts.append(text)


def open_data(
    path: Path,
    run_dir: RunDir,
    *,
    stop: StopFlag | None = None,
    callback: Callback | None = None,
    **changes: object,
) -> RunData:
    config = RunConfig(data=replace(DataConfig(path=str(path), channels=1), **changes))
    ranks = Ranks(device=torch.device("cpu"))
    context = RunContext(config=config, run_dir=run_dir, ranks=ranks, workers=0, stop=stop or StopFlag())
    return open_run_data(replace(context, callback=callback or context.callback))


def names(source: object) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def test_validation_is_held_out_and_bad_files_excluded(tmp_path, run_dir) -> None:
    for label in "ab":
        write_images(tmp_path / "set" / label, bad=1)
    data = open_data(tmp_path / "set", run_dir, val_fraction=0.2)
    assert (len(data.train), len(data.val or ()), data.test, data.bad) == (14, 4, None, 2)
    everything = names(data.train) + names(data.val)
    assert len(set(everything)) == 18
    assert not {"a/0.png", "b/0.png"} & set(everything)
    assert data.evaluation_split is not None
    assert data.evaluation_split[0] == "val"


def test_existing_splits_are_used(tmp_path, run_dir) -> None:
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        for label in "ab":
            write_images(tmp_path / "set" / split / label, count=count)
    data = open_data(tmp_path / "set", run_dir)
    assert [len(part) for part in (data.train, data.val, data.test)] == [12, 6, 4]
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    data = open_data(tmp_path / "set", other, train_on="all")
    assert (len(data.train), data.val, len(data.test)) == (18, None, 4)


def test_val_fraction_0_holds_out_nothing(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a")
    write_images(tmp_path / "set" / "b")
    data = open_data(tmp_path / "set", run_dir, val_fraction=0.0)
    assert (len(data.train), data.val, data.evaluation_split) == (20, None, None)


def test_run_without_held_out_images_gives_a_warning(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a", count=1)
    write_images(tmp_path / "set" / "b", count=1)
    warnings = Warnings()
    assert open_data(tmp_path / "set", run_dir, callback=warnings).evaluation_split is None
    assert warnings.texts == ["no images are held out, so the accuracy will be unknown: add images, or a test folder"]
    open_data(tmp_path / "set", run_dir, callback=warnings, train_on="all")  # as requested
    assert len(warnings.texts) == 1


def test_left_out_files_give_a_warning(tmp_path, run_dir) -> None:
    for label in "ab":
        write_images(tmp_path / "set" / label)
    (tmp_path / "set/a/1.svg").write_bytes(b"")
    warnings = Warnings()
    open_data(tmp_path / "set", run_dir, callback=warnings)
    assert warnings.texts == ["left out 1 file that is not an image (1 .svg): a/1.svg"]


def test_single_class_cannot_be_trained_on(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a")
    with pytest.raises(DataError, match="only one class: a"):
        open_data(tmp_path / "set", run_dir)


def test_too_many_bad_files_fail_the_run(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a", bad=5)
    write_images(tmp_path / "set" / "b")
    with pytest.raises(DataError, match="5 of 20"):
        open_data(tmp_path / "set", run_dir)


def test_images_are_verified_once_per_run(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a", bad=1)
    write_images(tmp_path / "set" / "b")
    first = open_data(tmp_path / "set", run_dir)
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(tmp_path / "set" / "a" / "0.png")
    again = open_data(tmp_path / "set", run_dir)
    assert names(again.train) == names(first.train), "a file that was repaired meanwhile would change the order"


def test_progress_of_each_task_adds_up(tmp_path, run_dir) -> None:
    for label in "ab":
        write_images(tmp_path / "set" / label)
    tasks: list[list[object]] = []

    class Tasks(Callback):
        def on_task(self, description: str, total: int) -> None:
            tasks.append([description, total, 0])

        def on_progress(self, count: int) -> None:
            tasks[-1][2] += count

    open_data(tmp_path / "set", run_dir, callback=Tasks())
    assert tasks == [["checking images", 20, 20]]
    touched = tmp_path / "set" / "a" / "3.png"
    touched.write_bytes(touched.read_bytes())
    open_data(tmp_path / "set", run_dir, callback=Tasks())
    assert tasks[1:] == [["reading images", 1, 1]]


def test_verification_can_be_stopped(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a")
    write_images(tmp_path / "set" / "b")
    with pytest.raises(StopRequested):
        open_data(tmp_path / "set", run_dir, stop=StopFlag("SIGTERM"))
    assert not run_dir.bad_files.exists()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("change", ["renamed", "added"])
def test_changed_images_are_rejected(tmp_path, run_dir, split, change) -> None:
    for each in ("train", "val"):
        for label in "ab":
            write_images(tmp_path / "set" / each / label)
    open_data(tmp_path / "set", run_dir)
    image = tmp_path / "set" / split / "a" / "3.png"
    if change == "renamed":
        image.rename(image.with_name("3b.png"))
    else:
        image.with_name("3b.png").write_bytes(image.read_bytes())
    with pytest.raises(DataError, match="have changed since the run began"):
        open_data(tmp_path / "set", run_dir)


def test_damaged_data_json_is_an_error(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a")
    write_images(tmp_path / "set" / "b")
    open_data(tmp_path / "set", run_dir)
    assert json.loads(run_dir.data.read_bytes())["images"] == {"train": 18, "val": 2}
    run_dir.data.write_bytes(b"[3")
    with pytest.raises(DataError, match=r"data\.json"):
        open_data(tmp_path / "set", run_dir)


def test_fingerprint_depends_on_order_of_labels(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set" / "a")
    write_images(tmp_path / "set" / "b")
    train = open_data(tmp_path / "set", run_dir, val_fraction=0.0).train
    before = fingerprint_source(train)
    assert before == fingerprint_source(train)
    train.labels = train.labels[::-1].copy()
    assert fingerprint_source(train) != before


def test_unlabeled_images_are_rejected_with_a_hint(tmp_path, run_dir) -> None:
    write_images(tmp_path / "set")
    with pytest.raises(DataError) as caught:
        open_data(tmp_path / "set", run_dir)
    assert caught.value.hint


def test_added_dataset_is_trained_on_and_divided_like_the_first(run_dir) -> None:
    """Evaluation of the run's own data uses the same held-out images."""
    config = RunConfig().override({"data.path": "digits", "data.add": ["digits"], "data.channels": 1})
    run_dir.claim(config)
    ranks = Ranks(device=torch.device("cpu"))
    data = open_run_data(RunContext(config=config, run_dir=run_dir, ranks=ranks, workers=0))
    held_out = apply_run_splits(run_dir, open_dataset("digits")).splits["val"]
    assert data.val is not None
    assert len(data.train) + len(data.val) == 2 * len(open_dataset("digits").splits["train"])
    assert names(held_out) == names(data.val)
