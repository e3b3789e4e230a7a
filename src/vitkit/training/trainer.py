"""One training step: forward, backward and update on the next batch.

Every random number of a step is a function of (seed, step, rank), so that the steps after a checkpoint depend on its
contents alone. A step with a non-finite loss or gradient changes no weight.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.core.shapes import Float, Tensor
from vitkit.core.signals import StopFlag
from vitkit.data.augment import mix_batch, one_hot
from vitkit.data.loader import BatchLoader, ImageBatch
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.engine import TRAINING_DTYPES
from vitkit.objectives.base import Objective, PerImageRNG, SelfSupervised, training_use
from vitkit.training.checkpoint import TrainState
from vitkit.training.config import RunConfig
from vitkit.training.distributed import Ranks, gradient_sync, reshard
from vitkit.training.optim import clip_gradients, gradient_norm, learning_rate, set_learning_rate

LOG_NAMES = {"correct": "top1"}
"""Names in the log of metrics that have another name in objectives."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Results of one step, the same on every rank; `metrics` are means over images, by their names in the log."""

    loss: float
    lr: float
    gradient_norm: float
    skipped: bool
    stop: bool
    save: bool
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Trainer:
    """Model, objective and optimizer. `model` is the module to call; `state` holds its parameters by name."""

    config: RunConfig
    model: nn.Module
    objective: Objective[Any]
    state: TrainState
    ranks: Ranks
    preprocessing: Preprocessing
    num_classes: int
    total_steps: int

    def step(self, batches: BatchLoader, *, stop: StopFlag | None = None, save: bool = False) -> StepOutput:
        """Train on the next global batch. `stop` and `save` are requests of this rank that the output combines."""
        config, step = self.config, self.state.progress.step
        rng = self.seed_step(step)
        lr = learning_rate(config.schedule, step=step, total_steps=self.total_steps)
        micro_batches, scaler = config.schedule.micro_batches, self.state.scaler
        loss = count = 0.0
        sums: dict[str, float] = {}
        if not self.model.training:  # walking over all modules takes a hundredth of a small step
            self.model.train()
        for index in range(micro_batches):
            batch = next(batches)
            images, targets = self.prepare(batch, rng, index)
            with gradient_sync(self.model, enabled=index == micro_batches - 1):
                with autocast(config, self.ranks.device):
                    output = self.objective(self.model, images, targets)
                part = output.loss / micro_batches
                (scaler.scale(part) if scaler else part).backward()
            loss += output.loss.item() * len(batch.labels)
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, 0.0) + value.item()
            count += len(batch.labels)
        parameters = [parameter for group in self.state.optimizer.param_groups for parameter in group["params"]]
        if scaler:
            scaler.unscale_(self.state.optimizer)
        norm = gradient_norm(parameters)
        is_finite = bool(np.isfinite(loss)) and bool(torch.isfinite(norm))
        loss, count, not_finite, stops, saves, *totals = self.ranks.all_reduce_sum(
            [loss if is_finite else 0.0, count, not is_finite, bool(stop and stop.requested), save, *sums.values()]
        )
        if not_finite:
            self.state.progress.skipped += 1
            self.state.progress.skipped_in_a_row += 1
        else:
            if config.optimizer.clip is not None:
                clip_gradients(parameters, limit=config.optimizer.clip, norm=norm)
            self.update(lr)
        if scaler:
            # Ranks must scale alike: the gradients of one rank may be finite where those of another are not.
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor() if not_finite else None)
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.progress.step += 1
        return StepOutput(
            loss=float("nan") if not_finite else loss / count,
            metrics={LOG_NAMES.get(name, name): total / count for name, total in zip(sums, totals, strict=True)},
            lr=lr,
            gradient_norm=norm.item(),
            skipped=bool(not_finite),
            stop=bool(stops),
            save=bool(saves),
        )

    def seed_step(self, step: int) -> np.random.Generator:
        """Seed PyTorch for this step and return the generator for mixup and cutmix."""
        words = np.random.SeedSequence([self.config.seed, step, self.ranks.rank]).generate_state(4, np.uint64)
        torch.manual_seed(int(words[0]))
        return np.random.Generator(np.random.Philox(key=words[1:3]))

    def prepare(self, batch: ImageBatch, rng: np.random.Generator, index: int) -> tuple[Float[Tensor, "B C H W"], Any]:
        """Return the normalized and mixed images of micro-batch `index` on the device, and their targets.

        Self-supervised objectives make their own targets, seeded by the images' positions in the global batch.
        """
        augment = self.config.augment
        pixels = batch.pixels.to(self.ranks.device, non_blocking=True)
        images = self.preprocessing.normalize(pixels)
        if isinstance(self.objective, SelfSupervised):
            first = (self.ranks.rank * self.config.schedule.micro_batches + index) * len(pixels)
            use = training_use(self.state.progress.step)
            return images, self.objective.make_targets(
                images, pixels, rng=PerImageRNG(seed=self.config.seed, use=use, first=first)
            )
        labels = batch.labels.to(self.ranks.device, non_blocking=True)
        targets = one_hot(labels, num_classes=self.num_classes, smoothing=self.config.objective.smoothing)
        if batch.features is not None:
            targets = torch.cat([targets, batch.features.to(self.ranks.device)], dim=1)
        return mix_batch(images, targets, mixup=augment.mixup, cutmix=augment.cutmix, rng=rng)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Set the model to evaluation mode, with the moving average of its weights if there is one."""
        self.model.eval()
        with self.state.ema_weights():
            yield
        reshard(self.model)

    def update(self, lr: float) -> None:
        """Update the weights and their moving average."""
        progress = self.state.progress
        set_learning_rate(self.state.optimizer, lr)
        self.state.optimizer.step()
        if self.state.ema:
            self.state.ema.update(self.state.parameters, updates=progress.step - progress.skipped)
        progress.skipped_in_a_row = 0


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of the forward pass."""
    dtype = autocast_dtype(config)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def autocast_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the type of the forward pass; None is float32, also for a precision that is not determined."""
    return TRAINING_DTYPES.get(config.parallel.precision)
