"""The page of a real, tiny run: what a person looks for is on it, and nothing that a stranger's file name could do."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli.tiny_runs import photos

from vitkit.train.config import DataConfig, KeepConfig, ModelChoice, RunConfig, ScheduleConfig
from vitkit.train.report import curves, series
from vitkit.train.run import run
from vitkit.train.watch import Watcher

CLASSES = ("<script>alert(1)</script>", "cat & dog", "owl\x1b[31m")


def config_for(data: Path) -> RunConfig:
    settings = ("width=16", "heads=2", "depth=1", "mlp_dim=16")
    return RunConfig(
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=8, settings=settings),
        data=DataConfig(path=str(data), val_share=0.25, workers=0),
        schedule=ScheduleConfig(batch_size=8, epochs=None, steps=4, lr=1e-3),
        keep=KeepConfig(log_every=1, evaluate_every=2),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of classes and files with names to be careful with, a run on them, and another beside it."""
    place = tmp_path_factory.mktemp("reported")
    photos(place / "photos", ["0", "1", "2"], each=12)
    rows = ["file_name,label"]
    for number in range(3):
        for index in range(12):
            name = CLASSES[index % 3]  # whatever the colour: there will be mistakes
            path = place / "photos" / str(number) / f"{index:02}.png"
            rows.append(f"{number}/<img src=x>\x1b[2J{index:02}.png,{name}")
            path.rename(path.with_name(f"<img src=x>\x1b[2J{index:02}.png"))
    (place / "photos" / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    run(config_for(place / "photos"), place / "first")
    compared = replace(KeepConfig(log_every=1), compare_with=(str(place / "first"),))
    run(replace(config_for(place / "photos"), keep=compared, seed=1), place / "second")
    return place


@pytest.fixture(scope="module")
def page(place: Path) -> str:
    return (place / "first" / "report.html").read_text(encoding="utf-8")


def test_the_page_has_curves_confusion_mistakes_and_the_ledger(page):
    for name in ("curves", "compute", "data", "configuration", "next"):
        assert f'<section id="{name}"' in page
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Images per second"):
        assert title in page
    assert page.count("<svg") >= 5
    assert "onfusion" in page
    for row in ("exaFLOPs", "Images seen", "Utilisation", "Time spent waiting"):
        assert row in page
    assert "steps = 4" in page  # of the configuration


def test_mistakes_are_shown_with_their_pictures(page):
    pictures = re.findall(r'src="data:image/(?:png|jpeg);base64,[A-Za-z0-9+/=]+"', page)
    assert len(pictures) >= 3


def test_the_page_needs_nothing_from_elsewhere(page):
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", page)


def test_names_of_strangers_do_nothing(page):
    assert "<script>alert" not in page
    assert "<img src=x>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "cat &amp; dog" in page
    assert "&lt;img src=x&gt;" in page


def test_another_run_is_set_beside_this_one(place, page):
    second = (place / "second" / "report.html").read_text(encoding="utf-8")
    assert '<section id="comparison"' in second
    assert "second (this run)" in second
    assert "first" in second
    assert '<section id="comparison"' not in page


def test_a_run_to_compare_with_that_is_none_is_said(place, tmp_path):
    class Told(Watcher):
        warnings: list[str] = []  # noqa: RUF012

        def warn(self, message: str) -> None:
            self.warnings.append(message)

    keep = replace(KeepConfig(log_every=1), compare_with=("no/such/run",))
    config = replace(config_for(place / "photos"), keep=keep)
    result = run(config, tmp_path / "run", watcher=Told())
    assert result.summary is not None
    assert Told.warnings == ["no/such/run has no result to compare with: it is not a finished run"]


def test_images_of_four_channels_are_reported_without_pictures(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 16, 16, 4), dtype=np.uint8)
    np.savez(tmp_path / "four.npz", x_train=images, y_train=np.arange(24) % 2)
    config = config_for(tmp_path / "four.npz")
    result = run(replace(config, data=replace(config.data, channels=4)), tmp_path / "run")
    assert result.summary is not None
    assert "data:image" not in result.folder.report.read_text(encoding="utf-8")


def test_a_run_without_held_out_images_says_that_accuracy_was_not_measured(tmp_path):
    photos(tmp_path / "photos", each=4)
    config = config_for(tmp_path / "photos")
    result = run(replace(config, data=replace(config.data, val_share=0.0)), tmp_path / "run")
    assert result.summary is not None
    assert result.summary["result"] is None
    assert "accuracy was not measured" in result.folder.report.read_text(encoding="utf-8")


def test_curves_are_drawn_from_what_was_logged():
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "lr": 0.1}, {"step": 2, "val_loss": 1.5}]
    (line,) = series(records, {"train": "loss", "nothing": "nowhere"})
    assert (line.name, line.steps, line.values) == ("train", (1, 2), (2.0, 1.0))
    loss, accuracy, rate, norm = curves(records)
    assert [each.name for each in loss.series] == ["train", "val"]
    assert (accuracy.series, norm.series) == ((), ())
    assert rate.series[0].values == (0.1,)
