"""Script that runs several jobs on the ranks of torchrun or of jobs.py: ranks.py JOBS.json.

A job is {"config": TOML file, "out": directory, "stop": step or null}; errors are written to OUT.error.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from quick_runs import shorten_runs

from vitkit.core.config import load_toml
from vitkit.core.errors import VitkitError
from vitkit.core.signals import StopFlag
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import ParallelConfig, RunConfig
from vitkit.training.distributed import join_ranks
from vitkit.training.run import run_training


class StopAt(Callback):
    """Requests a stop after a step, as a signal would."""

    def __init__(self, stop: StopFlag, step: int | None) -> None:
        self.stop, self.step = stop, step

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.stop.signal = "SIGTERM"


def main(jobs: Path) -> None:
    torch.set_num_threads(1)
    shorten_runs()
    with join_ranks(ParallelConfig(timeout=600.0)):
        run_jobs(jobs)


def run_jobs(jobs: Path) -> None:
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        stop = StopFlag()
        config = load_toml(job["config"], RunConfig, recipes={})
        try:
            result = run_training(config, job["out"], stop=stop, callback=StopAt(stop, job["stop"]))
        except VitkitError as error:
            if os.environ["RANK"] == "0":
                Path(job["out"] + ".error").write_text(str(error), encoding="utf-8")
            continue
        if (result.summary is None) != (job["stop"] is not None) and os.environ["RANK"] == "0":
            Path(job["out"] + ".error").write_text("did not stop, or did not finish", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
