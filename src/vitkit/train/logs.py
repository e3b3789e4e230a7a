"""A step's numbers go in; lines in the run's logs, and in TensorBoard where it is wanted, come out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vitkit.core.errors import ConfigError
from vitkit.core.runlog import RunLog
from vitkit.train.config import KeepConfig
from vitkit.train.folder import RunFolder


@dataclass
class Logs:
    """`metrics` is the same in every repeat of a run; `speed` depends on the machine."""

    metrics: RunLog
    speed: RunLog
    board: Any = None
    """TensorBoard's writer, which has no types of its own."""

    @classmethod
    @contextmanager
    def open(cls, folder: RunFolder, keep: KeepConfig, *, step: int) -> Iterator["Logs"]:
        """Open the logs of a run that stands at `step`."""
        board = tensorboard(folder, step=step) if keep.tensorboard else None
        with RunLog(folder.metrics) as metrics, RunLog(folder.speed) as speed:
            try:
                yield cls(metrics, speed, board)
            finally:
                if board is not None:
                    board.close()

    def write_metrics(self, step: int, numbers: dict[str, float]) -> None:
        """Log what the run would say again."""
        self.metrics.write(step=step, **numbers)
        self._draw(step, numbers)

    def write_speed(self, step: int, numbers: dict[str, float]) -> None:
        """Log what it would not."""
        self.speed.write(step=step, **numbers)
        self._draw(step, numbers)

    def _draw(self, step: int, numbers: dict[str, float]) -> None:
        if self.board is not None:
            for name, number in numbers.items():
                kind, _, rest = name.partition("_")
                self.board.add_scalar(f"{rest}/val" if kind == "val" else f"{name}/train", number, step)


def tensorboard(folder: RunFolder, *, step: int) -> Any:
    """A writer of TensorBoard's files; whatever an interrupted run wrote after `step` is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an optional dependency
    except ImportError as error:
        raise ConfigError("keep.tensorboard needs TensorBoard", hint="pip install 'vitkit[track]'") from error
    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1)
