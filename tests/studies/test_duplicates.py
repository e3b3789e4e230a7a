"""Copies of test images among the pre-training images."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.core.signals import StopFlag
from vitkit.data.layouts.registry import open_dataset
from vitkit.studies import duplicates
from vitkit.studies.duplicates import exclude_duplicates
from vitkit.studies.plan import plan_runs
from vitkit.studies.registry import find_study
from vitkit.studies.worker import adapt_data
from vitkit.training.callbacks import Callback
from vitkit.training.config import DataConfig
from vitkit.training.data import open_config_dataset, split_dataset


def write_images(path: Path, generator: np.random.Generator, count: int) -> list[Path]:
    """Write noise that is smooth, as photos are."""
    files = [path / name / f"{index}.png" for name in "ab" for index in range(count)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(small).resize((48, 48), Image.Resampling.BICUBIC).save(file)
    return files


def test_copies_of_test_images_are_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    upstream = write_images(tmp_path / "up/train", generator, 30)
    tests = write_images(tmp_path / "down/test", generator, 4)
    write_images(tmp_path / "down/train", generator, 4)
    with Image.open(tests[1]) as image:
        image.resize((40, 40)).save(upstream[7])
    data = {"upstream": str(tmp_path / "up"), "downstream": str(tmp_path / "down")}

    def exclude(out: Path) -> list[tuple[str, str]]:
        out.mkdir(exist_ok=True)
        bad = exclude_duplicates(out, data, find_study("table8"), callback=Callback(), stop=StopFlag())
        return [(file.name, file.reason) for file in bad]

    expected = [("train/a/7.png", "copy of test/a/1.png of downstream")]
    assert exclude(tmp_path) == expected
    with monkeypatch.context() as patch:
        patch.setattr(duplicates, "search_duplicates", lambda *_, **__: pytest.fail("searched again"))
        assert exclude(tmp_path) == exclude(tmp_path / "other") == expected
    for file in (tmp_path / "cache/images").glob("duplicates-*"):
        file.write_text("damaged")
    assert exclude(tmp_path / "third") == expected
    os.utime(tests[1])
    monkeypatch.setattr(duplicates, "search_duplicates", lambda *_, **__: [])
    assert exclude(tmp_path / "fourth") == [], "a file has changed: the cached result is not used"
    data["downstream"] = "digits"
    assert exclude(tmp_path / "fifth") == []
    monkeypatch.setattr(duplicates, "search_duplicates", lambda *_, **__: pytest.fail("searched again"))
    assert exclude(tmp_path / "sixth") == [], "images in memory are known by their contents"
    [run, *_] = plan_runs(find_study("table8"), data=data, settings={}, quick=True)
    config = adapt_data(run.config, tmp_path, data=data).data
    assert config.exclude == str(tmp_path / "duplicates.csv")
    assert config.layout is None, "there is no val split that could be the test"
    train = split_dataset(
        DataConfig(exclude=config.exclude, val_fraction=0.0), open_dataset(data["upstream"]), []
    ).train
    assert len(train) == len(upstream) - 1


def test_copies_in_an_added_dataset_are_left_out(tmp_path, monkeypatch) -> None:
    """Also copies of its own test images."""
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    generator = np.random.default_rng(0)
    names = ("upstream", "cifar10", "cifar100", "pets")
    files = {
        (name, split): write_images(tmp_path / name / split, generator, 5)
        for name in names
        for split in ("train", "test")
    }
    shutil.copyfile(files["cifar100", "test"][2], files["cifar100", "train"][7])
    shutil.copyfile(files["pets", "test"][0], files["upstream", "train"][1])
    data = {name: str(tmp_path / name) for name in names}
    bad = exclude_duplicates(tmp_path, data, find_study("fig3"), callback=Callback(), stop=StopFlag())
    assert [(file.name, file.reason) for file in bad] == [
        ("+1/train/b/2.png", "copy of test/a/2.png of cifar100"),
        ("train/a/1.png", "copy of test/a/0.png of pets"),
    ]
    runs = {run.name: run for run in plan_runs(find_study("fig3"), data=data, settings={}, quick=True)}
    for name, images in (("small-ViT_1.0_seed0", 9), ("small-ViT_1.5_seed0", 18)):
        config = replace(adapt_data(runs[name].config, tmp_path, data=data).data, val_fraction=0.0)
        assert len(split_dataset(config, open_config_dataset(config), []).train) == images
