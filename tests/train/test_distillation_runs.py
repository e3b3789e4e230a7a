"""Distilled runs on digits: stopped and resumed, on two ranks, in bf16, weighed to nothing, kept and given away."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_timm

import vitkit
from vitkit.checkpoints import native
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called
from vitkit.checkpoints.foreign import load as load_any
from vitkit.checkpoints.native import read_tensors
from vitkit.core import runlog
from vitkit.core.config import to_toml
from vitkit.core.errors import ConfigError
from vitkit.core.stopping import Stop
from vitkit.data.augment import AugmentConfig
from vitkit.data.sources.detect import open_data
from vitkit.data.split import split
from vitkit.data.transforms import Preprocessing
from vitkit.evaluate.accuracy import answers
from vitkit.objectives.distillation import DistillationConfig
from vitkit.recipes.recipe import slug
from vitkit.recipes.table import find
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.make import choose_model
from vitkit.train.run import run
from vitkit.train.watch import Pulse, Watcher
from vitkit.zoo.lookup import create

STEPS = 12
DIGITS = tuple("0123456789")
SHAPE = ("width=16", "depth=2", "heads=1", "mlp_dim=32", "block.activation=gelu_erf")
PLAIN = RunConfig(
    model=ModelChoice(name="Ti/16", image_size=8, patch_size=4, settings=(*SHAPE, "dropout.dense=0.1")),
    data=DataConfig(path="digits", channels=1, workers=0),
    augment=AugmentConfig(crop="pad", pad=1, mixup=0.8, cutmix=1.0),
    optimizer=OptimizerConfig(average=0.9, weight_decay=0.1),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=STEPS, warmup_steps=3, lr=3e-3),
    keep=KeepConfig(log_every=1, evaluate_every=6, save_every=6),
)


def distilled(teacher: Path, config: RunConfig = PLAIN, **fields: object) -> RunConfig:
    told = DistillationConfig(teacher=str(teacher), **fields)
    return replace(config, objective=ObjectiveConfig(name="distillation", smoothing=0.1, distillation=told))


def save_teacher(folder: Path, *, labels: Sequence[str] = DIGITS, channels: int = 1) -> Path:
    """An opinionated teacher of another size, depth and normalisation; its classes in the order of the labels."""
    model = create(
        "Ti/16",
        image_size=12,
        patch_size=4,
        channels=channels,
        classes=10,
        settings=["width=16", "depth=1", "heads=2", "mlp_dim=16"],
        generator=torch.Generator().manual_seed(5),
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        rows = {label: torch.randn(16, generator=generator) for label in DIGITS}
        named = [rows.get(label, rows["0"]) for label in labels]
        model.head.weight.copy_(torch.stack(named))
    fed = Preprocessing(image_size=12, channels=channels, mean=(0.4,), deviation=(0.3,))
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
    """The run that nothing disturbed."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("straight") / "run"
    run(distilled(teacher), out)
    return out


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory, teacher: Path) -> Path:
    """The same run in half precision."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("bf16") / "run"
    run(replace(distilled(teacher), parallel=ParallelConfig(precision="bf16")), out)
    return out


def result_of(out: Path) -> dict[str, str]:
    """The SHA-256 of all that must be the same however the run went."""
    last = f"checkpoints/step-{STEPS:08}/state.safetensors"
    names = ("model.safetensors", "metrics.jsonl", last, "labels.json", "config.json")
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}


# Going on


class Ears(Watcher):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


class StopAt(Watcher):
    """Asks to stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, Stop()

    def pulse(self, pulse: Pulse) -> None:
        if pulse.step == self.step:
            self.stop.signal = "SIGTERM"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_is_stopped_and_resumed_ends_the_same_bit_for_bit(tmp_path, teacher, request, precision) -> None:
    undisturbed = request.getfixturevalue("straight" if precision == "fp32" else "in_bf16")
    config = replace(distilled(teacher), parallel=ParallelConfig(precision=precision))
    watcher = StopAt(7)
    assert run(config, tmp_path / "run", watcher=watcher, stop=watcher.stop).summary is None
    assert run(config, tmp_path / "run").summary is not None
    assert result_of(tmp_path / "run") == result_of(undisturbed)


