"""A run's folder: a configuration and a place go in; the files of one run, new, interrupted or finished, come out.

config.toml · data.json · bad_files.csv · metrics.jsonl · speed.jsonl · checkpoints/ · the artefact · summary.json
"""

import dataclasses
import json
import os
from pathlib import Path

from vitkit.core.config import load_toml, to_mapping, to_toml
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.files import remove_leftovers, write_text
from vitkit.train.config import DataConfig, KeepConfig, ParallelConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, which can be fed back."""
        return self.path / "config.toml"

    @property
    def data(self) -> Path:
        """What the images were when the run began."""
        return self.path / "data.json"

    @property
    def bad_files(self) -> Path:
        """Images that could not be used, and why."""
        return self.path / "bad_files.csv"

    @property
    def metrics(self) -> Path:
        """The log of what is the same in every repeat."""
        return self.path / "metrics.jsonl"

    @property
    def speed(self) -> Path:
        """The log of what depends on the machine."""
        return self.path / "speed.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The states to resume from."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """The result; a run that has one is finished."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    @property
    def reconstructions(self) -> Path:
        """What a model that learns without labels makes of a few images, as of the last evaluation."""
        return self.path / "reconstructions.png"

    def result(self) -> dict[str, object] | None:
        """The summary of a finished run."""
        try:
            return json.loads(self.summary.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise TrainingError(f"{self.summary}: damaged", hint="delete the file and run again") from error

    def claim(self, config: RunConfig) -> None:
        """Make the folder this run's own, or find that it already is; another run's folder is an error."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise TrainingError(
                f"{self.path} is a file", expected="a folder", hint="name another folder with --out"
            ) from error
        except OSError as error:
            raise TrainingError(f"{self.path}: {error.strerror}", hint="name another folder with --out") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise TrainingError(f"{self.path}: nothing can be written here", hint="name another folder with --out")
        if self.config.exists():
            self._is_the_same_run(config)
            remove_leftovers(self.path)
            return
        others = sorted(
            entry.name for entry in self.path.iterdir() if not entry.name.startswith(".") and entry.name != "sweep"
        )
        if others:
            raise TrainingError(
                f"{self.path} holds other things: {', '.join(others[:3])}{' …' if len(others) > 3 else ''}",
                expected="an empty or new folder, or that of an earlier run",
                hint="name another folder with --out",
            )
        write_text(self.config, to_toml(config))

    def _is_the_same_run(self, config: RunConfig) -> None:
        """What decides the result must be as it was; what only says how the machine is used may have changed."""
        before = load_toml(self.config, RunConfig, recipes={})
        old, new = (_flat(to_mapping(deciding(each))) for each in (before, config))
        for key in old | new:
            if old.get(key) != new.get(key):
                raise ConfigError(
                    f"{self.path} holds a run with another {key}",
                    expected=old.get(key, "nothing"),
                    got=new.get(key, "nothing"),
                    hint="name another folder with --out, or give the same settings to go on with this one",
                )


def deciding(config: RunConfig) -> RunConfig:
    """The configuration with all that does not decide the result set to its default.

    >>> deciding(RunConfig(parallel=ParallelConfig(threads=2))) == deciding(RunConfig())
    True
    """
    data = dataclasses.replace(config.data, workers=DataConfig().workers)
    evaluations = KeepConfig(log_every=config.keep.log_every, evaluate_every=config.keep.evaluate_every)
    arithmetic = ParallelConfig(precision=config.parallel.precision)
    schedule = dataclasses.replace(config.schedule, accumulate=1)
    return dataclasses.replace(config, data=data, keep=evaluations, parallel=arithmetic, schedule=schedule)


def _flat(data: dict[str, object], *, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix=f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
