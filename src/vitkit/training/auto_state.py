"""State of a run within a time budget: what was requested, and what was found so far."""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from vitkit.core import metrics_log
from vitkit.core.config import flatten_settings, from_mapping, to_mapping
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.files import write_bytes, write_json
from vitkit.core.lock import lock_directory
from vitkit.training.budget import SCRATCH, TrialPlan, TrialRecord
from vitkit.training.config import DataConfig, RunConfig
from vitkit.training.run_dir import AUTO_DIR, FINGERPRINT_PREFIX, RunDir
from vitkit.weights.artifact import ALL_FILES, write_artifact
from vitkit.weights.run_checkpoint import read_unfinished_run

PROBE = "probe"
"""Directory of the chosen probe."""


@dataclass(frozen=True, kw_only=True)
class AutoRequest:
    """A run whose settings are to be chosen: configurations from random and from pretrained weights, and the time.

    `sources` are the initial weights to try; `fixed` the settings that were given and are not varied.
    """

    minutes: float
    scratch: RunConfig | None
    tuned: RunConfig
    sources: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    advice: str | None = None

    def key(self) -> dict[str, object]:
        """Return what must be equal for a run to be resumed."""
        settings = flatten_settings(to_mapping(self.tuned))
        chosen = {name: settings.get(name) for name in (*self.fixed, "data.path", "seed") if name != "data.workers"}
        return {"minutes": self.minutes, "settings": chosen, "scratch": self.scratch is not None}


@dataclass(kw_only=True)
class AutoState:
    """Contents of trials.json: the request, the seconds of earlier calls, and what was found so far."""

    request: dict[str, object]
    seconds: float = 0.0
    sources: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    """Settings that the probe has decided."""
    records: list[TrialRecord] = field(default_factory=list)
    probe: str | None = None
    """Name of the chosen probe, from which trials start."""
    best: str | None = None
    advice: str | None = None
    """Where to get better initial weights."""
    data: dict[str, object] = field(default_factory=dict)
    """Configuration of the data, so that a run without a config.toml is evaluated on images it has not seen."""

    def candidates(self) -> list[TrialRecord]:
        """Return the chosen probe, and the trials that are at least as accurate."""
        probe = self.find(self.probe or "")
        trials = [each for each in self.records if each.steps and (probe is None or each.top1 >= probe.top1)]
        return trials if probe is None else [probe, *trials]

    def similar_trials(self, plan: TrialPlan) -> list[TrialRecord]:
        """Return the finished trials of the same model: from random weights, or from pretrained ones."""
        return [each for each in self.records if each.steps and (each.name == SCRATCH) == plan.is_scratch]

    def find(self, name: str) -> TrialRecord | None:
        """Return the record of a finished trial."""
        return next((record for record in self.records if record.name == name), None)


def read_state(run_dir: RunDir) -> AutoState | None:
    """Return the state of a run with a time budget; None if it has none."""
    if not run_dir.trials.exists():
        return None
    stored = json.loads(run_dir.trials.read_bytes())
    return AutoState(**stored | {"records": [TrialRecord(**record) for record in stored["records"]]})


def read_data_config(run_dir: RunDir) -> DataConfig | None:
    """Return the configuration of the data of a run, also before its settings are chosen; None if there is none."""
    if run_dir.config.exists():
        return run_dir.read_config().data
    state = read_state(run_dir)
    return from_mapping(DataConfig, state.data, where=f"{run_dir.trials}: data.") if state and state.data else None


def write_state(run_dir: RunDir, state: AutoState) -> None:
    """Write the state."""
    write_json(run_dir.trials, asdict(state))


def check_same_request(run_dir: RunDir, state: AutoState | None, request: AutoRequest) -> None:
    """Raise an error if the directory holds another run."""
    hint = "choose another out (--out), or repeat the settings to resume"
    if state is None:
        if run_dir.config.exists():
            raise ConfigError(f"{run_dir.path} holds a run without a time budget", hint=hint)
        return
    old, new = (flatten_settings(each) for each in (state.request, json.loads(json.dumps(request.key()))))
    for key in old | new:
        if old.get(key) != new.get(key):
            name = key.removeprefix("settings.")
            raise ConfigError(f"{run_dir.path} holds a run with {name}={old.get(key)}, not {new.get(key)}", hint=hint)


def remove_unstarted(run_dir: RunDir) -> None:
    """Remove what a run has written before its first trial, unless another process has begun to use the directory."""
    with suppress(TrainingError), lock_directory(run_dir.path):
        for name in (AUTO_DIR, PROBE):
            shutil.rmtree(run_dir.path / name, ignore_errors=True)
        for file in (
            *(run_dir.path / name for name in ALL_FILES),
            run_dir.data,
            run_dir.bad_files,
            run_dir.trials,
            *run_dir.path.glob(f"{FINGERPRINT_PREFIX}*.npz"),
        ):
            file.unlink(missing_ok=True)


def adopt_trial(run_dir: RunDir, trial: Path, config: RunConfig, *, decisions: Sequence[str]) -> None:
    """Make a finished trial the final run: its steps and state, of which only the end of the run is missing."""
    source = RunDir(trial)
    write_json(run_dir.decisions, decisions)
    shutil.copytree(source.checkpoints, run_dir.checkpoints, dirs_exist_ok=True)
    for before, after in ((source.metrics, run_dir.metrics), (source.speed, run_dir.speed)):
        write_bytes(after, before.read_bytes())
    run_dir.write_config(replace(source.read_config(), data=config.data, checkpoint=config.checkpoint))


def keep_better_checkpoint(run_dir: RunDir, best: TrialRecord | None) -> None:
    """Put the best evaluated model of an interrupted final run into its directory, if it beats the one before it."""
    score = metrics_log.find_best(run_dir.metrics)
    if score is not None and (best is None or score[0] > best.top1):
        write_artifact(run_dir.path, read_unfinished_run(run_dir.path)[0])
