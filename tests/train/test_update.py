"""One update: what is not finite changes nothing, accumulation is the big batch, randomness belongs to the step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vitkit.core.shapes import Tensor
from vitkit.data.augment import AugmentConfig
from vitkit.data.loader import Batch, Batches
from vitkit.data.transforms import Preprocessing
from vitkit.objectives.supervised import Outcome, Supervised, SupervisedConfig
from vitkit.train.config import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from vitkit.train.make import make_trainer
from vitkit.train.parallel import Ranks
from vitkit.train.update import Trainer
from vitkit.zoo.lookup import create

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), deviation=(0.5,))
CONFIG = RunConfig(
    optimizer=OptimizerConfig(average=0.9),
    schedule=ScheduleConfig(batch_size=8, epochs=None, steps=20, lr=1e-2),
)
FRUGAL = replace(CONFIG, parallel=ParallelConfig(activation_checkpointing=True))


class Stream(Batches):
    """Batches made of random numbers that belong to their place; from a place on."""

    def __init__(self, *, micro: int = 8, start: int = 0, bad: tuple[int, ...] = ()) -> None:
        self.micro, self.place, self.bad, self.waited = micro, start, bad, 0.0

    def __next__(self) -> Batch:
        random = torch.Generator().manual_seed(self.place * self.micro // 8)
        pixels = torch.rand(8, 1, 8, 8, generator=random) * 255
        labels = torch.randint(0, 5, (8,), generator=random)
        first = self.place * self.micro % 8
        if self.place in self.bad:
            pixels[first, 0, 0, 0] = float("nan")
        self.place += 1
        return Batch(pixels[first : first + self.micro], labels[first : first + self.micro])


def trainer(config: RunConfig = CONFIG, *, dropout: float = 0.0, objective: object = None) -> Trainer:
    model = create(
        "Ti/16",
        image_size=8,
        patch_size=4,
        channels=1,
        classes=5,
        settings=("width=16", "depth=2", "heads=2", "mlp_dim=32", f"dropout.dense={dropout}"),
        generator=torch.Generator().manual_seed(0),
    )
    made = make_trainer(
        config, model, preprocessing=PREPROCESSING, classes=5, steps=20, ranks=Ranks(device=torch.device("cpu"))
    )
    if objective is not None:
        made.objective = objective
    return made


def learn(made: Trainer, stream: Stream, steps: int) -> list[float]:
    return [made.update(stream).loss for _ in range(steps)]


def snapshot(made: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.state.tensors().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class BrokenLoss(Supervised):
    """An objective whose loss is not finite."""

    def __init__(self, number: float) -> None:
        super().__init__(SupervisedConfig())
        self.number = number

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        loss, sums = super().__call__(model, images, targets)
        return Outcome(loss + self.number, sums)


class BrokenGradient(torch.autograd.Function):
    """Passes a number on, and a gradient that is not finite back."""

    @staticmethod
    def forward(context: object, number: Tensor) -> Tensor:
        return number.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class BrokenBackward(Supervised):
    """An objective with a finite loss whose gradient is not."""

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> Outcome:
        loss, sums = super().__call__(model, images, targets)
        return Outcome(BrokenGradient.apply(loss), sums)


@pytest.mark.parametrize("where", ["image", "loss nan", "loss inf", "gradient"])
def test_what_is_not_finite_changes_no_bit_and_is_counted(where) -> None:
    made = trainer()
    learn(made, Stream(), 2)
    before = snapshot(made)
    stream = Stream(start=2, bad=(2,) if where == "image" else ())
    broken = {
        "loss nan": BrokenLoss(float("nan")),
        "loss inf": BrokenLoss(float("inf")),
        "gradient": BrokenBackward(SupervisedConfig()),
    }
    good = made.objective
    made.objective = broken.get(where, good)
    update = made.update(stream)
    assert update.skipped
    assert update.loss != update.loss
    assert equal(snapshot(made), before)
    progress = made.state.progress
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (3, 1, 1)

    made.objective = good
    assert not made.update(stream).skipped
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (4, 1, 0)
    assert not equal(snapshot(made), before)


def test_a_micro_batch_that_is_not_finite_spoils_the_whole_update() -> None:
    made = trainer(replace(CONFIG, schedule=replace(CONFIG.schedule, accumulate=2)))
    before = snapshot(made)
    assert made.update(Stream(micro=4, bad=(0,))).skipped
    assert equal(snapshot(made), before)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_the_big_batch(accumulate) -> None:
    whole = trainer(replace(CONFIG, optimizer=OptimizerConfig(name="sgd")))
    schedule = replace(CONFIG.schedule, accumulate=accumulate)
    parts = trainer(replace(CONFIG, optimizer=OptimizerConfig(name="sgd"), schedule=schedule))
    left = learn(whole, Stream(), 5)
    right = learn(parts, Stream(micro=8 // accumulate), 5)
    assert left == pytest.approx(right, abs=1e-6)
    for name, parameter in whole.state.parameters.items():
        torch.testing.assert_close(parts.state.parameters[name], parameter, rtol=0, atol=1e-6)


def test_random_numbers_belong_to_the_step_and_not_to_what_went_before() -> None:
    config = replace(CONFIG, augment=AugmentConfig(mixup=0.5, cutmix=0.5))
    straight, stopped = (trainer(config, dropout=0.3) for _ in range(2))
    learn(straight, Stream(), 6)
    learn(stopped, Stream(), 3)
    saved, progress = snapshot(stopped), stopped.state.progress
    torch.rand(17)
    resumed = trainer(config, dropout=0.3)
    resumed.state.restore(saved, progress)
    learn(resumed, Stream(start=3), 3)
    assert equal(snapshot(resumed), snapshot(straight))


def test_dropout_differs_between_steps_and_ranks() -> None:
    made = trainer()
    made.reseed(1)
    first = torch.rand(4)
    made.reseed(2)
    assert not torch.equal(torch.rand(4), first)
    made.ranks = Ranks(device=torch.device("cpu"), rank=1, ranks=1)
    made.reseed(1)
    assert not torch.equal(torch.rand(4), first)


def test_each_update_drops_out_anew() -> None:
    """The same images with weights that do not move: only dropout can tell one step's loss from another's."""
    frozen = replace(CONFIG, schedule=replace(CONFIG.schedule, lr=1e-30))
    made = trainer(frozen, dropout=0.5)
    nn.init.normal_(made.state.parameters["head.weight"])  # a zero head would hide what dropout does
    losses = {made.update(Stream()).loss for _ in range(4)}
    assert len(losses) == 4


def test_the_numbers_of_an_update_are_those_of_the_batch() -> None:
    made = trainer()
    update = made.update(Stream())
    assert update.loss == pytest.approx(1.6094379, abs=1e-6), "a zero head says 1/5 of every class"
    assert update.lr == pytest.approx(1e-2)
    assert [update.stop, update.save, update.skipped] == [False, False, False]


def test_bf16_computes_in_bf16_and_learns_in_float32() -> None:
    made = trainer(replace(CONFIG, parallel=ParallelConfig(precision="bf16")))
    seen: set[torch.dtype] = set()
    made.model.blocks[0].mlp.fc1.register_forward_hook(lambda *call: seen.add(call[2].dtype))
    rough, exact = learn(made, Stream(), 20), learn(trainer(), Stream(), 20)
    assert seen == {torch.bfloat16}
    assert {tensor.dtype for tensor in made.state.tensors().values()} == {torch.float32}
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.05)


def test_recomputed_activations_change_no_bit() -> None:
    plain, frugal = trainer(dropout=0.2), trainer(FRUGAL, dropout=0.2)
    assert learn(plain, Stream(), 3) == learn(frugal, Stream(), 3)
    assert equal(snapshot(plain), snapshot(frugal))
