"""Self-supervised runs: unlabeled images, evaluation by loss, reconstructions, fine-tuning."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.cli.main import main
from vitkit.core import metrics_log
from vitkit.core.errors import ConfigError, DataError, WeightsError
from vitkit.core.metrics_log import find_best, validation_score
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import subsample
from vitkit.data.layouts.arrays import open_digits
from vitkit.model.pretraining import get_encoder
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.training import evaluation as evaluation_module
from vitkit.training.build import build_trainer, resolve_model_config
from vitkit.training.callbacks import Callback
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.distributed import Ranks
from vitkit.training.run import run_training
from vitkit.training.run_dir import RunContext, RunDir
from vitkit.weights import artifact as artifact_io
from vitkit.weights.artifact import read_tensors
from vitkit.weights.pretraining import load_pretraining_model

SMALL = MAEConfig(width=16, depth=1, heads=2)
BASE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=16, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0, val_fraction=0.05),
    optimizer=OptimizerConfig(name="sgd", ema_decay=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=6, lr=0.05),
    evaluation=EvaluationConfig(every=3),
    checkpoint=CheckpointConfig(save_every=3),
    logging=LoggingConfig(log_every=1),
)
OBJECTIVES = {
    "masked": ObjectiveConfig(name="masked"),
    "downsized": ObjectiveConfig(name="masked", masked=MaskedConfig(target="downsized")),
    "pixels": ObjectiveConfig(name="masked", masked=MaskedConfig(target="pixels")),
    "mae": ObjectiveConfig(name="mae", mae=SMALL),
}
LABELED = ObjectiveConfig()
unlabeled = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[Path]:
    """Train one run of each objective."""
    folder = tmp_path_factory.mktemp("unlabeled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, objective in OBJECTIVES.items():
        run_training(replace(BASE, objective=objective), folder / name)
    yield folder
    torch.set_num_threads(threads)


def write_unlabeled(folder: Path, *, count: int = 24) -> Path:
    """Write images without labels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(random.integers(0, 256, (18, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


@unlabeled
def test_unlabeled_photos_are_trained_on_and_fine_tuned(tmp_path, name) -> None:
    data = DataConfig(path=str(write_unlabeled(tmp_path / "photos")), workers=0)
    config = replace(BASE, objective=OBJECTIVES[name], data=data, schedule=replace(BASE.schedule, steps=2))
    result = run_training(config, tmp_path / "run")
    assert result.summary is not None
    assert (result.summary["classes"], result.summary["result"]) == (0, None)
    artifact = artifact_io.read_artifact(tmp_path / "run")
    assert (artifact.config.num_classes, artifact.labels) == (0, ())

    for label in "ab":
        (tmp_path / "named" / label).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "named" / label / f"{number}.png").write_bytes((tmp_path / "photos/0.png").read_bytes())
    arguments = ["finetune", tmp_path / "run", tmp_path / "named", "--out", tmp_path / "tuned", "steps=1", "workers=0"]
    assert main([str(each) for each in [*arguments, "batch_size=4"]]) == 0
    tuned = artifact_io.read_artifact(tmp_path / "tuned")
    assert tuned.labels == ("a", "b")


def test_supervised_run_needs_labels(tmp_path) -> None:
    data = DataConfig(path=str(write_unlabeled(tmp_path / "photos")), workers=0)
    with pytest.raises(DataError, match="no labels") as caught:
        run_training(replace(BASE, data=data), tmp_path / "run")
    assert "mae-folder" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


@unlabeled
def test_fine_tuning_starts_from_pretrained_weights(ran, tmp_path, name) -> None:
    choice = ModelChoice(init=str(ran / name), new_head=True)
    config = replace(BASE, model=choice, schedule=replace(BASE.schedule, steps=1, lr=1e-9))
    run_training(replace(config, optimizer=OptimizerConfig(name="sgd")), tmp_path / "run")
    before, after = (read_tensors(folder / "model.safetensors") for folder in (ran / name, tmp_path / "run"))
    assert after.keys() - before.keys() == {"head.weight", "head.bias"}
    for key in before:
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=1e-6)


@unlabeled
def test_pretraining_model_is_saved_and_verified(ran, tmp_path, name) -> None:
    model = load_pretraining_model(ran / name)
    state = read_tensors(ran / name / "checkpoints" / "step-00000006" / "state.safetensors")
    ema_weights = {key.removeprefix("ema."): each for key, each in state.items() if key.startswith("ema.")}
    assert ema_weights
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, ema_weights.get(key, parameter)), key
    assert get_encoder(model).config == artifact_io.read_artifact(ran / name).config

    for file in (ran / name).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "pretraining.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(WeightsError, match="damaged"):
        load_pretraining_model(tmp_path)
    (tmp_path / "pretraining.json").unlink()
    with pytest.raises(WeightsError, match="no pre-training weights"):
        load_pretraining_model(tmp_path)


@unlabeled
@pytest.mark.parametrize("changes", [{"batch_size": 5}, {"batch_size": 143}, {"accumulate": 8}], ids=str)
def test_evaluation_does_not_depend_on_batch_size(ran, name, changes, tmp_path) -> None:
    val = evaluate(ran, name, BASE, out=tmp_path)
    again = evaluate(ran, name, replace(BASE, schedule=replace(BASE.schedule, **changes)), out=tmp_path)
    assert val.keys() == again.keys()
    for key in val:
        assert val[key] == pytest.approx(again[key], abs=1e-6)  # float32, summed in other groups


