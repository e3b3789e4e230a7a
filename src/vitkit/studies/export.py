"""Runs of a study as recipe files: a cluster trains them in the directory of the study, which then measures them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitkit.core.files import write_csv, write_text
from vitkit.recipes.recipe import Recipe
from vitkit.studies.plan import StudyRun
from vitkit.studies.records import read_record
from vitkit.studies.study import Study
from vitkit.studies.worker import make_job
from vitkit.zoo.cost import EXA

COLUMNS = ("run", "after", "exaflops", "command")


def write_recipes(study: Study, runs: Sequence[StudyRun], out: Path, *, data: Mapping[str, str]) -> list[str]:
    """Write recipes/NAME.toml for each run that is not finished, and recipes/runs.csv.

    Returns the names of the runs that have none yet, because other runs choose their learning rate.
    """
    directory, rows, waiting = out / "recipes", list[dict[str, object]](), list[str]()
    directory.mkdir(exist_ok=True)
    by_name = {run.name: run for run in runs}
    for run in runs:
        if read_record(out, run.name) is not None:
            continue
        if not is_decided(run, by_name, out):
            waiting.append(run.name)
            continue
        job, file = make_job(run, out, data=data), directory / f"{run.name}.toml"
        command = f"torchrun --nproc-per-node 8 -m vitkit train {file} --out {job.run_dir}"
        recipe = Recipe(
            study.title,
            run.name,
            partial(replace, job.config),
            f"{study.title} ({study.paper}), {', '.join(run.labels.values())}, seed {run.seed}",
            command,
            f"{run.flops / EXA:.3g} exaFLOPs by our count; not timed",
            "a row of the study, which measures the trained model",
        )
        write_text(file, recipe.toml())
        after = run.init if run.init and read_record(out, run.init) is None else ""
        rows.append({"run": run.name, "after": after, "exaflops": run.flops / EXA, "command": command})
    write_csv(directory / "runs.csv", rows, COLUMNS)
    return waiting


def is_decided(run: StudyRun, by_name: dict[str, StudyRun], out: Path) -> bool:
    """Return whether the learning rate of a run and the directory of its initial weights are known."""
    if any(read_record(out, name) is None for _, name in run.rates):
        return False
    init = by_name.get(run.init or "")
    return init is None or not init.rates or read_record(out, init.name) is not None
