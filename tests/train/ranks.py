"""Runs several jobs on the ranks that torchrun starts: python -m torch.distributed.run … ranks.py JOBS.json.

A job is {"config": a TOML file, "out": a folder, "stop": a step or null}; what goes wrong goes to OUT.error.
"""

import json
import os
import sys
from pathlib import Path

import torch

from vitkit.core.config import load_toml
from vitkit.core.errors import VitkitError
from vitkit.core.stopping import Stop
from vitkit.train.config import ParallelConfig, RunConfig
from vitkit.train.parallel import joined
from vitkit.train.run import run
from vitkit.train.watch import Pulse, Watcher


class StopAt(Watcher):
    """Asks the run to stop after a step, as a signal would."""

    def __init__(self, stop: Stop, step: int | None) -> None:
        self.stop, self.step = stop, step

    def pulse(self, pulse: Pulse) -> None:
        if pulse.step == self.step:
            self.stop.signal = "SIGTERM"


def main(jobs: Path) -> None:
    torch.set_num_threads(1)
    with joined(ParallelConfig(timeout=100.0)):
        work(jobs)


def work(jobs: Path) -> None:
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        stop = Stop()
        config = load_toml(job["config"], RunConfig, recipes={})
        try:
            result = run(config, job["out"], stop=stop, watcher=StopAt(stop, job["stop"]))
        except VitkitError as error:
            if os.environ["RANK"] == "0":
                Path(job["out"] + ".error").write_text(str(error), encoding="utf-8")
            continue
        if (result.summary is None) != (job["stop"] is not None) and os.environ["RANK"] == "0":
            Path(job["out"] + ".error").write_text("did not stop, or did not finish", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
