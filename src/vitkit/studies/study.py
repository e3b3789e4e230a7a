"""Studies as data: axes of settings, seeds, measures and claims. Imports no torch."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from vitkit.core.config import flatten_settings
from vitkit.core.errors import ConfigError, did_you_mean

Settings = Mapping[str, object]
Axis = Mapping[str, Settings]
"""Settings by label. `flops` is a compute budget, from which the number of steps follows, `recipe` the name of a recipe
whose settings the others change."""

SEED, LR = "seed", "lr"
RESULT_COLUMNS = ("val_top1", "top1", "flops", "images_per_second", "hours")
"""Columns that every run has; those of shots follow."""
INSPECTED_COLUMNS = ("run", "model", "family", SEED, "layer", "head", "distance")
"""Columns of a study of checkpoints."""
KINDS_OVER_X = ("steeper", "shrinks", "rises", "best_differs")
LABEL_COUNTS = {"shrinks": (2, 2), "best_differs": (2, 2), "rises": (1, None)}
"""Fewest and most labels of a claim; other kinds have two or more."""
UPSTREAM, DOWNSTREAM, RUNS = "upstream", "downstream", "runs"
"""Names of data; `runs` is the directory of another study."""
ONE_SEED = "one seed proves nothing"


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


class Condition(NamedTuple):
    """A condition on the rows of a claim: a label that an axis has, or has not."""

    axis: str
    is_equal: bool
    label: str

    def holds(self, row: Mapping[str, object]) -> bool:
        """Return whether a row meets the condition."""
        return (str(row.get(self.axis)) == self.label) == self.is_equal


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
        where: Labels of other axes, as axis=label or axis!=label; other rows are left out.
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
    def conditions(self) -> tuple[Condition, ...]:
        """`where` in parts.

        >>> claim = Claim(text="", kind="greater", column="top1", axis="a", labels=("b", "c"), where=("d!=e",))
        >>> claim.conditions
        (Condition(axis='d', is_equal=False, label='e'),)
        """
        parts = (each.partition("=") for each in self.where)
        return tuple(Condition(key.removesuffix("!"), not key.endswith("!"), label) for key, _, label in parts)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The figure: `column` over `x`, a line for each label of `lines`; without x, a row for each.

    Args:
        rows: Axes of the rows if x is not set; a color for each label of `lines`. None: a row for each label.
        fit: Draw err = a · x^−b + c with its interval, and report the parameters.
        dots: Draw every value, and a line through their means.
    """

    column: str
    lines: str
    x: str | None = None
    rows: tuple[str, ...] = ()
    log_x: bool = False
    fit: bool = False
    dots: bool = False
    x_label: str = ""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Second stage: every run of the first stage is fine-tuned on these axes; its result replaces the first one's.

    With `rates`, the learning rate is chosen as in the first stage, but for each cell of these axes.
    """

    axes: Mapping[str, Axis]
    settings: Settings = field(default_factory=dict)
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A fixed design. `axes` are crossed with each other and with the seeds.

    Args:
        paper: Figure or table of the paper.
        settings: Settings of every run.
        data: Names of the datasets; the user names their paths.
        rates: Learning rates of which one is chosen on held-out images, at the labels `tune_at`.
        tune_by: Axis for each of whose labels a rate is chosen; None chooses one for all runs.
        scratch: Labels of the first axis without a first stage.
        groups: Further columns: the first word of the label of an axis.
        base: Label that belongs to every group of its axis.
        inspects: Study whose checkpoints this one looks at, without training.
        quick: Labels that a quick study keeps, by axis.
        large: Labels that a large study adds, by axis.
        at_paper_scale: The study with the paper's models, data and steps, for a cluster.
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
    figure: Figure
    quick: Mapping[str, Sequence[str]] = field(default_factory=dict)
    large: Mapping[str, Axis] = field(default_factory=dict)
    at_paper_scale: "Study | None" = None
    paper_numbers: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None
    inspects: str | None = None
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
            return INSPECTED_COLUMNS
        return ("run", *self.all_axes, *self.groups, SEED, LR, *RESULT_COLUMNS, *few_shot)

    @property
    def pretraining_data(self) -> dict[str, tuple[str, ...]]:
        """Names of the datasets that the first stage is trained on, each with those that are added to it."""
        added: dict[str, list[str]] = {}
        for labels in itertools.product(*(axis.values() for axis in self.axes.values())):
            settings: dict[str, object] = {}
            for each in (self.settings, *labels):
                settings |= flatten_settings(each)
            path, extra = str(settings.get("data.path", UPSTREAM)), settings.get("data.add", ())
            names = added.setdefault(path, [])
            names += [str(each) for each in extra if str(each) not in names] if isinstance(extra, list | tuple) else []
        return {path: tuple(names) for path, names in added.items() if path in self.data}

    def labels_of(self, axis: str) -> tuple[str, ...]:
        """Return the labels of an axis, or the values of a column of groups."""
        if axis not in self.groups:
            return tuple(self.all_axes[axis])
        labels = (label for label in self.all_axes[self.groups[axis]] if label != self.base)
        return tuple(dict.fromkeys(map(group_label, labels)))

    def spread_base(self, rows: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the rows with those of `base` repeated for every group, as claims and figure use them."""
        result = list(rows)
        for column, axis in self.groups.items():
            shared = [row for row in result if row[axis] == self.base]
            result = [row for row in result if row[axis] != self.base]
            result += [{**row, column: label} for row in shared for label in self.labels_of(column)]
        return result

    def check(self) -> None:
        """Raise ConfigError if a claim, the figure or an option names a column, axis or label that does not exist."""
        for claim in self.claims:
            self._check_claim(claim, f"{self.name}: the claim {claim.text!r}")
        figure, where = self.figure, f"{self.name}: the figure"
        self._check_column(figure.column, where)
        self._check_axis(figure.lines, where)
        for axis in figure.rows:
            self._check_axis(axis, where)
        if figure.x is not None:
            self._check_number(figure.x, where)
        tune_at = {axis: (label,) for axis, label in self.tune_at.items()}
        for name, labels_by_axis in (("quick", self.quick), ("tune_at", tune_at)):
            for axis, labels in labels_by_axis.items():
                self._check_axis(axis, f"{self.name}: {name}")
                self._check_labels(axis, labels, f"{self.name}: {name}")
        if self.tune_by is not None:
            self._check_axis(self.tune_by, f"{self.name}: tune_by")

    def _check_claim(self, claim: Claim, where: str) -> None:
        self._check_column(claim.column, where)
        for axis in (claim.axis, *(each.axis for each in claim.conditions), *filter(None, (claim.best_of,))):
            self._check_axis(axis, where)
        if claim.kind in KINDS_OVER_X:
            if claim.x is None:
                raise ConfigError(f"{where}: {claim.kind} needs x, a numeric axis or column")
            self._check_number(claim.x, where)
        low, high = LABEL_COUNTS.get(claim.kind, (2, None))
        if len(claim.labels) < low or (high is not None and len(claim.labels) > high):
            expected = f"{low}" if low == high else f"at least {low}"
            raise ConfigError(
                f"{where}: {claim.kind} has a wrong number of labels", expected=expected, got=claim.labels
            )
        if not self.inspects:
            self._check_labels(claim.axis, claim.labels, where)
            for condition in claim.conditions:
                self._check_labels(condition.axis, (condition.label,), where)

    def _check_labels(self, axis: str, labels: Iterable[str], where: str) -> None:
        expected = self.labels_of(axis)
        for label in labels:
            if label not in expected:
                hint = did_you_mean(label, expected)
                raise ConfigError(
                    f"{where}: {axis} has no such label", expected=", ".join(expected), got=label, hint=hint
                )

    def _check_axis(self, axis: str, where: str) -> None:
        axes = self.columns if self.inspects else (*self.all_axes, *self.groups)
        if axis not in axes:
            hint = did_you_mean(axis, axes) or f"the axes are {', '.join(axes)}"
            raise ConfigError(f"{where} is about an axis that does not exist", got=axis, hint=hint)

    def _check_number(self, column: str, where: str) -> None:
        if column not in self.all_axes:
            self._check_column(column, where)
            return
        for label in self.all_axes[column]:
            try:
                float(label)
            except ValueError:
                raise ConfigError(f"{where}: x={column} has a label that is no number", got=label) from None

    def _check_column(self, column: str, where: str) -> None:
        if column not in self.columns:
            hint = did_you_mean(column, self.columns) or f"the columns are {', '.join(self.columns)}"
            raise ConfigError(f"{where} is about a column that does not exist", got=column, hint=hint)

    def make_quick(self) -> "Study":
        """Return the study with one seed, the labels of `quick`, claims about these, and the middle learning rate."""

        def keep(axes: Mapping[str, Axis]) -> dict[str, Axis]:
            return {
                axis: {label: values[label] for label in self.quick.get(axis, values)} for axis, values in axes.items()
            }

        def set_rate(settings: Settings, rates: Sequence[float]) -> Settings:
            return {**settings, "schedule.lr": rates[len(rates) // 2]} if rates else settings

        transfer = self.transfer
        if transfer is not None:
            settings = set_rate(transfer.settings, transfer.rates)
            transfer = replace(transfer, axes=keep(transfer.axes), settings=settings, rates=())
        quick = replace(self, axes=keep(self.axes), transfer=transfer, seeds=1)
        quick = replace(quick, settings=set_rate(self.settings, self.rates), rates=())
        used = (*quick.all_axes.values(), *quick.pretraining_data.values())
        left_out = set[str]().union(*self.all_axes.values()).difference(*used)
        quick = replace(quick, data=tuple(name for name in self.data if name not in left_out))
        return replace(quick, claims=tuple(map(quick._reduce_claim, self.claims)))

    def make_large(self) -> "Study":
        """Return the study with the labels of `large`, which take more compute."""
        if not self.large:
            raise ConfigError(f"{self.name} has no large form", hint="leave out --large")
        axes = {axis: {**values, **self.large.get(axis, {})} for axis, values in self.axes.items()}
        return replace(self, axes=axes, large={})

    def make_paper_scale(self) -> "Study":
        """Return the study with the paper's models, data and steps."""
        if self.at_paper_scale is None:
            raise ConfigError(f"{self.name} trains nothing at the paper's scale", hint="leave out --paper-scale")
        return self.at_paper_scale

    def _reduce_claim(self, claim: Claim) -> Claim:
        """Return a claim about those of its labels that the study has, if there are enough."""
        if self.inspects:
            return claim
        labels = tuple(label for label in claim.labels if label in self.labels_of(claim.axis))
        where = tuple(
            text
            for text, condition in zip(claim.where, claim.conditions, strict=True)
            if condition.is_equal or condition.label in self.labels_of(condition.axis)
        )
        return replace(claim, labels=labels, where=where) if len(labels) > 1 else claim


def is_fraction(column: str) -> bool:
    """Return whether a column is an accuracy."""
    return column in ("val_top1", "top1") or column.endswith("shot")


def group_label(label: str) -> str:
    """Return the first word of a label."""
    return label.partition(" ")[0]
