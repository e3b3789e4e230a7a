"""Studies of users: TOML files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.core.config import flatten_settings, from_mapping, read_toml
from vitkit.core.errors import ConfigError
from vitkit.studies.study import UPSTREAM, Axis, Claim, FewShot, Figure, Study, Transfer

TABLES, LISTS = ("settings", "axes", "figure", "quick", "tune_at", "transfer"), ("measures", "claims")


@dataclass(frozen=True, kw_only=True)
class StudyHeader:
    """Plain values of a study in a TOML file."""

    title: str = ""
    paper: str = ""
    data: tuple[str, ...] = (UPSTREAM,)
    seeds: int = 3
    rates: tuple[float, ...] = ()
    tune_by: str | None = None
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class TransferHeader:
    """Plain values of the second stage in a TOML file."""

    rates: tuple[float, ...] = ()


def load_study(path: Path) -> Study:
    """Read a study from a TOML file, as docs/studies describes it, and check it."""
    content: dict[str, Any] = read_toml(path)
    tables = {name: _table(content.pop(name, {}), path, name) for name in TABLES}
    lists = {name: content.pop(name, []) for name in LISTS}
    for name, value in lists.items():
        if not isinstance(value, list):
            raise ConfigError(f"{path}: {name} is not a list", expected=f"[[{name}]]", got=value)
    header = from_mapping(StudyHeader, content, where=f"{path}: ")
    axes = _read_axes(tables["axes"], path)
    measures = tuple(from_mapping(FewShot, each, where=f"{path}: measures.") for each in lists["measures"])
    claims = tuple(from_mapping(Claim, each, where=f"{path}: claims.") for each in lists["claims"])
    figure = {"column": measures[0].columns[0] if measures else "top1", "lines": next(iter(axes))} | tables["figure"]
    study = Study(
        name=path.stem,
        title=header.title or path.stem,
        paper=header.paper,
        axes=axes,
        settings=flatten_settings(tables["settings"]),
        data=tuple(dict.fromkeys((*header.data, *(measure.data for measure in measures)))),
        measures=measures,
        rates=header.rates,
        tune_by=header.tune_by,
        tune_at={axis: str(label) for axis, label in tables["tune_at"].items()},
        transfer=_read_transfer(tables["transfer"], path) if tables["transfer"] else None,
        seeds=header.seeds,
        claims=claims,
        figure=from_mapping(Figure, figure, where=f"{path}: figure."),
        quick={axis: tuple(map(str, labels)) for axis, labels in tables["quick"].items()},
        notes=header.notes,
    )
    study.check()
    return study


def _read_transfer(values: dict[str, Any], path: Path) -> Transfer:
    axes = _read_axes(_table(values.pop("axes", {}), path, "transfer.axes"), path)
    settings = flatten_settings(_table(values.pop("settings", {}), path, "transfer.settings"))
    header = from_mapping(TransferHeader, values, where=f"{path}: transfer.")
    return Transfer(axes=axes, settings=settings, rates=header.rates)


def _read_axes(axes: dict[str, Any], path: Path) -> dict[str, Axis]:
    if not axes or not all(isinstance(axis, dict) and axis for axis in axes.values()):
        raise ConfigError(f"{path}: a study needs axes", expected="tables such as [axes.family.small]", got=axes)
    return {
        name: {label: flatten_settings(_table(values, path, f"axes.{name}.{label}")) for label, values in axis.items()}
        for name, axis in axes.items()
    }


def _table(value: object, path: Path, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: {name} is not a table", expected=f"[{name}]", got=value)
    return dict(value)
