"""Runs and processes as callers of public functions give them."""

from vitkit.core.environment import usable_cores
from vitkit.core.errors import check_not_negative
from vitkit.training.run_dir import RunDir
from vitkit.typing import ModelSource
from vitkit.weights.load import source_path


def find_run_dir(model: ModelSource) -> RunDir | None:
    """Return the run that a model comes from: its directory, or that of its file; None if there is no such run."""
    path = source_path(model)
    if path is None:
        return None
    run_dir = RunDir(path.parent if path.is_file() else path)
    return run_dir if run_dir.config.is_file() or run_dir.trials.is_file() else None


def resolve_workers(workers: int | None) -> int:
    """Return the number of processes that decode images; unless it is given, two, or one on a single core."""
    if workers is None:
        return min(2, usable_cores())
    check_not_negative("workers", workers)
    return workers
