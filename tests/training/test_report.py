"""Report of a small run: contents, self-containment, and escaping of names."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.tiny_runs import photos

from vitkit.core.files import write_json
from vitkit.evaluation.evaluation import ImageMetrics
from vitkit.training.callbacks import Callback
from vitkit.training.config import (
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    ReportConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.finalize import chart_panels, chart_series, read_result, summarize_result, write_arrays
from vitkit.training.run import run_training
from vitkit.training.run_dir import RunDir

CLASSES = ("<script>alert(1)</script>", "cat & dog", "owl\x1b[31m")


def config_for(data: Path) -> RunConfig:
    settings = ("width=16", "heads=2", "depth=1", "mlp_dim=16")
    return RunConfig(
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=8, settings=settings),
        data=DataConfig(path=str(data), val_fraction=0.25, workers=0),
        schedule=ScheduleConfig(batch_size=8, epochs=None, steps=4, lr=1e-3),
        evaluation=EvaluationConfig(every=2),
        logging=LoggingConfig(log_every=1),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs on images whose classes and files have hostile names."""
    runs = tmp_path_factory.mktemp("reported")
    photos(runs / "photos", ["0", "1", "2"], each=12)
    rows = ["file_name,label"]
    for number in range(3):
        for index in range(12):
            name = CLASSES[index % 3]  # whatever the color: there will be mistakes
            path = runs / "photos" / str(number) / f"{index:02}.png"
            rows.append(f"{number}/<img src=x>\x1b[2J{index:02}.png,{name}")
            path.rename(path.with_name(f"<img src=x>\x1b[2J{index:02}.png"))
    (runs / "photos" / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    run_training(config_for(runs / "photos"), runs / "first")
    compared = ReportConfig(compare_with=(str(runs / "first"),))
    run_training(replace(config_for(runs / "photos"), report=compared, seed=1), runs / "second")
    return runs


@pytest.fixture(scope="module")
def page(runs: Path) -> str:
    return (runs / "first" / "report.html").read_text(encoding="utf-8")


def test_report_has_curves_confusion_mistakes_and_compute(page):
    for name in ("curves", "compute", "data", "configuration", "next"):
        assert f'<section id="{name}"' in page
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Images per second"):
        assert title in page
    assert page.count("<svg") >= 5
    assert "onfusion" in page
    for row in ("exaFLOPs", "Images seen", "Utilization", "Time spent waiting"):
        assert row in page
    assert "steps = 4" in page  # of the configuration


def test_report_shows_mistakes_with_pictures(page):
    pictures = re.findall(r'src="data:image/(?:png|jpeg);base64,[A-Za-z0-9+/=]+"', page)
    assert len(pictures) >= 3


def test_report_is_self_contained(page):
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", page)


def test_hostile_names_are_escaped(page):
    assert "<script>alert" not in page
    assert "<img src=x>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "cat &amp; dog" in page
    assert "&lt;img src=x&gt;" in page


def test_report_compares_with_another_run(runs, page):
    second = (runs / "second" / "report.html").read_text(encoding="utf-8")
    assert '<section id="comparison"' in second
    assert "second (this run)" in second
    assert "first" in second
    assert '<section id="comparison"' not in page


def test_missing_run_to_compare_with_is_a_warning(runs, tmp_path):
    class Recorder(Callback):
        warnings: list[str] = []  # noqa: RUF012

        def on_warning(self, text: str) -> None:
            self.warnings.append(text)

    config = replace(config_for(runs / "photos"), report=ReportConfig(compare_with=("no/such/run",)))
    result = run_training(config, tmp_path / "run", callback=Recorder())
    assert result.summary is not None
    assert Recorder.warnings == ["report.compare_with: no/such/run is not a finished run"]


def test_four_channels_are_reported_without_pictures(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 16, 16, 4), dtype=np.uint8)
    np.savez(tmp_path / "four.npz", x_train=images, y_train=np.arange(24) % 2)
    config = config_for(tmp_path / "four.npz")
    result = run_training(replace(config, data=replace(config.data, channels=4)), tmp_path / "run")
    assert result.summary is not None
    assert "data:image" not in result.run_dir.report.read_text(encoding="utf-8")


def test_report_without_evaluation_says_so(tmp_path):
    photos(tmp_path / "photos", each=4)
    config = config_for(tmp_path / "photos")
    result = run_training(replace(config, data=replace(config.data, val_fraction=0.0)), tmp_path / "run")
    assert result.summary is not None
    assert result.summary["result"] is None
    assert "accuracy was not measured" in result.run_dir.report.read_text(encoding="utf-8")


def test_charts_are_made_from_the_log():
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "lr": 0.1}, {"step": 2, "val_loss": 1.5}]
    (line,) = chart_series(records, {"train": "loss", "nothing": "nowhere"})
    assert (line.name, line.steps, line.values) == ("train", (1, 2), (2.0, 1.0))
    loss, accuracy, rate, norm = chart_panels(records)
    assert [each.name for each in loss.series] == ["train", "val"]
    assert (accuracy.series, norm.series) == ((), ())
    assert rate.series[0].values == (0.1,)


def test_config_has_the_resolved_machine_settings(runs):
    text = (runs / "first" / "config.toml").read_text(encoding="utf-8")
    assert 'precision = "fp32"' in text
    assert "accumulate = 1" in text


def test_results_of_many_classes_take_little_space(tmp_path):
    """A dense confusion matrix of 10,000 classes took 1,050 MB in summary.json."""
    labels, run_dir = tuple(map(str, range(10_000))), RunDir(tmp_path)
    images = ImageMetrics(labels, count=64)
    images.add(torch.randn(64, len(labels)), torch.arange(64))
    result = images.result()
    write_arrays(run_dir, result)
    write_json(run_dir.summary, {"result": summarize_result(result)})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2_000_000
    stored = read_result(run_dir, labels=labels)
    assert stored is not None
    assert stored.to_dict() == result.to_dict()
