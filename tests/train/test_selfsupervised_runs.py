"""Runs without labels: from any images, judged by their own loss, with a picture; and what they leave behind."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.checkpoints import native
from vitkit.checkpoints.native import read_tensors
from vitkit.checkpoints.pretraining import load_pretraining
from vitkit.cli.main import main
from vitkit.core import runlog
from vitkit.core.errors import ConfigError, DataError, WeightsError
from vitkit.data.augment import AugmentConfig
from vitkit.data.sources.embedded import digits
from vitkit.data.split import part
from vitkit.model.masked import AutoencoderConfig, MaskedConfig, encoder_of
from vitkit.train import evaluation as evaluation_module
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.folder import RunFolder
from vitkit.train.loop import goodness
from vitkit.train.make import choose_model, make_trainer
from vitkit.train.parallel import Ranks
from vitkit.train.resume import best_so_far
from vitkit.train.run import run
from vitkit.train.watch import Watcher

SMALL = AutoencoderConfig(width=16, depth=1, heads=2)
BASE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=16, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0, val_share=0.05),
    optimizer=OptimizerConfig(name="sgd", average=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=6, lr=0.05),
    keep=KeepConfig(log_every=1, evaluate_every=3, save_every=3),
)
OBJECTIVES = {
    "masked": ObjectiveConfig(name="masked"),
    "downsized": ObjectiveConfig(name="masked", masked=MaskedConfig(target="downsized")),
    "pixels": ObjectiveConfig(name="masked", masked=MaskedConfig(target="pixels")),
    "autoencoder": ObjectiveConfig(name="autoencoder", autoencoder=SMALL),
}
LABELLED = ObjectiveConfig()
unlabelled = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[Path]:
    """A folder of runs, one of each objective."""
    folder = tmp_path_factory.mktemp("unlabelled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, objective in OBJECTIVES.items():
        run(replace(BASE, objective=objective), folder / name)
    yield folder
    torch.set_num_threads(threads)


def flat(folder: Path, *, count: int = 24) -> Path:
    """A folder of photos and nothing else: no labels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(random.integers(0, 256, (18, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


@unlabelled
def test_photos_without_labels_are_learned_from_and_then_fine_tuned(tmp_path, name) -> None:
    data = DataConfig(path=str(flat(tmp_path / "photos")), workers=0)
    config = replace(BASE, objective=OBJECTIVES[name], data=data, schedule=replace(BASE.schedule, steps=2))
    result = run(config, tmp_path / "run")
    assert result.summary is not None
    assert (result.summary["classes"], result.summary["result"]) == (0, None)
    artefact = native.load(tmp_path / "run")
    assert (artefact.config.classes, artefact.labels) == (0, ())

    for label in "ab":
        (tmp_path / "named" / label).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "named" / label / f"{number}.png").write_bytes((tmp_path / "photos/0.png").read_bytes())
    arguments = ["finetune", tmp_path / "run", tmp_path / "named", "--out", tmp_path / "tuned", "steps=1", "workers=0"]
    assert main([str(each) for each in [*arguments, "batch_size=4"]]) == 0
    tuned = native.load(tmp_path / "tuned")
    assert tuned.labels == ("a", "b")


def test_labelled_runs_still_ask_for_labels(tmp_path) -> None:
    data = DataConfig(path=str(flat(tmp_path / "photos")), workers=0)
    with pytest.raises(DataError, match="no labels") as caught:
        run(replace(BASE, data=data), tmp_path / "run")
    assert "mae-folder" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


@unlabelled
def test_fine_tuning_starts_from_what_was_learned(ran, tmp_path, name) -> None:
    choice = ModelChoice(weights=str(ran / name), new_head=True)
    config = replace(BASE, model=choice, schedule=replace(BASE.schedule, steps=1, lr=1e-9))
    run(replace(config, optimizer=OptimizerConfig(name="sgd")), tmp_path / "run")
    before, after = (read_tensors(folder / "model.safetensors") for folder in (ran / name, tmp_path / "run"))
    assert after.keys() - before.keys() == {"head.weight", "head.bias"}
    for key in before:
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=1e-6)


@unlabelled
def test_the_whole_model_of_pre_training_is_kept_and_answers_as_it_did(ran, tmp_path, name) -> None:
    model = load_pretraining(ran / name)
    state = read_tensors(ran / name / "checkpoints" / "step-00000006" / "state.safetensors")
    averaged = {key.removeprefix("average."): each for key, each in state.items() if key.startswith("average.")}
    assert averaged
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, averaged.get(key, parameter)), key
    assert encoder_of(model).config == native.load(ran / name).config

    for file in (ran / name).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "pretraining.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(WeightsError, match="damaged"):
        load_pretraining(tmp_path)
    (tmp_path / "pretraining.json").unlink()
    with pytest.raises(WeightsError, match="nothing of a pre-training"):
        load_pretraining(tmp_path)


@unlabelled
@pytest.mark.parametrize("changes", [{"batch_size": 5}, {"batch_size": 143}, {"accumulate": 8}], ids=str)
def test_an_evaluation_is_the_same_at_any_batch_size(ran, name, changes) -> None:
    val = evaluated(ran, name, BASE)
    again = evaluated(ran, name, replace(BASE, schedule=replace(BASE.schedule, **changes)))
    assert val.keys() == again.keys()
    for key in val:
        assert val[key] == pytest.approx(again[key], abs=1e-6)  # float32, summed in other groups


