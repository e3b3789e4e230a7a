"""`evaluate`, `fewshot` and `compare`: every source of models and data, results equal to `--json`, and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api.tiny import CLASSES, make_model, make_pairs
from cli.tiny_runs import Shell, photos
from PIL import Image

import vitkit
from vitkit.core.errors import ArgumentError, ConfigError, DataError, WeightsError
from vitkit.results import ComparisonResult, EvaluationResult, FewShotResult

QUIET: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation")
    vitkit.save(make_model(), path / "model")
    vitkit.save(make_model(seed=1), path / "other")
    photos(path / "photos", CLASSES, each=6)
    (path / "loose").mkdir()
    Image.fromarray(make_pairs()[0][0]).save(path / "loose" / "1.png")
    return path


@pytest.fixture
def shell(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(directory)
    return Shell(capsys)


def evaluate(*arguments: Any, **options: Any) -> EvaluationResult:
    return vitkit.evaluate(*arguments, **QUIET, **options)


def test_evaluation_counts_every_image(shell: Shell) -> None:
    result = evaluate("model", "photos")
    assert result.accuracy == result.top1
    assert result.confusion.count.sum() == result.count == 18
    assert result.probabilities is None


def test_every_source_of_a_model_gives_the_same_metrics(shell: Shell) -> None:
    expected = evaluate("model", "photos").to_dict()
    for source in (Path("model"), make_model(), vitkit.load("model"), "model/model.safetensors"):
        assert evaluate(source, "photos").to_dict() == expected


def test_weights_in_16_bits_are_used_in_float32(shell: Shell) -> None:
    vitkit.save(vitkit.load("model", dtype=torch.float16), "half")
    for source in ("half", vitkit.load("half")):
        assert evaluate(source, "photos").count == 18
        assert vitkit.fewshot(source, "photos", shots=[1], seeds=1, **QUIET).shots[1].seeds
    assert vitkit.inspect("half", "photos", only=["rollout"], out="looks", progress=False).sections
    assert vitkit.compare(["half", "model"], data="photos", **QUIET).differences


def test_pairs_give_the_metrics_of_their_folder(shell: Shell) -> None:
    pairs = [(path, path.parent.name) for path in sorted(Path("photos").rglob("*.png"))]
    folder = evaluate("model", "photos")
    assert evaluate("model", pairs).to_dict() == folder.to_dict()
    splits = evaluate("model", {"train": pairs, "test": pairs[:8]})
    assert (splits.split, splits.count, splits.labels) == ("test", 8, CLASSES)


def test_probabilities_are_kept_on_request() -> None:
    result = evaluate(make_model(), make_pairs(), keep_probabilities=True)
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities.sum(axis=1), 1.0, rtol=1e-5)  # float32
    assert np.array_equal(result.probabilities.argmax(axis=1), result.predictions)
    np.testing.assert_allclose(result.probabilities.max(axis=1), result.confidences, rtol=1e-5)  # float32
    assert "probabilities" not in result.to_dict()


def test_mistakes_are_the_most_confident_ones() -> None:
    result = evaluate(make_model(), make_pairs())
    wrong = int((result.targets != result.predictions).sum())
    mistakes = result.mistakes(100)
    assert len(mistakes) == wrong > 1
    assert [each.probability for each in mistakes] == sorted((each.probability for each in mistakes), reverse=True)


def test_engine_is_compared_with_the_unmodified_model() -> None:
    result = evaluate(make_model(), make_pairs(), precision="bf16")
    assert result.engine is not None
    assert result.fp32 is not None
    assert (result.engine.precision, result.fp32.count) == ("bf16", result.count)
    assert result.to_dict()["difference"] == {
        "top1": result.top1 - result.fp32.top1,
        "top5": result.top5 - result.fp32.top5,
    }


def test_run_is_evaluated_on_held_out_images(shell: Shell) -> None:
    assert shell.train("photos", "run").code == 0
    run, held_out = vitkit.Run("run"), evaluate("run", "photos")
    assert held_out.split == "val"
    for source in (run, Path("run"), "run/model.safetensors"):
        assert evaluate(source, "photos").to_dict() == held_out.to_dict()


@pytest.mark.parametrize(
    ("labels", "data", "message"),
    [
        ((), make_pairs(), r"the model has no classes\nhint: .*fewshot\(save=…\) or finetune"),
        (CLASSES, "loose", r"the images have no labels .*\nhint: .*one directory per class, or a CSV file with"),
        (("cat", "dog", "eel"), make_pairs(), "does not have the class owl"),
        (CLASSES, "https://example.org/photos", "URLs are not opened"),
        (CLASSES, 3, "int is not a dataset"),
    ],
)
def test_unsuitable_data_is_explained(shell: Shell, labels: tuple[str, ...], data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(make_model(labels), data)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="use batch_size=8"):
        evaluate(make_model(), make_pairs(), batch=8)
    with pytest.raises(ConfigError, match="batch_size must be positive"):
        evaluate(make_model(), make_pairs(), batch_size=0)
    with pytest.raises(ConfigError, match="workers cannot be negative"):
        vitkit.evaluate(make_model(), make_pairs(), workers=-1)


# Few-shot


def fewshot(*arguments: Any, **options: Any) -> FewShotResult:
    return vitkit.fewshot(*arguments, **QUIET, **options)


def test_fewshot_has_scores_of_all_methods(shell: Shell) -> None:
    result = fewshot("model", "photos", shots=[1, 3], method="all")
    assert set(result.shots) == {1, 3}
    assert len(result.shots[3].seeds) == 3
    assert set(result.methods) == {"ridge", "knn", "logistic"}


def test_fewshot_of_a_headless_model_saves_a_classifier(tmp_path: Path) -> None:
    result = fewshot(make_model(()), make_pairs(8), shots=[3], save=tmp_path / "few")
    assert result.model_path == tmp_path / "few"
    assert vitkit.load(tmp_path / "few").labels == CLASSES
    with pytest.raises(WeightsError, match="already exists"):
        fewshot(make_model(()), make_pairs(8), shots=[3], save=str(tmp_path / "few"))


def test_fewshot_refuses_no_shots() -> None:
    with pytest.raises(ConfigError, match="shots are numbers of images"):
        fewshot(make_model(), make_pairs(), shots=[])


# Comparison


def compare(*arguments: Any, **options: Any) -> ComparisonResult:
    return vitkit.compare(*arguments, **QUIET, **options)


def test_comparison_tests_the_difference(shell: Shell) -> None:
    result = compare(["model", "other"], data="photos", out="compared")
    assert result.report_path == Path("compared/report.html")
    assert result.report_path.is_file()
    [difference] = result.differences
    low, high = difference.interval
    assert difference.is_significant == (difference.p_value < 0.05 and not low <= 0 <= high)


def test_models_of_one_name_are_numbered() -> None:
    result = compare([make_model(), make_model(seed=1)], data=make_pairs())
    assert [model.label for model in result.models] == [f"{make_model().name} ({number})" for number in (1, 2)]


def test_comparison_explains_wrong_arguments(shell: Shell) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="listed twice"):
        compare([model, model], data=make_pairs())
    with pytest.raises(ConfigError, match="listed twice"):
        compare(["model", Path("model")])
    with pytest.raises(ConfigError, match=r"use models=\['model'\]"):
        compare("model", data="photos")
    with pytest.raises(ConfigError, match="split and layout are those of data"):
        compare(["model"], split="test")
