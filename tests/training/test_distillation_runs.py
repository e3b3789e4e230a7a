"""Distilled runs on digits: resume, two ranks, bf16, exports, and errors."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_timm
from training.jobs import train_on_ranks

import vitkit
from vitkit.core import metrics_log
from vitkit.core.errors import ConfigError
from vitkit.core.signals import StopFlag
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import hold_out
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.logits import compute_logits
from vitkit.objectives.config import DistillationConfig
from vitkit.recipes.recipe import slug
from vitkit.recipes.registry import find_recipe
from vitkit.training.build import resolve_model_config
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.run import run_training
from vitkit.weights import artifact as artifact_io
from vitkit.weights.artifact import read_tensors
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.load import load_bundle as load_any
from vitkit.zoo.registry import create

STEPS = 12
DIGITS = tuple("0123456789")
SHAPE = ("width=16", "depth=2", "heads=1", "mlp_dim=32", "block.activation=gelu_erf")
PLAIN = RunConfig(
    model=ModelChoice(name="Ti/16", image_size=8, patch_size=4, settings=(*SHAPE, "dropout.dense=0.1")),
    data=DataConfig(path="digits", channels=1, workers=0),
    augment=AugmentConfig(crop="pad", pad=1, mixup=0.8, cutmix=1.0),
    optimizer=OptimizerConfig(ema_decay=0.9, weight_decay=0.1),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=STEPS, warmup_steps=3, lr=3e-3),
    evaluation=EvaluationConfig(every=6),
    checkpoint=CheckpointConfig(save_every=6),
    logging=LoggingConfig(log_every=1),
)


def distilled(teacher: Path, config: RunConfig = PLAIN, **fields: object) -> RunConfig:
    distillation = DistillationConfig(teacher=str(teacher), **fields)
    return replace(config, objective=ObjectiveConfig(name="distillation", smoothing=0.1, distillation=distillation))


def save_teacher(folder: Path, *, labels: Sequence[str] = DIGITS, channels: int = 1) -> Path:
    """An opinionated teacher of another size, depth and normalization; its classes in the order of the labels."""
    model = create(
        "Ti/16",
        image_size=12,
        patch_size=4,
        channels=channels,
        num_classes=10,
        settings={"width": 16, "depth": 1, "heads": 2, "mlp_dim": 16},
        generator=torch.Generator().manual_seed(5),
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        rows = {label: torch.randn(16, generator=generator) for label in DIGITS}
        named = [rows.get(label, rows["0"]) for label in labels]
        model.head.weight.copy_(torch.stack(named))
    fed = Preprocessing(image_size=12, channels=channels, mean=(0.4,), std=(0.3,))
    vitkit.save(model, folder, labels=labels, preprocessing=fed)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, teacher: Path) -> Path:
    """Return an uninterrupted run."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("straight") / "run"
    run_training(distilled(teacher), out)
    return out


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory, teacher: Path) -> Path:
    """Return the same run in bfloat16."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("bf16") / "run"
    run_training(replace(distilled(teacher), parallel=ParallelConfig(precision="bf16")), out)
    return out


def hash_result(out: Path) -> dict[str, str]:
    """Return the SHA-256 of everything that must be the same however often the run was interrupted."""
    last = f"checkpoints/step-{STEPS:08}/state.safetensors"
    names = ("model.safetensors", "metrics.jsonl", last, "labels.json", "config.json")
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}


# Going on


class Recorder(Callback):
    """Records messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


