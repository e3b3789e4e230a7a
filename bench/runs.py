"""Time and memory of listing training runs in the server.

python bench/runs.py poll        first and second list of 1,000 runs
python bench/runs.py hostile     a configuration of 40 kB with a key of 20,000 parts
"""

import resource
import tempfile
import time
from pathlib import Path

import click

from vitkit.core.config import to_toml
from vitkit.server.runs_api import RunsDirectory
from vitkit.training.config import RunConfig

RUNS, RECORDS = 1000, 200


@click.group()
def main() -> None:
    """Measure listing training runs."""


@main.command()
def poll() -> None:
    """Time two lists of runs that did not change in between."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(RUNS):
            run = Path(folder, f"run-{number}")
            run.mkdir()
            (run / "config.toml").write_text(to_toml(RunConfig()), encoding="utf-8")
            (run / "data.json").write_text('{"images": {"train": 50000}}', encoding="utf-8")
            lines = (f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, RECORDS))
            (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        directory = RunsDirectory(Path(folder))
        for label in ("first", "second", "third"):
            start = time.process_time()
            directory.list_runs()
            click.echo(f"{label:6}  {time.process_time() - start:.3f} CPU s for {RUNS:,} runs")


@main.command()
def hostile() -> None:
    """Measure CPU time and memory for a long dotted key."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.toml").write_text(f"{'a.' * 20_000}b = 1\n", encoding="utf-8")
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        RunsDirectory(Path(folder)).list_runs()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        click.echo(f"{time.process_time() - start:.2f} CPU s, {(after - before) / 1024:.1f} MiB more at the peak")


if __name__ == "__main__":
    main()
