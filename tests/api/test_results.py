"""Results of public functions: one line, an escaped table, figures that notebooks show, and lazy names."""

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import torch
from api.tiny import make_model, make_pairs
from PIL import Image

import vitkit
from vitkit import results
from vitkit.core.result import Result
from vitkit.evaluation.comparison import ComparedModel, ComparisonResult, ModelScores
from vitkit.evaluation.evaluation import EvaluationResult, evaluate_logits
from vitkit.evaluation.fewshot import FewShotResult, ShotScore
from vitkit.evaluation.leaderboard import Leaderboard, LeaderboardDataset, LeaderboardScore


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Sample(Result):
    name: str

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "score": 0.123456, "rows": [1, 2]}


def test_text_is_one_line_and_html_is_escaped() -> None:
    sample = Sample(name="<b>\x1b[31m\n", warnings=("a & b",))
    assert repr(sample) == r"Sample(name=<b>\x1b[31m\n, score=0.1235)"
    assert "<b>" not in sample._repr_html_()
    assert "a &amp; b" in sample._repr_html_()


def make_evaluation(classes: int = 3, images: int = 40) -> EvaluationResult:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator)
    return evaluate_logits(logits, targets, labels=tuple(f"class $number_{label}" for label in range(classes)))


def make_comparison(count: int = 3) -> ComparisonResult:
    scores = ModelScores(count=9, top1=0.7, interval=(0.6, 0.8), top5=0.9, mean_per_class=0.7, ece=0.1)
    models = [
        ComparedModel(label=f"run {index}", model="B/16", family="ViT", parameters=10**index, gflops=1.0, scores=scores)
        for index in range(1, count + 1)
    ]
    unscored = ComparedModel(label="x", model="B/16", family="ViT", parameters=9, gflops=1.0)
    return ComparisonResult(models=(*models, unscored))


def make_leaderboard(group: str | None) -> Leaderboard:
    datasets = tuple(LeaderboardDataset(name=name, title=name.title(), group=group) for name in ("pets", "cars"))
    scores = {(dataset.name, "a"): LeaderboardScore(top1=0.5, interval=(0.4, 0.6)) for dataset in datasets}
    scores["pets", "b"] = LeaderboardScore(top1=0.9)
    return Leaderboard(title="Suite", models=("a", "b"), datasets=datasets, scores=scores, mean_title="All")


FEWSHOT = FewShotResult(
    model="B/16",
    labels=("a", "b"),
    methods={name: {1: ShotScore(seeds=(0.1, 0.3)), 5: ShotScore(seeds=(0.5,))} for name in ("ridge", "knn")},
    train_images=9,
    test_images=3,
)
FIGURES = {
    "confusion of two": lambda: make_evaluation(2).plot(),
    "confusion of many": lambda: make_evaluation(60, images=900).plot(),
    "calibration": lambda: make_evaluation().plot("calibration"),
    "classes": lambda: make_evaluation(60).plot("per_class"),
    "fewshot": FEWSHOT.plot,
    "comparison": lambda: make_comparison().plot(),
    "comparison of one": lambda: make_comparison(1).plot(),
    "comparison without scores": lambda: make_comparison(0).plot(),
    "leaderboard": lambda: make_leaderboard(None).plot(),
    "leaderboard of groups": lambda: make_leaderboard("Natural").plot(),
    "data": lambda: vitkit.check_data(make_pairs(), workers=0, progress=False).plot(),
    "no problems": lambda: vitkit.check_data_quality(make_pairs(), workers=0, progress=False).plot(),
    "quality": lambda: vitkit.check_data_quality(
        {"train": make_pairs(8), "test": make_pairs(2)}, model=make_model(), min_score=-1, workers=0, progress=False
    ).plot(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_pictures_in_notebooks(name: str) -> None:
    figure = FIGURES[name]()
    assert isinstance(figure, matplotlib.figure.Figure)
    content = figure._repr_png_()  # type: ignore[attr-defined]
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
    assert pixels.max() == 255
    assert pixels.min() < 60
    edge = np.concatenate([pixels[:3].ravel(), pixels[-3:].ravel(), pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
    if name not in ("data", "quality"):  # these have pictures up to the edge
        assert edge.min() == 255  # no text is cut off


def test_removed_images_are_drawn_as_empty_squares(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        Image.effect_noise((40, 30), 80).save(tmp_path / name / "own.png")
        Image.linear_gradient("L").rotate(30).save(tmp_path / name / "copy.png")
    report = vitkit.check_data_quality(tmp_path, workers=0, progress=False)
    assert len(report.near_duplicates) == 1
    (tmp_path / "one" / "copy.png").unlink()
    pictures = [np.asarray(axes.images[0].get_array()) for axes in report.plot().axes]
    assert sorted(len(np.unique(picture)) > 3 for picture in pictures) == [False, True]


def test_texts_of_the_main_results() -> None:
    assert repr(FEWSHOT) == "FewShotResult(model=B/16, method=ridge, shots1=0.2, shots5=0.5)"
    assert repr(make_leaderboard(None)) == "Leaderboard(title=Suite, a=0.5, b=None)"
    evaluation = make_evaluation()
    assert repr(evaluation).startswith("EvaluationResult(top1=0.")
    assert evaluation.confusion_matrix().sum() == evaluation.count
    assert "array" not in repr(evaluation)
    assert FEWSHOT.to_dict()["shots"] == {
        "1": FEWSHOT.shots[1].to_dict(),
        "5": FEWSHOT.shots[5].to_dict(),
    }


def test_mean_of_a_leaderboard_needs_all_scores() -> None:
    assert make_leaderboard(None).mean == {"a": 0.5, "b": None}


@pytest.mark.parametrize("name", results.__all__)
def test_names_of_results_resolve(name: str) -> None:
    assert getattr(results, name).__name__ == name


def test_import_of_results_imports_no_torch() -> None:
    code = "import sys, vitkit.results as results; dir(results); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(dir(results)) == set(results.__all__)
