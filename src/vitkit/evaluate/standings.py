"""Accuracies of models on data sets go in; one table comes out, with the means of groups, as in the paper's Table 2."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Score:
    """The share of right answers, its 95 % interval, and of how many images."""

    top1: float
    interval: tuple[float, float] | None = None
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A data set in the table: its name, its title, and the group whose mean it counts for."""

    name: str
    title: str
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table. A mean is there only where every data set that it is of has its accuracy."""

    kind: Literal["set", "group", "mean"]
    name: str
    title: str
    of: int
    """Data sets that it is about."""
    whole: int
    """Data sets that it would be about, had none been left out."""
    scores: Mapping[str, Score]
    """By model; a model that has none is left out."""

    @property
    def about(self) -> str:
        """What a mean is of, in words."""
        return f"mean of {self.of}" + (f" of {self.whole}" if self.whole > self.of else "")


@dataclass(frozen=True, kw_only=True)
class Standings:
    """Models on data sets. `mean` is what the mean over all data sets that are in a group is called.

    >>> pets, cars = (Place(name=name, title=name.title(), group="Things") for name in ("pets", "cars"))
    >>> found = {("pets", "B/16"): Score(top1=0.9), ("cars", "B/16"): Score(top1=0.8)}
    >>> table = Standings(title="Two", models=("B/16",), places=(pets, cars), scores=found, mean="All")
    >>> [(line.title, round(line.scores["B/16"].top1, 2)) for line in table.lines()]
    [('All', 0.85), ('Things', 0.85), ('Pets', 0.9), ('Cars', 0.8)]
    """

    title: str
    models: tuple[str, ...]
    places: tuple[Place, ...]
    scores: Mapping[tuple[str, str], Score]
    """By data set and model; what is not finished is missing."""
    mean: str | None = None
    left_out: tuple[Place, ...] = ()
    """Data sets that should be there, and are not: means are of the others, and say so."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups, in the order in which they come."""
        return tuple(dict.fromkeys(place.group for place in self.places if place.group is not None))

    @property
    def is_complete(self) -> bool:
        """Whether every model has been judged on every data set."""
        return len(self.scores) == len(self.models) * len(self.places)

    def lines(self) -> Iterator[Line]:
        """The data sets that are in no group; then the mean over those that are, and each group's mean and members."""
        yield from (self._set(place) for place in self.places if place.group is None)
        grouped = [place for place in self.places if place.group is not None]
        if grouped and self.mean is not None:
            left = sum(place.group is not None for place in self.left_out)
            yield self._mean("mean", self.mean, grouped, left_out=left)
        for group in self.groups:
            inside = [place for place in grouped if place.group == group]
            yield self._mean("group", group, inside, left_out=sum(place.group == group for place in self.left_out))
            yield from map(self._set, inside)

    def means(self) -> list[Line]:
        """The lines that are means."""
        return [line for line in self.lines() if line.kind != "set"]

    def _set(self, place: Place) -> Line:
        scores = {model: self.scores[place.name, model] for model in self.models if (place.name, model) in self.scores}
        return Line(kind="set", name=place.name, title=place.title, of=1, whole=1, scores=scores)

    def _mean(self, kind: Literal["group", "mean"], title: str, places: list[Place], *, left_out: int) -> Line:
        scores = {}
        for model in self.models:
            found = [self.scores[place.name, model].top1 for place in places if (place.name, model) in self.scores]
            if len(found) == len(places):
                scores[model] = Score(top1=sum(found) / len(found))
        return Line(kind=kind, name=title, title=title, of=len(places), whole=len(places) + left_out, scores=scores)

    def to_json(self) -> dict[str, object]:
        """What `vitkit suite --json` prints: shares of 0…1, and null for a mean that is not complete."""
        group_of = {place.name: place.group for place in self.places}
        sets = [line for line in self.lines() if line.kind == "set"]
        return {
            "title": self.title,
            "complete": self.is_complete,
            "models": list(self.models),
            "left_out": [place.name for place in self.left_out],
            "results": [
                {"set": line.name, "title": line.title, "group": group_of[line.name], "model": model}
                | {"top1": score.top1, "count": score.count}
                | {"interval": None if score.interval is None else list(score.interval)}
                for line in sets
                for model, score in line.scores.items()
            ],
            "means": [
                {"name": line.title, "kind": line.kind, "sets": line.of, "whole": line.whole, "model": model}
                | {"top1": line.scores[model].top1 if model in line.scores else None}
                for line in self.means()
                for model in self.models
            ],
        }

    def to_csv(self) -> str:
        """A line for each data set and each mean, a column for each model; empty where there is no number."""
        group_of = {place.name: place.group for place in self.places}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["kind", "name", "title", "group", *self.models])
        for line in self.lines():
            numbers = [f"{line.scores[model].top1:.6f}" if model in line.scores else "" for model in self.models]
            group = (group_of[line.name] or "") if line.kind == "set" else ""
            writer.writerow([line.kind, line.name, line.title, group, *numbers])
        return text.getvalue()
