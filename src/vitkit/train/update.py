"""A model, an objective and a batch go in, one update of the weights comes out.

Every random number of a step is a function of (seed, step, rank), so what a run does after a step depends only on the
state that a checkpoint holds. A step in which anything is not finite changes no weight.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.core.shapes import Float, Tensor
from vitkit.core.stopping import Stop
from vitkit.data.loader import Batch, Batches
from vitkit.data.mixing import mix, one_hot
from vitkit.data.transforms import Preprocessing
from vitkit.objectives.objective import Chance, Objective, Unlabelled, training
from vitkit.train.config import RunConfig
from vitkit.train.optim import clip, gradient_norm, learning_rate, set_learning_rate
from vitkit.train.parallel import Ranks, last_of_several
from vitkit.train.state import State

IN_LOGS = {"correct": "top1"}
"""What logs call a share of images whose sum has another name."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One step's numbers, the same on every rank; `shares` by the names that logs have for them."""

    loss: float
    lr: float
    gradient_norm: float
    skipped: bool
    stop: bool
    save: bool
    shares: dict[str, float] = field(default_factory=dict)


@dataclass
class Trainer:
    """Makes updates. `model` is what is called; `state` holds the parameters that it shares."""

    config: RunConfig
    model: nn.Module
    objective: Objective[Any]
    state: State
    ranks: Ranks
    preprocessing: Preprocessing
    classes: int
    steps: int

    def update(self, batches: Batches, *, stop: Stop | None = None, save: bool = False) -> Update:
        """Learn from the next global batch; `stop` and `save` are wishes of this rank that all ranks come to know."""
        config, step = self.config, self.state.progress.step
        random = self.reseed(step)
        rate = learning_rate(config.schedule, step=step, steps=self.steps)
        micro_batches = config.schedule.accumulate
        loss = count = 0.0
        sums: dict[str, float] = {}
        if not self.model.training:  # telling every module takes a hundredth of a small step
            self.model.train()
        for number in range(micro_batches):
            batch = next(batches)
            images, targets = self.prepare(batch, random, number)
            with last_of_several(self.model, last=number == micro_batches - 1):
                with precision(config, self.ranks.device):
                    outcome = self.objective(self.model, images, targets)
                (outcome.loss / micro_batches).backward()
            loss += outcome.loss.item() * len(batch.labels)
            for name, value in outcome.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
            count += len(batch.labels)
        parameters = self.learning()
        norm = gradient_norm(parameters)
        finite = bool(np.isfinite(loss)) and bool(torch.isfinite(norm))
        loss, count, broken, stops, saves, *totals = self.ranks.total(
            [loss if finite else 0.0, count, not finite, bool(stop), save, *sums.values()]
        )
        if broken:
            self.skip()
        else:
            if config.optimizer.clip is not None:
                clip(parameters, limit=config.optimizer.clip, norm=norm)
            self.apply(rate)
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.progress.step += 1
        return Update(
            loss=float("nan") if broken else loss / count,
            shares={IN_LOGS.get(name, name): total / count for name, total in zip(sums, totals, strict=True)},
            lr=rate,
            gradient_norm=norm.item(),
            skipped=bool(broken),
            stop=bool(stops),
            save=bool(saves),
        )

    def reseed(self, step: int) -> np.random.Generator:
        """Make the random numbers of this step those that belong to it; the generator returned is for mixing images."""
        words = np.random.SeedSequence([self.config.seed, step, self.ranks.rank]).generate_state(4, np.uint64)
        torch.manual_seed(int(words[0]))
        return np.random.Generator(np.random.Philox(key=words[1:3]))

    def prepare(self, batch: Batch, random: np.random.Generator, number: int) -> tuple[Float[Tensor, "B C H W"], Any]:
        """Images on the device, normalised and mixed, and their targets; `number` is that of the micro-batch.

        Where there are no labels the objective sets its own task, by the images' places in the global batch.
        """
        augment, objective = self.config.augment, self.config.objective
        pixels = batch.pixels.to(self.ranks.device, non_blocking=True)
        images = self.preprocessing.normalise(pixels)
        if isinstance(self.objective, Unlabelled):
            first = (self.ranks.rank * self.config.schedule.accumulate + number) * len(pixels)
            chance = Chance(seed=self.config.seed, use=training(self.state.progress.step), first=first)
            return images, self.objective.set_task(images, pixels, chance=chance)
        labels = batch.labels.to(self.ranks.device, non_blocking=True)
        targets = one_hot(labels, classes=self.classes, smoothing=objective.smoothing)
        return mix(images, targets, mixup=augment.mixup, cutmix=augment.cutmix, rng=random)

    def learning(self) -> list[nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [parameter for group in self.state.optimizer.param_groups for parameter in group["params"]]

    def apply(self, rate: float) -> None:
        """Take the step."""
        progress = self.state.progress
        set_learning_rate(self.state.optimizer, rate)
        self.state.optimizer.step()
        if self.state.average:
            self.state.average.update(self.state.parameters, updates=progress.step - progress.skipped)
        progress.skipped_in_a_row = 0

    def skip(self) -> None:
        """Leave the weights as they are: something in this step was not finite."""
        self.state.progress.skipped += 1
        self.state.progress.skipped_in_a_row += 1


def precision(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of the forward pass."""
    if config.parallel.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