def evaluated(ran: Path, name: str, base: RunConfig) -> dict[str, float]:
    model = load_pretraining(ran / name)
    fed = native.load(ran / name).preprocessing
    config = replace(base, objective=OBJECTIVES[name], optimizer=OptimizerConfig())
    ranks = Ranks(device=torch.device("cpu"))
    trainer = make_trainer(config, model, preprocessing=fed, classes=0, steps=6, ranks=ranks)
    source = part(digits().splits["test"], share=0.1)
    judge = evaluation_module.by_own_loss(trainer, trainer.objective, source, workers=0, show=lambda shown: None)
    return judge(lambda: False)


@unlabelled
def test_the_best_is_that_of_the_lowest_loss(ran, name) -> None:
    logged = [record for record in runlog.read(ran / name / "metrics.jsonl") if "val_loss" in record]
    lowest = min(logged, key=lambda record: record["val_loss"])
    assert best_so_far(RunFolder(ran / name)) == (goodness(lowest), lowest["step"])
    assert "val_top1" not in logged[0]
    assert ("val_right" in logged[0]) == (name in ("masked", "downsized"))


@unlabelled
def test_the_report_has_curves_and_a_picture_and_no_accuracy(ran, name) -> None:
    page = (ran / name / "report.html").read_text(encoding="utf-8")
    assert "learned without labels" in page
    assert "data:image/png;base64," in page
    assert "accuracy was not measured" not in page
    assert ("Patches named rightly" in page) == (name in ("masked", "downsized"))
    with Image.open(ran / name / "reconstructions.png") as drawn:
        assert drawn.size == (8 * (112 + 4) - 4, 3 * (112 + 4) - 4)  # eight images, three rows
    summary = json.loads((ran / name / "summary.json").read_bytes())
    assert summary["objective"] == OBJECTIVES[name].name
    assert summary["validation"].keys() >= {"val_loss"}


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch) -> None:
    heard: list[str] = []

    class Ears(Watcher):
        def warn(self, message: str) -> None:
            heard.append(message)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation_module, "draw", fail)
    assert run(replace(BASE, objective=OBJECTIVES["masked"]), tmp_path / "run", watcher=Ears()).summary is not None
    assert heard
    assert all("reconstructions.png could not be drawn: No space left" in warning for warning in heard)


def test_labels_that_would_be_mixed_and_heads_that_would_be_tuned_are_refused() -> None:
    with pytest.raises(ConfigError, match="mix labels"):
        replace(BASE, objective=OBJECTIVES["masked"], augment=AugmentConfig(mixup=0.2))
    with pytest.raises(ConfigError, match="no head"):
        replace(BASE, objective=OBJECTIVES["masked"], optimizer=OptimizerConfig(tune="head"))


@unlabelled
def test_the_hidden_layer_of_a_head_is_left_out_with_the_head(name) -> None:
    choice = ModelChoice(name="Ti/16", settings=("head.pre_logits=192", "head.bias=-10.0"))
    made = choose_model(replace(BASE, model=choice, objective=OBJECTIVES[name]), classes=0, pretrained=None)
    assert (made.classes, made.head.pre_logits, made.head.bias) == (0, None, 0.0)


@pytest.mark.parametrize("model", ["BiT-R50x1", "R50+B/16"])
def test_models_without_patches_of_their_own_are_refused_before_images_are_looked_for(tmp_path, model) -> None:
    choice = ModelChoice(name=model, image_size=64)
    data = DataConfig(path=str(tmp_path / "nowhere"), channels=3)
    with pytest.raises(ConfigError, match=r"Vision Transformer|neighbours"):
        run(replace(BASE, model=choice, data=data, objective=OBJECTIVES["autoencoder"]), tmp_path / "run")


# A share of the labels


def test_a_share_of_the_labels_is_of_each_class_and_follows_from_the_seed(tmp_path) -> None:
    def learned_from(name: str, seed: int, objective: ObjectiveConfig = LABELLED) -> dict[str, object]:
        config = replace(
            BASE,
            seed=seed,
            objective=objective,
            data=replace(BASE.data, label_share=0.05),
            schedule=replace(BASE.schedule, steps=1),
        )
        run(config, tmp_path / name)
        return json.loads((tmp_path / name / "data.json").read_bytes())

    one, same, other = learned_from("one", 0), learned_from("same", 0), learned_from("other", 1)
    assert 60 <= one["images"]["train"] <= 70  # 5 % of 1,295, rounded for each of ten classes
    assert one == same
    assert one["images"] == other["images"]
    assert one["fingerprints"]["train"] != other["fingerprints"]["train"]
    assert one["fingerprints"]["val"] == other["fingerprints"]["val"]
    assert learned_from("all", 0, OBJECTIVES["autoencoder"])["images"]["train"] > 1200


def test_a_smaller_share_is_part_of_a_larger_and_no_class_is_lost() -> None:
    source = digits().splits["train"]
    parts = [part(source, share=share) for share in (0.001, 0.1)]
    few, more = ({each.name(index) for index in range(len(each))} for each in parts)
    assert len(few) == 10
    assert few < more
    with pytest.raises(ConfigError, match="share"):
        part(source, share=0.0)