class StopAt(Callback):
    """Requests a stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, StopFlag()

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.stop.signal = "SIGTERM"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, teacher, request, precision) -> None:
    undisturbed = request.getfixturevalue("straight" if precision == "fp32" else "in_bf16")
    config = replace(distilled(teacher), parallel=ParallelConfig(precision=precision))
    callback = StopAt(7)
    assert run_training(config, tmp_path / "run", callback=callback, stop=callback.stop).summary is None
    assert run_training(config, tmp_path / "run").summary is not None
    assert hash_result(tmp_path / "run") == hash_result(undisturbed)


def test_killed_run_repeats_unsaved_steps(tmp_path, teacher, straight) -> None:
    class Killed(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(distilled(teacher), tmp_path / "run", callback=Killed())
    run_training(distilled(teacher), tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_bf16_learns_nearly_the_same(straight, in_bf16) -> None:
    losses = [
        [record["loss"] for record in metrics_log.read_metrics(out / "metrics.jsonl") if "loss" in record]
        for out in (straight, in_bf16)
    ]
    # bf16 has three digits. A teacher's first guess may tip over where two classes are that near each other, for one
    # image of the sixteen, whose part of the loss is a thirty-second.
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[0] != losses[1]


# The teacher


def test_teacher_weight_0_equals_supervised_run(tmp_path, teacher) -> None:
    run_training(replace(PLAIN, objective=ObjectiveConfig(smoothing=0.1)), tmp_path / "alone")
    run_training(distilled(teacher, weight=0.0, token=False), tmp_path / "taught")
    assert hash_result(tmp_path / "alone") == hash_result(tmp_path / "taught")


def test_kind_and_weight_change_the_result(tmp_path, teacher, straight) -> None:
    weights = {"hard": read_tensors(straight / "model.safetensors")}
    for name, fields in {"soft": {"kind": "soft"}, "more": {"weight": 0.9}}.items():
        run_training(distilled(teacher, **fields), tmp_path / name)
        weights[name] = read_tensors(tmp_path / name / "model.safetensors")
    assert not torch.equal(weights["hard"]["head_dist.weight"], weights["soft"]["head_dist.weight"])
    assert not torch.equal(weights["hard"]["head_dist.weight"], weights["more"]["head_dist.weight"])


def test_teacher_is_not_saved(teacher, straight) -> None:
    student = artifact_io.read_artifact(straight)
    saved = read_tensors(straight / "checkpoints" / f"step-{STEPS:08}" / "state.safetensors")
    learned = {name.removeprefix("model.encoder.") for name in saved if name.startswith("model.")}
    assert learned == student.state.keys()
    parts = {part: sum(name.startswith(f"{part}.") for name in saved) for part in ("model", "ema", "optimizer")}
    assert parts == {"model": len(learned), "ema": len(learned), "optimizer": 3 * len(learned)}
    assert sum(parts.values()) == len(saved)
    known = [tensor for tensor in artifact_io.read_artifact(teacher).state.values() if tensor.any()]
    assert not any(
        one.shape == other.shape and torch.equal(one, other) for one in known for other in saved.values() if other.any()
    )


def test_teacher_classes_may_be_in_another_order(tmp_path, straight) -> None:
    turned = save_teacher(tmp_path / "turned", labels=DIGITS[::-1])
    run_training(distilled(turned), tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_color_teacher_is_adapted_to_gray_images(tmp_path) -> None:
    colors = save_teacher(tmp_path / "colors", channels=3)
    config = replace(PLAIN, schedule=replace(PLAIN.schedule, steps=2), data=replace(PLAIN.data, val_fraction=0.0))
    recorder = Recorder()
    assert run_training(distilled(colors, config), tmp_path / "run", callback=recorder).summary is not None
    assert "first kernel: 3 channels → 1" in recorder.messages


# Ranks


def test_two_ranks_learn_the_same(launcher, tmp_path, teacher) -> None:
    # Nothing random that depends on the rank, and steps in proportion to gradients: what differs is rounding.
    alone = replace(
        PLAIN,
        model=replace(PLAIN.model, settings=SHAPE),
        augment=AugmentConfig(crop="pad", pad=1),
        optimizer=OptimizerConfig(name="sgd", ema_decay=0.9),
        schedule=replace(PLAIN.schedule, lr=0.1, accumulate=2),
    )
    alone = distilled(teacher, alone)
    modes = {mode: replace(alone, parallel=ParallelConfig(mode=mode)) for mode in ("ddp", "fsdp2")}
    train_on_ranks(launcher, tmp_path, [(mode, config, None) for mode, config in modes.items()], ranks=2)
    assert not list(tmp_path.glob("*.error"))
    run_training(alone, tmp_path / "alone")
    one = read_tensors(tmp_path / "alone" / "model.safetensors")
    logged = [
        record["loss"] for record in metrics_log.read_metrics(tmp_path / "alone" / "metrics.jsonl") if "loss" in record
    ]
    for mode in modes:
        other = read_tensors(tmp_path / mode / "model.safetensors")
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5, msg=f"{mode}: {name}")
        losses = [
            record["loss"] for record in metrics_log.read_metrics(tmp_path / mode / "metrics.jsonl") if "loss" in record
        ]
        np.testing.assert_allclose(losses, logged, rtol=0, atol=1e-5)
    assert one["head_dist.weight"].abs().max() > 1e-3  # it has learned something to compare


# What is kept


def test_loaded_model_predicts_with_the_mean_of_both_heads(straight) -> None:
    model = vitkit.load(straight)
    assert model.labels == DIGITS
    assert model.config.tokens.distillation
    images = torch.randn(3, 1, 8, 8)
    label, teacher = model.head.forward_both(model.features(images))
    assert not torch.equal(label, teacher)
    torch.testing.assert_close(model(images), (label + teacher) / 2)


def test_validation_equals_that_of_the_saved_model(straight, teacher, tmp_path) -> None:
    """The wrapped model answers in evaluation as the kept one does."""
    summary = json.loads((straight / "summary.json").read_bytes())
    assert summary["evaluated_on"] == "test"
    config = distilled(teacher, replace(PLAIN, optimizer=OptimizerConfig(), schedule=replace(PLAIN.schedule, steps=6)))
    run_training(config, tmp_path / "run")
    [record] = [each for each in metrics_log.read_metrics(tmp_path / "run" / "metrics.jsonl") if "val_loss" in each]
    val = vitkit.load(tmp_path / "run")
    _, held_out = hold_out(open_dataset("digits").splits["train"], fraction=config.data.val_fraction)
    found = compute_logits(val, held_out, preprocessing=val.preprocess)
    loss = torch.nn.functional.cross_entropy(found.logits, found.targets).item()
    assert record["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, teacher: Path) -> Path:
    """A short run of a student whose heads are 64 wide: Facebook's files do not say how many there are."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("wide") / "run"
    model = replace(PLAIN.model, settings=("width=64", "depth=1", "heads=1", "mlp_dim=16", "block.activation=gelu_erf"))
    run_training(distilled(teacher, replace(PLAIN, model=model, schedule=replace(PLAIN.schedule, steps=4))), out)
    return out


