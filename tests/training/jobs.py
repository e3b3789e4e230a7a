"""Training on several ranks, which are started once for all of their jobs."""

import json
from collections.abc import Sequence
from pathlib import Path

from soak.victim import Launcher

from vitkit.core.config import to_toml
from vitkit.training.config import RunConfig

Job = tuple[str, RunConfig, int | None]
"""Name of the output directory, configuration, and the step to stop at."""


def train_on_ranks(launcher: Launcher, folder: Path, jobs: Sequence[Job], *, ranks: int) -> None:
    """Run jobs one after the other on ranks that are started once."""
    listed = []
    for number, (out, config, stop) in enumerate(jobs):
        toml = folder / f"{ranks}-{number}.toml"
        toml.write_text(to_toml(config), encoding="utf-8")
        listed.append({"config": str(toml), "out": str(folder / out), "stop": stop})
    file = folder / f"jobs-{ranks}.json"
    file.write_text(json.dumps(listed), encoding="utf-8")
    launcher.run_ranks(Path(__file__).with_name("ranks.py"), str(file), ranks=ranks, log=folder / f"output-{ranks}")
