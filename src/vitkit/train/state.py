"""The state of a run goes in, a checkpoint that is whole or not there comes out; and back, from the newest good one.

A checkpoint is a folder `step-00000120` with `state.safetensors` (parameters, optimizer state, average), `state.json`
(everything else) and `checksums.json`. It is written aside and renamed, so a kill leaves the one before. It holds full
tensors whatever the number of ranks, so a run saved on two goes on with one, or with four.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from vitkit.checkpoints.native import check_checksums, read_json, read_tensors, write_checksums, write_json
from vitkit.core.errors import TrainingError, WeightsError
from vitkit.core.files import commit_folder, remove_leftovers
from vitkit.core.shapes import Tensor
from vitkit.train.optim import Average
from vitkit.train.parallel import placed_like, whole

TENSORS, REST = "state.safetensors", "state.json"


@dataclass
class Progress:
    """Where a run stands, apart from its tensors: all of it is integers that a file of JSON holds exactly."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """All that a run must remember to go on as if it had not stopped."""

    parameters: dict[str, nn.Parameter]
    """All of the model's, by name; the optimizer moves those that learn."""
    optimizer: torch.optim.Optimizer
    average: Average | None = None
    progress: Progress = field(default_factory=Progress)

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Everything that is a tensor, in full and on the CPU; every rank must ask, and one that does not `keep` what
        it helps to gather has never more than one tensor in full, and gets nothing.
        """
        named: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named[f"optimizer.{name}.{key}"] = value
        if self.average:
            named |= {f"average.{name}": value for name, value in self.average.values.items()}
        gathered = ((name, whole(tensor)) for name, tensor in named.items())
        return {name: tensor.contiguous() for name, tensor in gathered if keep}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters be their average, where there is one, for as long as the context lasts."""
        if self.average is None:
            yield
            return
        self.average.swap(self.parameters)
        try:
            yield
        finally:
            self.average.swap(self.parameters)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Become the state that was saved."""
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            saved.setdefault(part, {})[name] = tensor
        if saved.get("model", {}).keys() != self.parameters.keys():
            missing = sorted(self.parameters.keys() ^ saved.get("model", {}).keys())
            raise WeightsError(f"the checkpoint is of another model: {missing[0]}")
        for name, parameter in self.parameters.items():
            parameter.copy_(placed_like(saved["model"][name], parameter))
        for key, tensor in saved.get("optimizer", {}).items():
            name, _, item = key.rpartition(".")
            parameter = self.parameters[name]
            # Adam counts its steps in a scalar, which is on the device but never sharded.
            sharded = tensor.shape == parameter.shape
            value = placed_like(tensor, parameter) if sharded else tensor.to(parameter.device)
            self.optimizer.state[parameter][item] = value
        if self.average:
            for name, average in self.average.values.items():
                average.copy_(placed_like(saved["average"][name], average))
        self.progress = progress


@dataclass(frozen=True)
class Loaded:
    """The newest good checkpoint, and what was wrong with newer ones."""

    step: int
    tensors: dict[str, Tensor]
    progress: Progress
    damaged: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run: the last few and the best, each whole."""

    def __init__(self, folder: Path, *, last: int = 2) -> None:
        self.folder, self.last = folder, last

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in order."""
        found = [re.fullmatch(r"step-(\d{8,})", entry.name) for entry in self.folder.glob("step-*")]
        return sorted(int(match[1]) for match in found if match)

    def save(self, tensors: Mapping[str, Tensor], progress: Progress, *, best: int | None = None) -> None:
        """Commit a checkpoint, then remove those that are neither among the last few nor the best."""
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise TrainingError(
                    f"step {progress.step}: {name} is not finite, and is not saved",
                    hint="lower schedule.lr; the last checkpoint is good",
                )
        if not self.path(progress.step).exists():
            commit_folder(self.path(progress.step), lambda folder: _write(folder, tensors, progress))
        steps = self.steps()
        for old in steps[: -self.last]:
            if old != best:
                self.remove(old)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; a kill half-way leaves nothing that looks like one."""
        doomed = self.folder / f".{self.path(step).name}.removed.tmp"
        shutil.rmtree(doomed, ignore_errors=True)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def newest(self) -> Loaded | None:
        """The newest checkpoint that is whole; damaged ones are passed over, and named."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                check_checksums(path, (TENSORS, REST))
                rest = read_json(path / REST)
                progress = Progress(**{key: int(str(rest[key])) for key in vars(Progress())})
                return Loaded(step, read_tensors(path / TENSORS), progress, tuple(damaged))
            except (WeightsError, KeyError, ValueError) as error:
                damaged.append(str(error))
        if damaged:
            return Loaded(-1, {}, Progress(), tuple(damaged))
        return None

    def set_aside(self, step: int) -> None:
        """Remove checkpoints of later steps, which a resumed run will write again."""
        for later in self.steps():
            if later > step:
                self.remove(later)
        remove_leftovers(self.folder)


def _write(folder: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    try:
        safetensors.torch.save_file(dict(tensors), folder / TENSORS)
    except safetensors.SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    write_json(folder / REST, vars(progress))
    write_checksums(folder, (TENSORS, REST))
