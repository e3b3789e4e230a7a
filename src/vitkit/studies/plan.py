"""Expansion of a study into runs with their cost. Imports no torch."""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vitkit.core.config import parse_assignments
from vitkit.core.errors import ConfigError
from vitkit.recipes.registry import find_recipe
from vitkit.studies.study import DOWNSTREAM, UPSTREAM, Axis, FewShot, Settings, Study
from vitkit.training.config import ModelChoice, RunConfig, expand_settings
from vitkit.zoo.cost import TRAINING_FACTOR
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import configure

QUICK_FACTOR = 10
"""A quick study has this many times fewer steps."""
PLAN_KEYS = ("flops", "recipe")
"""Settings of a study that are none of a run."""
MODEL_SETTINGS = "model.settings"
SHARED_KEYS = ("model.", "parallel.", "data.channels")
"""Settings of a study that hold for fine-tuning, too."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study.

    Args:
        labels: Label of each axis.
        needs: Names of runs that must be finished before.
        rates: Tuning runs by learning rate, of which the best decides this run's rate.
        is_tuned_here: The best tuning run has the labels and the seed of this run: it is measured and not repeated.
        init: Run whose weights are fine-tuned.
        counts: Whether the run is a row of the table; tuning runs and first stages are not.
    """

    name: str
    labels: Mapping[str, str]
    seed: int
    config: RunConfig
    needs: tuple[str, ...] = ()
    rates: tuple[tuple[float, str], ...] = ()
    is_tuned_here: bool = False
    init: str | None = None
    counts: bool = True
    measures: tuple[FewShot, ...] = ()

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward pass of one image."""
        return count_flops(self.config.model)

    @property
    def flops(self) -> float:
        """FLOPs of the training, without early stopping; 0 if the length is set in epochs of unknown data."""
        schedule = self.config.schedule
        steps = 0 if self.is_tuned_here else schedule.steps or 0
        return float(TRAINING_FACTOR * self.forward_flops * steps * schedule.batch_size)


@functools.cache
def count_flops(choice: ModelChoice) -> int:
    """Count the forward FLOPs of a model for ten classes."""
    if choice.name is None:
        return 0
    sizes = {"image_size": choice.image_size, "patch_size": choice.patch_size}
    settings = parse_assignments(choice.settings) | {key: size for key, size in sizes.items() if size is not None}
    return sum(count_forward_flops(configure(choice.name, num_classes=10, settings=settings)).values())


def plan_runs(study: Study, *, data: Mapping[str, str], settings: Settings, quick: bool) -> list[StudyRun]:
    """Return the runs of a study, each after those that it needs."""
    study.check()
    planner = Planner(
        study=study.make_quick() if quick else study, data=data, settings=settings, factor=QUICK_FACTOR if quick else 1
    )
    runs: dict[str, StudyRun] = {}
    for run in planner.plan():
        if runs.setdefault(run.name, run).labels != run.labels:
            raise ConfigError(f"{study.name}: two runs are called {run.name}", hint="rename one of their labels")
    return list(runs.values())


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Expansion of a study's axes into runs."""

    study: Study
    data: Mapping[str, str]
    settings: Settings
    factor: int
    configs: dict[str, RunConfig] = field(default_factory=dict)

    def plan(self) -> Iterator[StudyRun]:
        """Yield the runs, some twice, each after those that it needs; seeds are the outermost loop."""
        study = self.study
        for seed in range(study.seeds):
            for labels in cells(study.axes):
                yield from self.plan_first_stage(labels, seed)
                if study.transfer is not None:
                    for downstream in cells(study.transfer.axes):
                        yield from self.plan_transfer(labels, downstream, seed)

    def is_from_scratch(self, labels: Mapping[str, str]) -> bool:
        """Return whether some labels have no first stage."""
        return next(iter(labels.values()), None) in self.study.scratch

    def plan_first_stage(self, labels: Mapping[str, str], seed: int) -> Iterator[StudyRun]:
        """Yield a run, if it has a first stage, after those of the first seed that choose its learning rate."""
        if self.is_from_scratch(labels):
            return
        at = self.tuning_labels(labels)
        tuning = [replace(self.make_run(at, 0, lr=rate), counts=False, measures=()) for rate in self.study.rates]
        yield from tuning
        yield replace(with_rates(self.make_run(labels, seed), tuning), counts=self.study.transfer is None)

    def plan_transfer(self, labels: Mapping[str, str], downstream: Mapping[str, str], seed: int) -> Iterator[StudyRun]:
        """Yield the fine-tuning of a first-stage run, or of none, after the runs that choose its rate."""
        transfer = self.study.transfer
        assert transfer is not None
        init = None if self.is_from_scratch(labels) else run_name(labels, seed, None)
        run = self.make_transfer_run({**labels, **downstream}, seed, init)
        tuning: list[StudyRun] = []
        if transfer.rates:
            at = self.tuning_labels(labels)
            init_at = None if self.is_from_scratch(at) else run_name(at, 0, None)
            yield from self.plan_first_stage(at, 0)
            labels_at = {**at, **downstream}
            tuning = [
                replace(self.make_transfer_run(labels_at, 0, init_at, lr=rate), counts=False) for rate in transfer.rates
            ]
        yield from tuning
        yield with_rates(run, tuning)

    def tuning_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the labels at which the learning rate of some labels is chosen."""
        study, at = self.study, dict[str, str]()
        for axis, values in study.axes.items():
            label = labels[axis] if axis == study.tune_by else study.tune_at.get(axis, "")
            at[axis] = label if label in values else next(iter(values))
        return at

    def make_run(self, labels: Mapping[str, str], seed: int, *, lr: float | None = None) -> StudyRun:
        """Return the run of some labels."""
        study = self.study
        chosen = merge_settings(study.axes[axis][label] for axis, label in labels.items())
        return StudyRun(
            name=run_name(labels, seed, lr),
            labels=labels,
            seed=seed,
            config=self.configure(study.settings, chosen, data=UPSTREAM, seed=seed, lr=lr),
            measures=study.measures,
        )

    def make_transfer_run(
        self, labels: Mapping[str, str], seed: int, init: str | None, *, lr: float | None = None
    ) -> StudyRun:
        """Return the fine-tuning of a first-stage run, or the run from scratch if there is none."""
        study, transfer = self.study, self.study.transfer
        assert transfer is not None
        base = {key: value for key, value in study.settings.items() if key.startswith(SHARED_KEYS)}
        models = (
            {key: value for key, value in values[labels[axis]].items() if key.startswith("model.")}
            for axis, values in study.axes.items()
        )
        chosen = merge_settings((*models, *(values[labels[axis]] for axis, values in transfer.axes.items())))
        dataset = labels.get("dataset", DOWNSTREAM)
        return StudyRun(
            name=run_name(labels, seed, lr),
            labels=labels,
            seed=seed,
            config=self.configure({**base, **transfer.settings}, chosen, data=dataset, seed=seed, lr=lr),
            needs=(init,) if init else (),
            init=init,
        )

    def configure(self, base: Settings, chosen: Settings, *, data: str, seed: int, lr: float | None) -> RunConfig:
        """Return the configuration of a run; settings of the user come last, a quick study has fewer steps."""
        recipe = (dict(base) | dict(chosen)).get("recipe")
        start = RunConfig() if recipe is None else find_recipe(str(recipe)).make()
        values = {"data.path": data} | _run_settings(base) | _run_settings(chosen)
        if recipe is not None and "model.name" in values:
            start = start.override({"model.name": values["model.name"]})
        model = [*start.model.settings, *_texts(base.get(MODEL_SETTINGS)), *_texts(chosen.get(MODEL_SETTINGS))]
        model = list({text.partition("=")[0]: text for text in model}.values())  # the last one of a key
        path, added = str(values["data.path"]), _texts(values.get("data.add"))
        values |= {MODEL_SETTINGS: model, "data.path": self.data.get(path, path), "seed": seed}
        values |= {"data.add": [self.data.get(name, name) for name in added]} if added else {}
        key = json.dumps([recipe, values, chosen.get("flops"), lr], sort_keys=True, default=str)
        if key not in self.configs:
            self.configs[key] = self.shorten(start.override(values), chosen.get("flops"), lr=lr)
        return self.configs[key]

    def shorten(self, config: RunConfig, flops: object, *, lr: float | None) -> RunConfig:
        """Return a configuration with the steps of a compute budget and of a quick study, and the user's settings."""
        steps, values = config.schedule.steps, dict[str, object]()
        if flops is not None:
            per_step = TRAINING_FACTOR * count_flops(config.model) * config.schedule.batch_size
            values["steps"] = steps = max(1, round(float(str(flops)) / per_step))
        if steps is not None and self.factor > 1:
            values["steps"] = max(1, steps // self.factor)
            values["schedule.warmup_steps"] = config.schedule.warmup_steps // self.factor
        values = expand_settings(values) | expand_settings(dict(self.settings))
        values |= {} if lr is None else {"schedule.lr": lr}
        return config.override(values) if values else config


def with_rates(run: StudyRun, tuning: Sequence[StudyRun]) -> StudyRun:
    """Return a run whose learning rate is chosen by tuning runs."""
    return replace(
        run,
        needs=(*run.needs, *(each.name for each in tuning)),
        rates=tuple((each.config.schedule.lr, each.name) for each in tuning),
        is_tuned_here=any(each.labels == run.labels and each.seed == run.seed for each in tuning),
    )


def merge_settings(parts: Iterable[Settings]) -> dict[str, object]:
    """Return the settings of the labels of a run; settings of the model add up.

    >>> merge_settings([{"model.settings": ["depth=1"], "lr": 0.1}, {"model.settings": ["pooling=mean"], "lr": 0.2}])
    {'model.settings': ['depth=1', 'pooling=mean'], 'lr': 0.2}
    """
    merged: dict[str, object] = {}
    for part in parts:
        model = [*_texts(merged.get(MODEL_SETTINGS)), *_texts(part.get(MODEL_SETTINGS))]
        merged |= dict(part) | ({MODEL_SETTINGS: model} if model else {})
    return merged


def _run_settings(settings: Settings) -> dict[str, object]:
    """Return the settings of a run by full keys, without those that only a plan knows."""
    return expand_settings({key: value for key, value in settings.items() if key not in PLAN_KEYS})


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def cells(axes: Mapping[str, Axis]) -> Iterator[dict[str, str]]:
    """Yield the labels of every cell of a grid."""
    for labels in itertools.product(*axes.values()):
        yield dict(zip(axes, labels, strict=True))


def run_name(labels: Mapping[str, str], seed: int, lr: float | None) -> str:
    """Return the name of a run, which is that of its directory.

    >>> run_name({"family": "BiT r2", "fraction": "0.1"}, 2, None)
    'BiT-r2_0.1_seed2'
    """
    parts = [re.sub(r"[^\w.+-]+", "-", label) for label in labels.values()]
    return "_".join([*parts, *([] if lr is None else [f"lr{lr:g}"]), f"seed{seed}"])
