"""Studies as data: axes of settings, seeds, measures and claims, and the runs that follow. Imports no torch."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitkit.core.config import flatten_settings, from_mapping, parse_assignments, read_toml
from vitkit.core.errors import ConfigError, did_you_mean
from vitkit.training.config import RunConfig, expand_settings
from vitkit.zoo.cost import TRAINING_FACTOR
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import configure

Settings = Mapping[str, object]
Axis = Mapping[str, Settings]
"""Settings by label. The key `flops` is a compute budget, from which the number of steps follows."""

SEED, LR = "seed", "lr"
RESULT_COLUMNS = ("val_top1", "top1", "flops", "images_per_second", "hours")
"""Columns that every run has; those of shots follow."""
UPSTREAM, DOWNSTREAM = "upstream", "downstream"
QUICK_FACTOR = 10
"""A quick study has this many times fewer steps."""
ONE_SEED = "one seed proves nothing: run the study without --quick"


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """Few-shot accuracy on a dataset: the mean over `draws` of the shots, on cached features."""

    data: str = DOWNSTREAM
    shots: tuple[int, ...] = (5, 10)
    draws: int = 10

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the table."""
        return tuple(f"{self.data}_{shots}shot" for shots in self.shots)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement about the table that is tested over seeds.

    Args:
        kind: "greater": left − right > margin. "equal": all labels within ±margin of the first. "order": each label
            above the next. "steeper": the slope of left over log10 of `x` is above that of right. "shrinks": left −
            right falls with log10 of `x`. "rises": the column rises with log10 of `x`. "best_differs": the
            labels have different best values of `x`.
        column: Measured column, a fraction; margins are fractions too.
        axis: Axis of the labels.
        where: Labels of other axes; rows with other labels are left out.
        x: Numeric column or axis.
        best_of: Axis of which each label uses its best value, by val_top1.
        logits: Use the logit of the column for slopes.
        expected: What we expect at this scale, written before the first run.
    """

    text: str
    kind: Literal["greater", "equal", "order", "steeper", "shrinks", "rises", "best_differs"]
    column: str
    axis: str
    labels: tuple[str, ...]
    where: tuple[str, ...] = ()
    margin: float = 0.0
    x: str | None = None
    best_of: str | None = None
    logits: bool = False
    expected: str = "shows"

    @property
    def conditions(self) -> dict[str, str]:
        """`where` as a mapping."""
        return {key: str(value) for key, _, value in (each.partition("=") for each in self.where)}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The figure: `column` over `x`, a line or group of dots for each label of `lines`."""

    column: str
    lines: str
    x: str | None = None
    log_x: bool = False
    fit: bool = False
    x_label: str = ""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Second stage: every run of the first stage is fine-tuned on these axes; its result replaces the first one's."""

    axes: Mapping[str, Axis]
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A fixed design. `axes` are crossed with each other and with the seeds.

    Args:
        paper: Figure or table of the paper.
        settings: Settings of every run.
        data: Where each kind of data was expected when the study was designed; the user names the paths.
        rates: Learning rates of which one is chosen for each label of `tune_by`, on held-out images at `tune_at`.
        scratch: Labels of the first axis without a first stage.
        quick: Labels that a quick study keeps, by axis.
        paper_numbers: The paper's own numbers by label of the figure's lines.
        hours: Designed hours on two cores.
    """

    name: str
    title: str
    paper: str
    axes: Mapping[str, Axis]
    settings: Settings = field(default_factory=dict)
    data: tuple[str, ...] = (UPSTREAM,)
    measures: tuple[FewShot, ...] = ()
    rates: tuple[float, ...] = ()
    tune_by: str | None = None
    tune_at: Mapping[str, str] = field(default_factory=dict)
    transfer: Transfer | None = None
    scratch: tuple[str, ...] = ()
    seeds: int = 3
    claims: tuple[Claim, ...] = ()
    figure: Figure = Figure(column="top1", lines="")
    quick: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paper_numbers: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    """Further columns: the first word of the label of an axis."""
    inspects: str | None = None
    """Study whose checkpoints this one looks at, without training."""
    hours: str = ""
    notes: str = ""

    @property
    def all_axes(self) -> dict[str, Axis]:
        """Axes of both stages."""
        return dict(self.axes) | (dict(self.transfer.axes) if self.transfer else {})

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table."""
        few_shot = tuple(column for measure in self.measures for column in measure.columns)
        if self.inspects:
            return ("run", "family", SEED, "layer", "distance")
        return ("run", *self.all_axes, *self.groups, SEED, LR, *RESULT_COLUMNS, *few_shot)

    def labels_of(self, axis: str) -> tuple[str, ...]:
        """Return the labels of an axis, or the values of a column of groups."""
        if axis in self.groups:
            return tuple(dict.fromkeys(group_label(label) for label in self.all_axes[self.groups[axis]]))
        return tuple(self.all_axes[axis])

    def check(self) -> None:
        """Raise ConfigError if a claim or the figure names a column or label that does not exist."""
        for claim in self.claims:
            where = f"{self.name}: the claim {claim.text!r}"
            self._check_column(claim.column, where)
            for axis in (claim.axis, *claim.conditions, *filter(None, (claim.best_of,))):
                if axis not in (*self.all_axes, *self.groups, *((*self.columns,) if self.inspects else ())):
                    hint = did_you_mean(axis, (*self.all_axes, *self.groups))
                    raise ConfigError(f"{where} is about an axis that does not exist", got=axis, hint=hint)
            if claim.x is not None and claim.x not in self.all_axes:
                self._check_column(claim.x, where)
            if self.inspects:
                continue
            for axis, label in (*((claim.axis, each) for each in claim.labels), *claim.conditions.items()):
                if label not in self.labels_of(axis):
                    hint = did_you_mean(label, self.labels_of(axis))
                    expected = ", ".join(self.labels_of(axis))
                    raise ConfigError(f"{where}: {axis} has no label", expected=expected, got=label, hint=hint)
        self._check_column(self.figure.column, f"{self.name}: the figure")

    def _check_column(self, column: str, where: str) -> None:
        if column not in self.columns:
            hint = did_you_mean(column, self.columns) or f"the columns are {', '.join(self.columns)}"
            raise ConfigError(f"{where} is about a column that does not exist", got=column, hint=hint)

    def make_quick(self) -> "Study":
        """Return the study with one seed and the labels of `quick`."""
        kept = {
            axis: {label: values[label] for label in self.quick.get(axis, values)} for axis, values in self.axes.items()
        }
        transfer = self.transfer
        if transfer is not None:
            axes = {
                axis: {label: values[label] for label in self.quick.get(axis, values)}
                for axis, values in transfer.axes.items()
            }
            transfer = replace(transfer, axes=axes)
        return replace(self, axes=kept, transfer=transfer, seeds=1)


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study.

    Args:
        labels: Label of each axis.
        needs: Names of runs that must be finished before.
        rates: Names of tuning runs by learning rate, of which the best decides this run's rate.
        counts: Whether the run is a row of the table; tuning runs and first stages are not.
    """

    name: str
    labels: Mapping[str, str]
    seed: int
    config: RunConfig
    needs: tuple[str, ...] = ()
    rates: tuple[tuple[float, str], ...] = ()
    init: str | None = None
    counts: bool = True
    measures: tuple[FewShot, ...] = ()

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward pass of one image."""
        return count_flops(self.config)

    @property
    def flops(self) -> float:
        """FLOPs of the training, without early stopping; 0 if the length is set in epochs of unknown data."""
        schedule = self.config.schedule
        return float(TRAINING_FACTOR * self.forward_flops * (schedule.steps or 0) * schedule.batch_size)


