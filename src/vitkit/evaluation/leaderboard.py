"""Leaderboard of models on datasets, with means over groups of datasets (Table 2 of the paper)."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitkit.core.result import Result, draw

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True, kw_only=True)
class LeaderboardScore:
    """Accuracy, its 95 % interval, and the number of images."""

    top1: float
    interval: tuple[float, float] | None = None
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class LeaderboardDataset:
    """A dataset, and the group whose mean it belongs to."""

    name: str
    title: str
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """A row of the table. A mean exists only for models that have a score on all of its datasets."""

    kind: Literal["dataset", "group", "mean"]
    name: str
    title: str
    count: int
    """Datasets in the row."""
    expected: int
    """Datasets that the row would have if none were missing."""
    scores: Mapping[str, LeaderboardScore]
    """By model."""

    @property
    def description(self) -> str:
        """Return the number of datasets in a mean."""
        return f"mean of {self.count}" + (f" of {self.expected}" if self.expected > self.count else "")

    @property
    def best(self) -> float | None:
        """Return the highest accuracy."""
        return max((score.top1 for score in self.scores.values()), default=None)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Leaderboard(Result):
    """Scores of models on datasets."""

    title: str
    models: tuple[str, ...]
    datasets: tuple[LeaderboardDataset, ...]
    scores: Mapping[tuple[str, str], LeaderboardScore]
    """By dataset and model; unfinished ones are absent."""
    mean_title: str | None = None
    """Title of the mean over all datasets that are in a group."""
    missing: tuple[LeaderboardDataset, ...] = ()
    """Datasets whose images are missing; means omit them and say so."""
    report_path: Path | None = None

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw the means over groups of datasets, or the datasets if there are no groups."""
        return draw("plot_leaderboard", self)

    def highlights(self) -> dict[str, object]:
        """Return the mean accuracy of each model."""
        return {"title": self.title, **self.mean}

    @property
    def mean(self) -> dict[str, float | None]:
        """Return the mean accuracy of each model over all datasets; None if a score is missing."""
        names = [dataset.name for dataset in self.datasets]
        return {model: self._mean_top1(model, names) for model in self.models}

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the groups in order of appearance."""
        return tuple(dict.fromkeys(dataset.group for dataset in self.datasets if dataset.group is not None))

    @property
    def is_complete(self) -> bool:
        """Return whether every model has a score on every dataset."""
        return len(self.scores) == len(self.models) * len(self.datasets)

    def rows(self) -> Iterator[LeaderboardRow]:
        """Yield ungrouped datasets, the mean over grouped ones, then each group with its datasets."""
        yield from (self._dataset_row(dataset) for dataset in self.datasets if dataset.group is None)
        if self.groups and self.mean_title is not None:
            groups = [dataset.group for dataset in (*self.datasets, *self.missing) if dataset.group is not None]
            yield self._mean_row("mean", self.mean_title, groups=groups)
        for group in self.groups:
            yield self._mean_row("group", group, groups=[group])
            yield from (self._dataset_row(dataset) for dataset in self.datasets if dataset.group == group)

    def mean_rows(self) -> list[LeaderboardRow]:
        """Return the rows that are means."""
        return [row for row in self.rows() if row.kind != "dataset"]

    def _dataset_row(self, dataset: LeaderboardDataset) -> LeaderboardRow:
        name, title = dataset.name, dataset.title
        scores = {model: self.scores[name, model] for model in self.models if (name, model) in self.scores}
        return LeaderboardRow(kind="dataset", name=name, title=title, count=1, expected=1, scores=scores)

    def _mean_row(self, kind: Literal["group", "mean"], title: str, *, groups: Sequence[str]) -> LeaderboardRow:
        names = [dataset.name for dataset in self.datasets if dataset.group in groups]
        means = {model: self._mean_top1(model, names) for model in self.models}
        scores = {model: LeaderboardScore(top1=mean) for model, mean in means.items() if mean is not None}
        count = len(names)
        expected = count + sum(dataset.group in groups for dataset in self.missing)
        return LeaderboardRow(kind=kind, name=title, title=title, count=count, expected=expected, scores=scores)

    def _mean_top1(self, model: str, names: Sequence[str]) -> float | None:
        """Return the mean accuracy on some datasets; None if a score is missing."""
        values = [self.scores[name, model].top1 for name in names if (name, model) in self.scores]
        return sum(values) / len(values) if values and len(values) == len(names) else None

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit suite --json` prints; None for an incomplete mean."""
        groups = {dataset.name: dataset.group for dataset in self.datasets}
        return {
            "title": self.title,
            "complete": self.is_complete,
            "models": list(self.models),
            "missing": [dataset.name for dataset in self.missing],
            "results": [
                {"dataset": row.name, "title": row.title, "group": groups[row.name], "model": model}
                | {"top1": score.top1, "count": score.count}
                | {"interval": None if score.interval is None else list(score.interval)}
                for row in self.rows()
                if row.kind == "dataset"
                for model, score in row.scores.items()
            ],
            "means": [
                {"name": row.title, "kind": row.kind, "count": row.count, "expected": row.expected, "model": model}
                | {"top1": row.scores[model].top1 if model in row.scores else None}
                for row in self.mean_rows()
                for model in self.models
            ],
        }

    def to_csv(self) -> str:
        """Return a CSV table with a row for each dataset and mean and a column for each model."""
        groups = {dataset.name: dataset.group for dataset in self.datasets}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["kind", "name", "title", "group", *self.models])
        for row in self.rows():
            values = [f"{row.scores[model].top1:.6f}" if model in row.scores else "" for model in self.models]
            group = (groups[row.name] or "") if row.kind == "dataset" else ""
            writer.writerow([row.kind, row.name, row.title, group, *values])
        return text.getvalue()