@pytest.mark.parametrize("to", ["timm", "deit", "huggingface-deit"])
def test_export_and_import_keep_both_heads(wide, tmp_path, to) -> None:
    kept = load_any(wide)
    out = tmp_path / ("model.pth" if to == "deit" else "out")
    write_format(get_format(to), out, kept)
    back = load_any(out, format="deit" if to == "deit" else None)  # a bare file does not name its code
    assert {"head.label.weight", "head.teacher.weight", "dist_token"} <= back.state.keys()
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(back.build_model()(images), kept.build_model()(images), rtol=0, atol=1e-6)


def test_timm_predicts_the_same_with_both_heads(straight) -> None:
    timm = import_timm()
    theirs = timm.create_model(
        "deit_tiny_distilled_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=1,
        mlp_ratio=2.0,
        in_chans=1,
        num_classes=10,
    ).eval()
    theirs.load_state_dict(read_tensors(straight / "model.safetensors"), strict=True)
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(vitkit.load(straight)(images), theirs(images), rtol=0, atol=1e-5)


# Mistakes, found before anything is learned


def refused(config: RunConfig, out: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run_training(config, out)
    assert not out.exists()  # the same folder can be used when the mistake is fixed
    return caught.value


def test_a_run_without_a_teacher_is_an_error(tmp_path) -> None:
    config = replace(PLAIN, objective=ObjectiveConfig(name="distillation"))
    assert "needs a teacher" in str(refused(config, tmp_path / "run"))


@pytest.mark.parametrize(
    ("labels", "said"),
    [((*DIGITS[:8], "eight", "nine"), "the class 8 and 1 more"), (("zero", *DIGITS[1:]), "the class 0 (expected zero")],
)
def test_a_teacher_of_other_classes_is_an_error(tmp_path, labels, said) -> None:
    other = save_teacher(tmp_path / "other", labels=labels)
    error = refused(distilled(other), tmp_path / "run")
    assert said in str(error)
    assert "teacher" in str(error.hint)


def test_missing_teacher_is_an_error(tmp_path) -> None:
    with pytest.raises(vitkit.core.errors.VitkitError, match="no such file or directory"):
        run_training(distilled(tmp_path / "nowhere"), tmp_path / "run")


def test_students_without_token_support_are_rejected(tmp_path, teacher) -> None:
    resnet = replace(PLAIN, model=ModelChoice(name="BiT-R50x1", image_size=32))
    assert "needs a Vision Transformer" in str(refused(distilled(teacher, resnet), tmp_path / "run"))
    mean = replace(PLAIN, model=replace(PLAIN.model, settings=(*SHAPE, "pooling=mean")))
    assert "needs a class token" in str(refused(distilled(teacher, mean), tmp_path / "run"))
    with_token = replace(PLAIN, model=replace(PLAIN.model, settings=(*SHAPE, "tokens.distillation=true")))
    assert "has a distillation token" in str(refused(distilled(teacher, with_token, token=False), tmp_path / "run"))


def test_sigmoid_loss_is_rejected_before_reading_images(tmp_path, teacher) -> None:
    config = distilled(teacher)
    config = replace(config, objective=replace(config.objective, loss="sigmoid"), data=DataConfig(path="nowhere"))
    assert "sigmoid" in str(refused(replace(config, data=replace(config.data, channels=1)), tmp_path / "run"))


# Recipes


@pytest.mark.parametrize("model", ["Ti/16", "S/16", "B/16"])
def test_recipes_have_the_settings_of_deit(model: str) -> None:
    """The table of hyper-parameters of DeiT's paper, and its released code's defaults."""
    made = find_recipe(f"deit-{slug(model)}-distilled").make()
    augment, optimizer, schedule = made.augment, made.optimizer, made.schedule
    assert (made.model.name, made.model.image_size) == (model, 224)
    assert made.model.settings == ("dropout.stochastic_depth=0.1",)
    assert (augment.randaugment_layers, augment.randaugment_magnitude) == (2, 9)
    assert (augment.mixup, augment.cutmix, augment.erasing, augment.crop_area) == (0.8, 1.0, 0.25, (0.08, 1.0))
    assert (optimizer.name, optimizer.weight_decay, optimizer.clip) == ("adam", 0.05, None)
    assert (schedule.epochs, schedule.batch_size, schedule.lr) == (300.0, 1024, 1e-3)
    assert (schedule.warmup_steps, schedule.decay, schedule.end_lr) == (6256, "cosine", 1e-5)  # 5 × 1,281,167 / 1024
    assert (made.objective.name, made.objective.smoothing) == ("distillation", 0.1)
    assert made.objective.distillation == DistillationConfig(teacher=None, kind="hard", weight=0.5, token=True)
    assert resolve_model_config(made, num_classes=1000, pretrained=None).tokens.distillation


def test_small_student_has_a_tenth_of_the_parameters() -> None:
    sizes = []
    for name in ("digits", "digits-distilled"):
        model = create(resolve_model_config(find_recipe(name).make(), num_classes=10, pretrained=None), device="meta")
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes[1] < sizes[0] / 10