def evaluate(ran: Path, name: str, base: RunConfig, *, out: Path) -> dict[str, float]:
    model = load_pretraining_model(ran / name)
    fed = artifact_io.read_artifact(ran / name).preprocessing
    config = replace(base, objective=OBJECTIVES[name], optimizer=OptimizerConfig())
    ranks = Ranks(device=torch.device("cpu"))
    trainer = build_trainer(config, model, preprocessing=fed, num_classes=0, total_steps=6, ranks=ranks)
    source = subsample(open_digits().splits["test"], fraction=0.1)
    context = RunContext(config=config, run_dir=RunDir(out), ranks=ranks, workers=0)
    return evaluation_module.make_loss_evaluator(trainer, trainer.objective, source, context)(lambda: False)


@unlabeled
def test_best_has_the_lowest_loss(ran, name) -> None:
    logged = [record for record in metrics_log.read_metrics(ran / name / "metrics.jsonl") if "val_loss" in record]
    lowest = min(logged, key=lambda record: record["val_loss"])
    assert find_best(RunDir(ran / name).metrics) == (validation_score(lowest), lowest["step"])
    assert "val_top1" not in logged[0]
    assert ("val_patch_accuracy" in logged[0]) == (name in ("masked", "downsized"))


@unlabeled
def test_report_has_curves_and_reconstructions(ran, name) -> None:
    page = (ran / name / "report.html").read_text(encoding="utf-8")
    assert "trained without labels" in page
    assert "data:image/png;base64," in page
    assert "accuracy was not measured" not in page
    assert ("Patch accuracy" in page) == (name in ("masked", "downsized"))
    with Image.open(ran / name / "reconstructions.png") as drawn:
        assert drawn.size == (8 * (112 + 4) - 4, 3 * (112 + 4) - 4)  # eight images, three rows
    summary = json.loads((ran / name / "summary.json").read_bytes())
    assert summary["objective"] == OBJECTIVES[name].name
    assert summary["validation"].keys() >= {"val_loss"}


def test_failed_picture_is_a_warning(tmp_path, monkeypatch) -> None:
    warnings: list[str] = []

    class Recorder(Callback):
        def on_warning(self, text: str) -> None:
            warnings.append(text)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation_module, "atomic_write", fail)
    assert (
        run_training(replace(BASE, objective=OBJECTIVES["masked"]), tmp_path / "run", callback=Recorder()).summary
        is not None
    )
    assert warnings
    assert all("cannot write reconstructions.png: No space left" in warning for warning in warnings)


def test_mixup_and_head_training_are_rejected() -> None:
    with pytest.raises(ConfigError, match="mix labels"):
        replace(BASE, objective=OBJECTIVES["masked"], augment=AugmentConfig(mixup=0.2))
    with pytest.raises(ConfigError, match="no head"):
        replace(BASE, objective=OBJECTIVES["masked"], optimizer=OptimizerConfig(trainable="head"))


@unlabeled
def test_head_is_removed_with_its_hidden_layer(name) -> None:
    choice = ModelChoice(name="Ti/16", settings=("head.pre_logits=192", "head.bias=-10.0"))
    made = resolve_model_config(replace(BASE, model=choice, objective=OBJECTIVES[name]), num_classes=0, pretrained=None)
    assert (made.num_classes, made.head.pre_logits, made.head.bias) == (0, None, 0.0)


@pytest.mark.parametrize("model", ["BiT-R50x1", "R50+B/16"])
def test_models_without_patches_are_rejected(tmp_path, model) -> None:
    choice = ModelChoice(name=model, image_size=64)
    data = DataConfig(path=str(tmp_path / "nowhere"), channels=3)
    with pytest.raises(ConfigError, match=r"Vision Transformer|independent of each other"):
        run_training(replace(BASE, model=choice, data=data, objective=OBJECTIVES["mae"]), tmp_path / "run")


def test_label_fraction_is_per_class_and_seeded(tmp_path) -> None:
    def learned_from(name: str, seed: int, objective: ObjectiveConfig = LABELED) -> dict[str, object]:
        config = replace(
            BASE,
            seed=seed,
            objective=objective,
            data=replace(BASE.data, label_fraction=0.05),
            schedule=replace(BASE.schedule, steps=1),
        )
        run_training(config, tmp_path / name)
        return json.loads((tmp_path / name / "data.json").read_bytes())

    one, same, other = learned_from("one", 0), learned_from("same", 0), learned_from("other", 1)
    assert 60 <= one["images"]["train"] <= 70  # 5 % of 1,295, rounded for each of ten classes
    assert one == same
    assert one["images"] == other["images"]
    assert one["fingerprints"]["train"] != other["fingerprints"]["train"]
    assert one["fingerprints"]["val"] == other["fingerprints"]["val"]
    assert learned_from("all", 0, OBJECTIVES["mae"])["images"]["train"] > 1200


def test_smaller_fraction_is_a_subset() -> None:
    source = open_digits().splits["train"]
    parts = [subsample(source, fraction=share) for share in (0.001, 0.1)]
    few, more = ({each.name(index) for index in range(len(each))} for each in parts)
    assert len(few) == 10
    assert few < more
    with pytest.raises(ConfigError, match="fraction"):
        subsample(source, fraction=0.0)