def count_flops(config: RunConfig) -> int:
    """Count the forward FLOPs of the model of a configuration, for ten classes."""
    choice = config.model
    if choice.name is None:
        return 0
    sizes = {"image_size": choice.image_size, "patch_size": choice.patch_size}
    settings = parse_assignments(choice.settings) | {key: size for key, size in sizes.items() if size is not None}
    model = configure(choice.name, num_classes=10, settings=settings)
    return sum(count_forward_flops(model).values())


def plan_runs(study: Study, *, data: Mapping[str, str], settings: Settings, quick: bool) -> list[StudyRun]:
    """Return the runs of a study, each after those that it needs."""
    study.check()
    if quick:
        study = study.make_quick()
    planner = Planner(study=study, data=data, settings=settings, factor=QUICK_FACTOR if quick else 1)
    runs: dict[str, StudyRun] = {}
    for run in planner.plan():
        runs.setdefault(run.name, run)
    return list(runs.values())


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Expansion of a study's axes into runs."""

    study: Study
    data: Mapping[str, str]
    settings: Settings
    factor: int

    def plan(self) -> Iterator[StudyRun]:
        """Yield the runs in an order in which those that are needed come first; seeds are the outermost loop."""
        study = self.study
        for seed in range(study.seeds):
            for labels in cells(study.axes):
                first = None
                if next(iter(labels.values()), None) not in study.scratch:
                    tuning = list(self.tuning_runs(labels))
                    yield from tuning
                    first = self.make_run(labels, seed, study.axes, tuning=tuning)
                    yield replace(first, counts=study.transfer is None)
                if study.transfer is not None:
                    for more in cells(study.transfer.axes):
                        yield self.transfer_run(labels | more, seed, first)

    def tuning_runs(self, labels: Mapping[str, str]) -> Iterator[StudyRun]:
        """Yield the runs of the first seed with each learning rate, at the labels that the rate is chosen at."""
        study = self.study
        if not study.rates:
            return
        chosen = {
            axis: study.tune_at.get(axis, label) if label in study.axes[axis] else label
            for axis, label in labels.items()
        }
        at = {axis: label if label in study.axes[axis] else labels[axis] for axis, label in chosen.items()}
        for axis in study.axes:
            if axis != study.tune_by and axis not in study.tune_at:
                at[axis] = next(iter(study.axes[axis]))
        for rate in study.rates:
            yield replace(self.make_run(at, 0, study.axes, lr=rate), counts=False, measures=())

    def make_run(
        self,
        labels: Mapping[str, str],
        seed: int,
        axes: Mapping[str, Axis],
        *,
        lr: float | None = None,
        tuning: Sequence[StudyRun] = (),
    ) -> StudyRun:
        """Return the run of some labels."""
        chosen: dict[str, object] = {}
        for axis, label in labels.items():
            chosen |= axes[axis][label]
        config = self.configure(self.study.settings, chosen, data=self.data.get(UPSTREAM, UPSTREAM), seed=seed, lr=lr)
        return StudyRun(
            name=run_name(labels, seed, lr),
            labels=labels,
            seed=seed,
            config=config,
            needs=tuple(run.name for run in tuning),
            rates=tuple((run.config.schedule.lr, run.name) for run in tuning),
            measures=self.study.measures,
        )

    def transfer_run(self, labels: Mapping[str, str], seed: int, first: StudyRun | None) -> StudyRun:
        """Return the fine-tuning of a first-stage run, or the run from scratch if there is none."""
        transfer = self.study.transfer
        assert transfer is not None
        chosen: dict[str, object] = {}
        for axis in self.study.axes:
            values = self.study.axes[axis][labels[axis]]
            chosen |= {key: value for key, value in values.items() if key.startswith("model.")}
        dataset = labels.get("dataset", DOWNSTREAM)
        for axis in transfer.axes:
            chosen |= transfer.axes[axis][labels[axis]]
        base = {
            key: value for key, value in self.study.settings.items() if key.startswith(("model.", "parallel.", "data."))
        }
        config = self.configure(
            base | dict(transfer.settings), chosen, data=self.data.get(dataset, dataset), seed=seed, lr=None
        )
        return StudyRun(
            name=run_name(labels, seed, None),
            labels=labels,
            seed=seed,
            config=config,
            needs=(first.name,) if first else (),
            init=first.name if first else None,
        )

    def configure(self, base: Settings, chosen: Settings, *, data: str, seed: int, lr: float | None) -> RunConfig:
        """Return the configuration of a run; settings of the user come last, a quick study has fewer steps."""
        values = expand_settings(dict(base)) | expand_settings(
            {key: value for key, value in chosen.items() if key != "flops"}
        )
        model = [*_texts(base.get("model.settings")), *_texts(chosen.get("model.settings"))]
        values |= {"model.settings": model, "data.path": data, "seed": seed}
        config = RunConfig().override(values)
        if "flops" in chosen:
            per_step = TRAINING_FACTOR * count_flops(config) * config.schedule.batch_size
            config = config.override({"steps": max(1, round(float(str(chosen["flops"])) / per_step))})
        if config.schedule.steps is not None and self.factor > 1:
            warmup = config.schedule.warmup_steps // self.factor
            steps = max(1, config.schedule.steps // self.factor)
            config = config.override({"steps": steps, "schedule.warmup_steps": warmup})
        user = expand_settings(dict(self.settings))
        config = config.override(user)
        return config if lr is None else config.override({"lr": lr})


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def group_label(label: str) -> str:
    """Return the first word of a label."""
    return label.partition(" ")[0]


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


# Studies of users


@dataclass(frozen=True, kw_only=True)
class StudyHeader:
    """Plain values of a study in a TOML file."""

    title: str = ""
    paper: str = ""
    seeds: int = 3
    rates: tuple[float, ...] = ()
    tune_by: str | None = None
    notes: str = ""


def load_study(path: Path) -> Study:
    """Read a study from a TOML file: [settings], [axes.NAME.LABEL], [[measures]], [[claims]], [figure], [quick]."""
    content: dict[str, Any] = read_toml(path)
    tables: dict[str, Any] = {
        name: content.pop(name, default)
        for name, default in (
            ("settings", {}),
            ("axes", {}),
            ("measures", []),
            ("claims", []),
            ("figure", {}),
            ("quick", {}),
        )
    }
    header = from_mapping(StudyHeader, content, where=f"{path}: ")
    axes = tables["axes"]
    if not isinstance(axes, dict) or not axes or not all(isinstance(axis, dict) and axis for axis in axes.values()):
        raise ConfigError(f"{path}: a study needs axes", expected="tables such as [axes.family.small]", got=axes)
    lists = {name: tables[name] for name in ("measures", "claims")}
    for name, value in lists.items():
        if not isinstance(value, list):
            raise ConfigError(f"{path}: {name} is not a list", expected=f"[[{name}]]")
    first = next(iter(axes))
    study = Study(
        name=path.stem,
        title=header.title or path.stem,
        paper=header.paper,
        axes={axis: {label: dict(values) for label, values in labels.items()} for axis, labels in axes.items()},
        settings=_flat(tables["settings"]),
        measures=tuple(from_mapping(FewShot, each, where=f"{path}: measures.") for each in lists["measures"]),
        claims=tuple(_read_claim(each, path) for each in lists["claims"]),
        figure=from_mapping(
            Figure, {"column": "top1", "lines": first} | dict(_mapping(tables["figure"])), where=f"{path}: figure."
        ),
        quick={axis: tuple(map(str, labels)) for axis, labels in tables["quick"].items()},
        seeds=header.seeds,
        rates=header.rates,
        tune_by=header.tune_by,
        notes=header.notes,
        data=tuple(dict.fromkeys((UPSTREAM, *(each.get("data", DOWNSTREAM) for each in lists["measures"])))),
    )
    study.check()
    return study


def _read_claim(values: Mapping[str, object], path: Path) -> Claim:
    return from_mapping(Claim, values, where=f"{path}: claims.")


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _flat(value: object) -> dict[str, object]:
    return flatten_settings(_mapping(value))
