"""Studies: the paper's experiments as grids of runs.

This module imports no torch: a signal that arrives while torch is imported must stop a study gracefully, too.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from vitkit.api.public import public
from vitkit.api.training import interruption, training_session
from vitkit.core.config import flatten_settings
from vitkit.core.errors import ConfigError, check_positive
from vitkit.core.names import NameList
from vitkit.core.signals import StopRequested
from vitkit.training.config import DataConfig
from vitkit.typing import Path, Settings

if TYPE_CHECKING:
    import torch

    from vitkit.studies.runner import StudyResult


@public
def study(  # noqa: PLR0913  the options of `vitkit study`
    name: str | Path,
    *,
    out: Path | None = None,
    data: Mapping[str, Path] | None = None,
    quick: bool = False,
    large: bool = False,
    paper_scale: bool = False,
    plan: bool = False,
    recipes: bool = False,
    jobs: int = 1,
    settings: Settings | None = None,
    device: "str | torch.device" = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> "StudyResult":
    """Run an experiment grid, or only plan it.

    The same call resumes after an interruption or a kill; finished runs are never repeated. A failed run is recorded,
    and the rest continues.

    Args:
        name: Name of a study, or a TOML file.
        out: Output directory; None is runs/NAME.
        data: Paths of the datasets by the names that the study gives them, such as upstream and downstream.
        quick: One seed, a tenth of the steps, one learning rate and fewer labels.
        large: Add the runs of the study's large form, if it has one.
        paper_scale: The paper's models, data sizes and steps, for a cluster.
        plan: Return the runs and their cost, and start nothing.
        recipes: Write each run as a recipe to OUT/recipes, and start nothing. What a cluster trained is only measured.
        jobs: Runs at the same time.
        settings: Settings of every run; `data.upstream` and such are paths as in `data`.
        device: Such as "cpu" or "cuda"; "auto" is the best that there is.
        workers: Processes that read images; None is one less than the usable cores.
        progress: False shows no progress.

    >>> import vitkit
    >>> planned = vitkit.study("table8", plan=True)
    >>> len(planned.runs), planned.runs[0].status
    (43, 'planned')
    """
    check_positive("jobs", jobs)
    sizes = {"quick": quick, "large": large, "paper_scale": paper_scale}
    chosen_sizes = [each for each, is_set in sizes.items() if is_set]
    if len(chosen_sizes) > 1:
        raise ConfigError(f"{' and '.join(chosen_sizes)} exclude each other", hint="leave out one of them")
    from vitkit.studies.registry import find_study
    from vitkit.studies.runner import export_study, plan_study, run_study

    chosen = find_study(os.fspath(name))
    chosen = chosen.make_large() if large else chosen.make_paper_scale() if paper_scale else chosen
    paths, values = split_data(data or {}, settings or {})
    extra = {"device": None if str(device) == "auto" else str(device), "workers": workers}
    values = {key: value for key, value in extra.items() if value is not None} | values
    path = FilePath("runs") / chosen.name if out is None else FilePath(out)
    if plan:
        return plan_study(chosen, out=path, data=paths, settings=values, quick=quick)
    with training_session((), progress=progress) as (_, callback, stop):
        try:
            if recipes:
                return export_study(
                    chosen, out=path, data=paths, settings=values, quick=quick, callback=callback, stop=stop
                )
            return run_study(
                chosen, out=path, data=paths, settings=values, quick=quick, jobs=jobs, callback=callback, stop=stop
            )
        except StopRequested:
            raise interruption(path, stop) from None


def split_data(data: Mapping[str, Path], settings: Settings) -> tuple[dict[str, str], dict[str, object]]:
    """Return the paths of datasets by name, and the settings of the runs.

    >>> split_data({}, {"data.upstream": "tiny", "schedule.steps": 20})
    ({'upstream': 'tiny'}, {'schedule.steps': 20})
    """
    settings_of_data = {field.name for field in fields(DataConfig)} - {"path"}
    paths, others = {name: os.fspath(path) for name, path in data.items()}, dict[str, object]()
    for key, value in flatten_settings(settings).items():
        section, _, name = key.partition(".")
        if section == "data" and name and name.partition(".")[0] not in settings_of_data:
            if name in paths:
                raise ConfigError(f"data.{name} is assigned twice")
            paths[name] = str(value)
        else:
            others[key] = value
    return paths, others


@public
def list_studies() -> NameList:
    """List the studies with their claims, runs, PFLOPs and estimated hours on this machine.

    >>> import vitkit
    >>> vitkit.list_studies()[:3]
    ['table8', 'masked', 'fig4']
    """
    from vitkit.studies.records import probe_rate
    from vitkit.studies.registry import NAMES, find_study
    from vitkit.studies.runner import plan_study

    rows, records, rate = [], list[dict[str, object]](), probe_rate()
    nowhere = FilePath("runs") / ".planned"
    for name in NAMES:
        planned = plan_study(find_study(name), out=nowhere, data={}, settings={}, quick=False, rate=rate)
        claim = planned.study.claims[0].text
        rows.append((name, str(len(planned.runs)), f"{planned.pflops:.1f}", f"{planned.hours:.1f}", claim))
        records.append(
            {
                "name": name,
                "title": planned.study.title,
                "paper": planned.study.paper,
                "claims": [each.text for each in planned.study.claims],
                "data": list(planned.study.data),
                "runs": len(planned.runs),
                "pflops": planned.pflops,
                "hours": planned.hours,
            }
        )
    return NameList(rows, heads=("study", "runs", "PFLOPs", "hours", "claim"), make_records=lambda: records)