def test_a_killed_run_repeats_what_was_not_saved(tmp_path, teacher, straight) -> None:
    class Killed(Watcher):
        def pulse(self, pulse: Pulse) -> None:
            if pulse.step == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(distilled(teacher), tmp_path / "run", watcher=Killed())
    run(distilled(teacher), tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_bf16_learns_nearly_the_same(straight, in_bf16) -> None:
    losses = [
        [record["loss"] for record in runlog.read(out / "metrics.jsonl") if "loss" in record]
        for out in (straight, in_bf16)
    ]
    # bf16 has three digits. A teacher's first guess may tip over where two classes are that near each other, for one
    # image of the sixteen, whose part of the loss is a thirty-second.
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[0] != losses[1]


# The teacher


def test_a_teacher_with_no_weight_changes_no_bit_of_a_supervised_run(tmp_path, teacher) -> None:
    run(replace(PLAIN, objective=ObjectiveConfig(smoothing=0.1)), tmp_path / "alone")
    run(distilled(teacher, weight=0.0, token=False), tmp_path / "taught")
    assert result_of(tmp_path / "alone") == result_of(tmp_path / "taught")


def test_what_the_teacher_says_makes_a_difference(tmp_path, teacher, straight) -> None:
    weights = {"hard": read_tensors(straight / "model.safetensors")}
    for name, fields in {"soft": {"kind": "soft"}, "more": {"weight": 0.9}}.items():
        run(distilled(teacher, **fields), tmp_path / name)
        weights[name] = read_tensors(tmp_path / name / "model.safetensors")
    assert not torch.equal(weights["hard"]["head_dist.weight"], weights["soft"]["head_dist.weight"])
    assert not torch.equal(weights["hard"]["head_dist.weight"], weights["more"]["head_dist.weight"])


def test_a_teacher_is_in_no_checkpoint_and_in_no_artefact(teacher, straight) -> None:
    student = native.load(straight)
    saved = read_tensors(straight / "checkpoints" / f"step-{STEPS:08}" / "state.safetensors")
    learned = {name.removeprefix("model.encoder.") for name in saved if name.startswith("model.")}
    assert learned == student.state.keys()
    parts = {part: sum(name.startswith(f"{part}.") for name in saved) for part in ("model", "average", "optimizer")}
    assert parts == {"model": len(learned), "average": len(learned), "optimizer": 3 * len(learned)}
    assert sum(parts.values()) == len(saved)
    known = [tensor for tensor in native.load(teacher).state.values() if tensor.any()]
    assert not any(
        one.shape == other.shape and torch.equal(one, other) for one in known for other in saved.values() if other.any()
    )


def test_classes_in_another_order_are_the_same_teacher(tmp_path, straight) -> None:
    turned = save_teacher(tmp_path / "turned", labels=DIGITS[::-1])
    run(distilled(turned), tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_teacher_for_colours_is_fitted_to_grey_images(tmp_path) -> None:
    colours = save_teacher(tmp_path / "colours", channels=3)
    config = replace(PLAIN, schedule=replace(PLAIN.schedule, steps=2), data=replace(PLAIN.data, val_share=0.0))
    ears = Ears()
    assert run(distilled(colours, config), tmp_path / "run", watcher=ears).summary is not None
    assert "first kernel: 3 channels → 1" in ears.said


# Ranks


def torchrun(folder: Path, configs: dict[str, RunConfig]) -> None:
    """Carry out runs on two ranks."""
    jobs = []
    for name, config in configs.items():
        (folder / f"{name}.toml").write_text(to_toml(config), encoding="utf-8")
        jobs.append({"config": str(folder / f"{name}.toml"), "out": str(folder / name), "stop": None})
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("ranks.py")
    done = subprocess.run(
        [*command, str(script), str(folder / "jobs.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert not list(folder.glob("*.error"))


def test_two_ranks_with_ddp_and_with_fsdp2_learn_what_one_process_learns(tmp_path, teacher) -> None:
    # Nothing random that depends on the rank, and steps in proportion to gradients: what differs is rounding.
    alone = replace(
        PLAIN,
        model=replace(PLAIN.model, settings=SHAPE),
        augment=AugmentConfig(crop="pad", pad=1),
        optimizer=OptimizerConfig(name="sgd", average=0.9),
        schedule=replace(PLAIN.schedule, lr=0.1, accumulate=2),
    )
    alone = distilled(teacher, alone)
    modes = {mode: replace(alone, parallel=ParallelConfig(mode=mode)) for mode in ("ddp", "fsdp2")}
    torchrun(tmp_path, modes)
    run(alone, tmp_path / "alone")
    one = read_tensors(tmp_path / "alone" / "model.safetensors")
    logged = [record["loss"] for record in runlog.read(tmp_path / "alone" / "metrics.jsonl") if "loss" in record]
    for mode in modes:
        other = read_tensors(tmp_path / mode / "model.safetensors")
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5, msg=f"{mode}: {name}")
        losses = [record["loss"] for record in runlog.read(tmp_path / mode / "metrics.jsonl") if "loss" in record]
        np.testing.assert_allclose(losses, logged, rtol=0, atol=1e-5)
    assert one["head_dist.weight"].abs().max() > 1e-3  # it has learned something to compare


# What is kept


def test_a_finished_run_loads_and_answers_with_the_mean_of_both_heads(straight) -> None:
    model = vitkit.load(straight)
    assert model.labels == DIGITS
    assert model.config.tokens.distillation
    images = torch.randn(3, 1, 8, 8)
    label, teacher = model.head.both(model.features(images))
    assert not torch.equal(label, teacher)
    torch.testing.assert_close(model(images), (label + teacher) / 2)


def test_validation_in_the_run_is_that_of_the_kept_model(straight, teacher, tmp_path) -> None:
    """The wrapped model answers in evaluation as the kept one does."""
    summary = json.loads((straight / "summary.json").read_bytes())
    assert summary["judged_on"] == "test"
    config = distilled(teacher, replace(PLAIN, optimizer=OptimizerConfig(), schedule=replace(PLAIN.schedule, steps=6)))
    run(config, tmp_path / "run")
    [record] = [each for each in runlog.read(tmp_path / "run" / "metrics.jsonl") if "val_loss" in each]
    val = vitkit.load(tmp_path / "run")
    _, held_out = split(open_data("digits").splits["train"], share=config.data.val_share)
    found = answers(val, held_out, preprocessing=val.preprocess.preprocessing)
    loss = torch.nn.functional.cross_entropy(found.logits, found.labels).item()
    assert record["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory, teacher: Path) -> Path:
    """A short run of a student whose heads are 64 wide: Facebook's files do not say how many there are."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("wide") / "run"
    model = replace(PLAIN.model, settings=("width=64", "depth=1", "heads=1", "mlp_dim=16", "block.activation=gelu_erf"))
    run(distilled(teacher, replace(PLAIN, model=model, schedule=replace(PLAIN.schedule, steps=4))), out)
    return out


@pytest.mark.parametrize("to", ["timm", "deit", "huggingface-deit"])
def test_a_finished_run_is_given_away_with_both_heads_and_comes_back(wide, tmp_path, to) -> None:
    kept = load_any(wide)
    out = tmp_path / ("model.pth" if to == "deit" else "out")
    write_as(format_called(to), out, kept)
    back = load_any(out)
    assert {"head.label.weight", "head.teacher.weight", "dist_token"} <= back.state.keys()
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(back.model()(images), kept.model()(images), rtol=0, atol=1e-6)


def test_timm_answers_as_the_kept_model_does_with_both_heads(straight) -> None:
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
        run(config, out)
    assert not out.exists()  # the same folder can be used when the mistake is mended
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


def test_a_teacher_that_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(vitkit.core.errors.VitkitError, match="no trained model here"):
        run(distilled(tmp_path / "nowhere"), tmp_path / "run")


def test_students_that_cannot_have_the_token_are_errors(tmp_path, teacher) -> None:
    resnet = replace(PLAIN, model=ModelChoice(name="BiT-R50x1", image_size=32))
    assert "needs a Vision Transformer" in str(refused(distilled(teacher, resnet), tmp_path / "run"))
    mean = replace(PLAIN, model=replace(PLAIN.model, settings=(*SHAPE, "pooling=mean")))
    assert "beside the class token" in str(refused(distilled(teacher, mean), tmp_path / "run"))
    with_token = replace(PLAIN, model=replace(PLAIN.model, settings=(*SHAPE, "tokens.distillation=true")))
    assert "has a distillation token" in str(refused(distilled(teacher, with_token, token=False), tmp_path / "run"))


def test_a_sigmoid_loss_is_refused_before_images_are_looked_at(tmp_path, teacher) -> None:
    config = distilled(teacher)
    config = replace(config, objective=replace(config.objective, loss="sigmoid"), data=DataConfig(path="nowhere"))
    assert "sigmoid" in str(refused(replace(config, data=replace(config.data, channels=1)), tmp_path / "run"))


# Recipes


@pytest.mark.parametrize("model", ["Ti/16", "S/16", "B/16"])
def test_recipes_have_the_settings_of_deit(model: str) -> None:
    """The table of hyper-parameters of DeiT's paper, and its released code's defaults."""
    made = find(f"deit-{slug(model)}-distilled").make()
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
    assert choose_model(made, classes=1000, pretrained=None).tokens.distillation


def test_the_small_recipes_student_is_a_tenth_of_its_teacher() -> None:
    sizes = []
    for name in ("digits", "digits-distilled"):
        model = create(choose_model(find(name).make(), classes=10, pretrained=None), device="meta")
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes[1] < sizes[0] / 10
