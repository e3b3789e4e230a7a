"""Checkpoints: the complete state of a run, written atomically and verified when read.

A checkpoint is a directory `step-00000120` with `state.safetensors` (parameters, optimizer state, moving average, loss
scale), `state.json` (progress) and `checksums.json`. It is written under a temporary name and renamed, so a kill leaves
the previous one intact. Tensors are stored in full whatever the number of ranks, so a run saved on two ranks resumes
on one or four.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from vitkit.core.errors import TrainingError, WeightsError, summarize
from vitkit.core.files import commit_directory, remove_temporary_files, write_json
from vitkit.core.shapes import Tensor
from vitkit.training.distributed import distribute_like, gather_full
from vitkit.training.optim import EMA
from vitkit.weights.artifact import read_tensors, write_checksums
from vitkit.weights.run_checkpoint import PROGRESS as PROGRESS_FILE
from vitkit.weights.run_checkpoint import TENSORS as TENSORS_FILE
from vitkit.weights.run_checkpoint import read_progress

SCALER_STATE = ("scale", "_growth_tracker")
"""What changes in the state of a GradScaler."""


@dataclass
class Progress:
    """Counters of a run."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class TrainState:
    """Everything that a run needs to continue exactly: parameters, optimizer state, moving average, progress."""

    parameters: dict[str, nn.Parameter]
    """All parameters of the model by name; the optimizer has those that are trained."""
    optimizer: torch.optim.Optimizer
    ema: EMA | None = None
    scaler: torch.amp.GradScaler | None = None
    """Scale of the loss, with which gradients in fp16 neither vanish nor overflow."""
    progress: Progress = field(default_factory=Progress)

    def gather_tensors(self, *, discard: bool = False) -> dict[str, Tensor]:
        """Return all tensors in full on the CPU; collective over all ranks.

        A rank with `discard` takes part, but holds only one full tensor at a time and gets an empty result.
        """
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
        if self.ema:
            tensors |= {f"ema.{name}": value for name, value in self.ema.values.items()}
        if self.scaler:
            state = self.scaler.state_dict()
            tensors |= {f"scaler.{key}": torch.tensor(state[key], dtype=torch.float64) for key in SCALER_STATE}
        gathered = ((name, gather_full(tensor)) for name, tensor in tensors.items())
        return {name: tensor.contiguous() for name, tensor in gathered if not discard}

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Replace the parameters by their moving average, if there is one, within the context."""
        if self.ema is None:
            yield
            return
        self.ema.swap(self.parameters)
        try:
            yield
        finally:
            self.ema.swap(self.parameters)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Load a saved state."""
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            section, _, name = key.partition(".")
            saved.setdefault(section, {})[name] = tensor
        if differing := sorted(saved.get("model", {}).keys() ^ self.parameters.keys()):
            raise WeightsError(f"the checkpoint is of another model: {differing[0]}")
        for name, parameter in self.parameters.items():
            parameter.copy_(distribute_like(saved["model"][name], parameter))
        for key, tensor in saved.get("optimizer", {}).items():
            name, _, item = key.rpartition(".")
            parameter = self.parameters[name]
            # Adam counts its steps in a scalar, which is on the device but never sharded.
            is_sharded = tensor.shape == parameter.shape
            value = distribute_like(tensor, parameter) if is_sharded else tensor.to(parameter.device)
            self.optimizer.state[parameter][item] = value
        if self.ema:
            for name, average in self.ema.values.items():
                average.copy_(distribute_like(saved["ema"][name], average))
        if self.scaler:
            scaling = {key: float(tensor) for key, tensor in saved["scaler"].items()}
            scaling["_growth_tracker"] = int(scaling["_growth_tracker"])
            self.scaler.load_state_dict(self.scaler.state_dict() | scaling)
        self.progress = progress


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Newest intact checkpoint (step -1 if there is none), and the errors of newer ones that are damaged."""

    step: int
    tensors: dict[str, Tensor]
    progress: Progress
    damaged: tuple[str, ...]


class Checkpoints:
    """Directory with the checkpoints of a run: the last few and the best."""

    def __init__(self, directory: Path, *, last: int = 2) -> None:
        self.directory, self.last = directory, last

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, in order."""
        matches = [re.fullmatch(r"step-(\d{8,})", entry.name) for entry in self.directory.glob("step-*")]
        return sorted(int(match[1]) for match in matches if match)

    def save(self, tensors: Mapping[str, Tensor], progress: Progress, *, best_step: int | None = None) -> None:
        """Write a checkpoint, then remove those that are neither among the last few nor the best."""
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise TrainingError(
                    f"step {progress.step} is not saved: {name} is not finite",
                    hint="lower schedule.lr; the last checkpoint is intact",
                )
        if not self.path(progress.step).exists():
            commit_directory(self.path(progress.step), lambda path: _write(path, tensors, progress))
        for step in self.steps()[: -self.last]:
            if step != best_step:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a checkpoint. A kill half-way leaves nothing that looks like one."""
        renamed = self.directory / f".{self.path(step).name}.removed.tmp"
        shutil.rmtree(renamed, ignore_errors=True)
        self.path(step).rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)

    def load(self, step: int) -> LoadedCheckpoint:
        """Load the checkpoint of a step."""
        path = self.path(step)
        counters = read_progress(path)
        progress = Progress(**{key: int(str(counters[key])) for key in vars(Progress())})
        return LoadedCheckpoint(step, read_tensors(path / TENSORS_FILE), progress, ())

    def load_newest(self) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint; None if there are no checkpoints at all."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                return replace(self.load(step), damaged=tuple(damaged))
            except (WeightsError, KeyError, ValueError) as error:
                damaged.append(summarize(error))
        return LoadedCheckpoint(-1, {}, Progress(), tuple(damaged)) if damaged else None

    def remove_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which a resumed run writes again, and temporary files."""
        for later in self.steps():
            if later > step:
                self.remove(later)
        remove_temporary_files(self.directory)


def _write(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    try:
        safetensors.torch.save_file(dict(tensors), path / TENSORS_FILE)
    except safetensors.SafetensorError as error:  # raised if the disk is full
        raise OSError(summarize(error)) from error
    write_json(path / PROGRESS_FILE, vars(progress))
    write_checksums(path, (TENSORS_FILE, PROGRESS_FILE))
