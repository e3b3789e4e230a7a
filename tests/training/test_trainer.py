"""Training steps: non-finite updates, gradient accumulation, randomness, precision."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vitkit.core.shapes import Tensor
from vitkit.data.config import AugmentConfig
from vitkit.data.loader import BatchLoader, ImageBatch
from vitkit.data.preprocessing import Preprocessing
from vitkit.objectives.base import LossOutput
from vitkit.objectives.config import SupervisedConfig
from vitkit.objectives.supervised import SupervisedObjective
from vitkit.training.build import build_trainer
from vitkit.training.config import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from vitkit.training.distributed import Ranks
from vitkit.training.trainer import Trainer
from vitkit.zoo.registry import create

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,))
CONFIG = RunConfig(
    optimizer=OptimizerConfig(ema_decay=0.9),
    schedule=ScheduleConfig(batch_size=8, epochs=None, steps=20, lr=1e-2),
)
CHECKPOINTED = replace(CONFIG, parallel=ParallelConfig(activation_checkpointing=True))


class FakeLoader(BatchLoader):
    """Batches of random numbers that are a function of the batch's index."""

    def __init__(self, *, micro: int = 8, start: int = 0, bad: tuple[int, ...] = ()) -> None:
        self.micro, self.index, self.bad, self.wait_seconds = micro, start, bad, 0.0

    def __next__(self) -> ImageBatch:
        random = torch.Generator().manual_seed(self.index * self.micro // 8)
        pixels = torch.rand(8, 1, 8, 8, generator=random) * 255
        labels = torch.randint(0, 5, (8,), generator=random)
        first = self.index * self.micro % 8
        if self.index in self.bad:
            pixels[first, 0, 0, 0] = float("nan")
        self.index += 1
        return ImageBatch(pixels[first : first + self.micro], labels[first : first + self.micro])


def make_trainer(config: RunConfig = CONFIG, *, dropout: float = 0.0, objective: object = None) -> Trainer:
    model = create(
        "Ti/16",
        image_size=8,
        patch_size=4,
        channels=1,
        num_classes=5,
        settings={"width": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "dropout.dense": dropout},
        generator=torch.Generator().manual_seed(0),
    )
    trainer = build_trainer(
        config,
        model,
        preprocessing=PREPROCESSING,
        num_classes=5,
        total_steps=20,
        ranks=Ranks(device=torch.device("cpu")),
    )
    if objective is not None:
        trainer.objective = objective
    return trainer


def train_steps(trainer: Trainer, loader: FakeLoader, steps: int) -> list[float]:
    return [trainer.step(loader).loss for _ in range(steps)]


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state.gather_tensors().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class BrokenLoss(SupervisedObjective):
    """Objective with a non-finite loss."""

    def __init__(self, number: float) -> None:
        super().__init__(SupervisedConfig())
        self.number = number

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> LossOutput:
        loss, metrics = super().__call__(model, images, targets)
        return LossOutput(loss + self.number, metrics)


class BrokenGradient(torch.autograd.Function):
    """Identity with a non-finite gradient."""

    @staticmethod
    def forward(context: object, number: Tensor) -> Tensor:
        return number.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class BrokenBackward(SupervisedObjective):
    """Objective with a finite loss and a non-finite gradient."""

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> LossOutput:
        loss, metrics = super().__call__(model, images, targets)
        return LossOutput(BrokenGradient.apply(loss), metrics)


@pytest.mark.parametrize("where", ["image", "loss nan", "loss inf", "gradient"])
def test_non_finite_update_is_skipped_and_counted(where) -> None:
    trainer = make_trainer()
    train_steps(trainer, FakeLoader(), 2)
    before = snapshot(trainer)
    loader = FakeLoader(start=2, bad=(2,) if where == "image" else ())
    broken = {
        "loss nan": BrokenLoss(float("nan")),
        "loss inf": BrokenLoss(float("inf")),
        "gradient": BrokenBackward(SupervisedConfig()),
    }
    good = trainer.objective
    trainer.objective = broken.get(where, good)
    output = trainer.step(loader)
    assert output.skipped
    assert output.loss != output.loss
    assert equal(snapshot(trainer), before)
    progress = trainer.state.progress
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (3, 1, 1)

    trainer.objective = good
    assert not trainer.step(loader).skipped
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (4, 1, 0)
    assert not equal(snapshot(trainer), before)


def test_gathered_weights_are_freed_after_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 may keep them, and would then train with the averaged weights of the evaluation."""
    calls: list[str] = []

    class Sharded(nn.Sequential):
        def reshard(self) -> None:
            calls.append("reshard")

    monkeypatch.setattr("vitkit.training.distributed.FSDPModule", Sharded)
    trainer = make_trainer()
    trainer.model = Sharded(trainer.model)
    with trainer.evaluation_mode():
        calls.append("evaluate")
    assert calls == ["evaluate", "reshard"]


def test_non_finite_micro_batch_skips_the_update() -> None:
    trainer = make_trainer(replace(CONFIG, schedule=replace(CONFIG.schedule, accumulate=2)))
    before = snapshot(trainer)
    assert trainer.step(FakeLoader(micro=4, bad=(0,))).skipped
    assert equal(snapshot(trainer), before)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_equals_one_large_batch(accumulate) -> None:
    whole = make_trainer(replace(CONFIG, optimizer=OptimizerConfig(name="sgd")))
    schedule = replace(CONFIG.schedule, accumulate=accumulate)
    parts = make_trainer(replace(CONFIG, optimizer=OptimizerConfig(name="sgd"), schedule=schedule))
    left = train_steps(whole, FakeLoader(), 5)
    right = train_steps(parts, FakeLoader(micro=8 // accumulate), 5)
    assert left == pytest.approx(right, abs=1e-6)
    for name, parameter in whole.state.parameters.items():
        torch.testing.assert_close(parts.state.parameters[name], parameter, rtol=0, atol=1e-6)


def test_randomness_is_a_function_of_the_step() -> None:
    config = replace(CONFIG, augment=AugmentConfig(mixup=0.5, cutmix=0.5))
    straight, stopped = (make_trainer(config, dropout=0.3) for _ in range(2))
    train_steps(straight, FakeLoader(), 6)
    train_steps(stopped, FakeLoader(), 3)
    saved, progress = snapshot(stopped), stopped.state.progress
    torch.rand(17)
    resumed = make_trainer(config, dropout=0.3)
    resumed.state.restore(saved, progress)
    train_steps(resumed, FakeLoader(start=3), 3)
    assert equal(snapshot(resumed), snapshot(straight))


def test_seeds_differ_between_steps_and_ranks() -> None:
    trainer = make_trainer()
    trainer.seed_step(1)
    first = torch.rand(4)
    trainer.seed_step(2)
    assert not torch.equal(torch.rand(4), first)
    trainer.ranks = Ranks(device=torch.device("cpu"), rank=1, world_size=1)
    trainer.seed_step(1)
    assert not torch.equal(torch.rand(4), first)


def test_dropout_differs_between_steps() -> None:
    """With the same images and frozen weights only dropout changes the loss."""
    frozen = replace(CONFIG, schedule=replace(CONFIG.schedule, lr=1e-30))
    trainer = make_trainer(frozen, dropout=0.5)
    nn.init.normal_(trainer.state.parameters["head.weight"])  # a zero head would hide what dropout does
    losses = {trainer.step(FakeLoader()).loss for _ in range(4)}
    assert len(losses) == 4


def test_step_output_describes_the_batch() -> None:
    trainer = make_trainer()
    output = trainer.step(FakeLoader())
    assert output.loss == pytest.approx(1.6094379, abs=1e-6), "a zero head gives log 5"
    assert output.lr == pytest.approx(1e-2)
    assert [output.stop, output.save, output.skipped] == [False, False, False]


def test_bf16_computes_in_bf16_and_updates_in_float32() -> None:
    trainer = make_trainer(replace(CONFIG, parallel=ParallelConfig(precision="bf16")))
    seen: set[torch.dtype] = set()
    trainer.model.blocks[0].mlp.fc1.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    rough, exact = train_steps(trainer, FakeLoader(), 20), train_steps(make_trainer(), FakeLoader(), 20)
    assert seen == {torch.bfloat16}
    assert {tensor.dtype for tensor in trainer.state.gather_tensors().values()} == {torch.float32}
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.05)


def test_activation_checkpointing_is_bit_exact() -> None:
    plain, checkpointed = make_trainer(dropout=0.2), make_trainer(CHECKPOINTED, dropout=0.2)
    assert train_steps(plain, FakeLoader(), 3) == train_steps(checkpointed, FakeLoader(), 3)
    assert equal(snapshot(plain), snapshot(checkpointed))


FP16 = replace(CONFIG, parallel=ParallelConfig(precision="fp16"))


def test_fp16_scales_the_loss_and_learns_as_fp32() -> None:
    exact, half = make_trainer(), make_trainer(FP16)
    scaler = half.state.scaler
    assert scaler is not None
    assert scaler.get_scale() == 2.0**16
    left, right = train_steps(exact, FakeLoader(), 4), train_steps(half, FakeLoader(), 4)
    assert left == pytest.approx(right, abs=5e-3)  # fp16 has 10 bits of mantissa
    assert half.state.progress.skipped == 0
    assert exact.state.scaler is None


def test_fp16_halves_the_scale_after_an_overflow() -> None:
    trainer = make_trainer(FP16)
    before = snapshot(trainer)
    assert trainer.step(FakeLoader(bad=(0,))).skipped
    after = snapshot(trainer)
    assert after.pop("scaler.scale") == before.pop("scaler.scale") / 2
    assert equal(after, before)


def test_resumed_fp16_run_is_bit_exact() -> None:
    straight, stopped, resumed = (make_trainer(FP16) for _ in range(3))
    train_steps(straight, FakeLoader(bad=(1,)), 6)
    train_steps(stopped, FakeLoader(bad=(1,)), 3)
    saved = snapshot(stopped)
    assert saved["scaler.scale"] == 2.0**15
    assert saved["scaler._growth_tracker"] == 2
    resumed.state.restore(saved, stopped.state.progress)
    train_steps(resumed, FakeLoader(start=3), 3)
    assert equal(snapshot(resumed), snapshot(straight))
