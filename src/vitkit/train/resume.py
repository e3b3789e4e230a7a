"""A run's folder goes in; the state to go on from, and what of its last step is still to do, come out."""

from vitkit.core import runlog
from vitkit.core.errors import TrainingError
from vitkit.core.runlog import Record
from vitkit.train.folder import RunFolder
from vitkit.train.loop import goodness
from vitkit.train.parallel import Ranks
from vitkit.train.state import Checkpoints, State
from vitkit.train.watch import Watcher


def resume(state: State, checkpoints: Checkpoints, folder: RunFolder, *, ranks: Ranks, watcher: Watcher) -> None:
    """Load the newest good checkpoint, if there is one, and take back what was logged or saved after it."""
    loaded = checkpoints.newest()
    mine = loaded.step if loaded else -1
    step = ranks.agree(mine)
    if ranks.total([mine != step])[0]:
        raise TrainingError(
            "the ranks do not find the same checkpoints",
            expected=f"step {step} on every rank",
            got=f"step {mine} on rank {ranks.rank}",
            hint="--out must be a folder that all nodes share",
        )
    if loaded:
        for damage in loaded.damaged:
            watcher.warn(f"{damage}; an earlier checkpoint is used")
    if loaded and step >= 0:
        state.restore(loaded.tensors, loaded.progress)
        watcher.say(f"going on from step {step}")
    ranks.wait()
    if ranks.leads:
        checkpoints.set_aside(step)
        for log in (folder.metrics, folder.speed):
            if log.exists():
                runlog.truncate_after(log, max(step, 0))


def logged(folder: RunFolder) -> list[Record]:
    """What the metrics log holds."""
    return runlog.read(folder.metrics) if folder.metrics.exists() else []


def best_so_far(folder: RunFolder) -> tuple[float, int] | None:
    """How good the best evaluation that was logged was, and the first step that reached it."""
    best: tuple[float, int] | None = None
    for record in logged(folder):
        step = record["step"]
        if "val_loss" in record and isinstance(step, int) and (best is None or goodness(record) > best[0]):
            best = (goodness(record), step)
    return best


def was_evaluated(folder: RunFolder, step: int) -> bool:
    """Whether the log holds an evaluation of this step; a run stopped while it evaluated has none."""
    return any("val_loss" in record and record["step"] == step for record in logged(folder))
