"""Write the pages docs/studies/NAME.md: command, hours, claims, and the results and figures of given studies.

python tools/study_pages.py [runs/table8 runs/fig4 …]

A directory is the --out of a study; its verdicts and figure replace those of the page. What stands below "## Surprises"
is written by hand and kept, and so is the result of studies that are not given.
"""

import json
import shutil
import sys
import textwrap
from pathlib import Path

from vitkit.core.formatting import format_hours
from vitkit.studies.page import format_range
from vitkit.studies.plan import plan_runs
from vitkit.studies.registry import NAMES, find_study
from vitkit.studies.study import Study
from vitkit.zoo.cost import EXA

PAGES = Path(__file__).resolve().parents[1] / "docs" / "studies"
STATE, SURPRISES = "## Result\n", "## Surprises\n"
NOT_RUN = (
    "Not run yet. The command writes `report.html`, and the figure as `figure.png`, `figure.svg` and `figure.pdf`.\n"
)


def write_page(study: Study, result: Path | None) -> None:
    """Write the page of a study; keep its result if there is no new one."""
    page = PAGES / f"{study.name}.md"
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    _, _, surprises = before.partition(SURPRISES)
    _, _, state = before.removesuffix(SURPRISES + surprises).partition(STATE)
    state = state.strip() or NOT_RUN.strip()
    if result is not None:
        state = describe_result(result, study)
        shutil.copyfile(result / "figure.svg", PAGES / f"{study.name}.svg")
        shutil.copyfile(result / "table.csv", PAGES / f"{study.name}.csv")
    parts = [describe_study(study), f"{STATE}\n{state.strip()}\n"]
    if surprises.strip():
        parts.append(f"{SURPRISES}\n{surprises.strip()}\n")
    page.write_text("\n".join(parts), encoding="utf-8")


def describe_study(study: Study) -> str:
    """Return the part of a page that follows from the declaration."""
    paths = " ".join(f"data.{name}=PATH" for name in study.data)
    claims = "\n".join(f"| {claim.text} | {claim.expected} |" for claim in study.claims)
    seeds = (
        "Nothing is trained." if study.inspects else f"{study.seeds} seeds; `--quick` has one, which proves nothing."
    )
    notes = f" {study.notes}" if study.notes else ""
    scale = describe_paper_scale(study)
    return f"""# {study.title} ({study.name})

{study.paper} of the paper.{notes}

```sh
vitkit study {study.name} --plan
vitkit study {study.name} --out runs/{study.name} {paths}
```

Designed for {study.hours} hours on two cores. {seeds}{scale}

| claim, written before the first run | expected |
|---|---|
{claims}
"""


def describe_paper_scale(study: Study) -> str:
    """Return a sentence about the study with the paper's models, data and steps."""
    if study.at_paper_scale is None:
        return ""
    runs = plan_runs(study.at_paper_scale, data={}, settings={}, quick=False)
    total = sum(run.flops for run in runs) / EXA
    notes = f" {study.at_paper_scale.notes}" if study.at_paper_scale.notes != study.notes else ""
    text = (
        f"With `--paper-scale` the study has {len(runs)} runs of the paper's models, {total:,.0f} exaFLOPs in total."
        f"{notes}"
    )
    return "\n" + "\n".join(textwrap.wrap(text, 120))


def describe_result(out: Path, study: Study) -> str:
    """Return the state, the verdicts and the figure of a study in a directory."""
    result = json.loads((out / "result.json").read_bytes())
    runs = result["runs"]
    finished = sum(run["status"] == "finished" for run in runs)
    length = f" and {format_range(*result['steps'])} steps a run" if result["steps"] else ""
    kind = ""
    if result["quick"] and study.inspects:
        kind = f"**Checkpoints of a quick study: one seed{length}, which proves nothing.** "
    elif result["quick"]:
        kind = f"**`{describe_options(study, result['steps'])}`: one seed{length}, which proves nothing.** "
    hours = sum(json.loads(file.read_bytes())["speed"]["wall_hours"] for file in (out / "results").glob("*.json"))
    kind += f"{hours:.1f} hours on one thread of a busy machine. " if hours else ""
    left = f"; the others take about {format_hours(result['hours_left'])}" if finished < len(runs) else ""
    verdicts = "\n".join(
        f"| {claim['text']} | **{claim['verdict']}** | {claim['detail']} |" for claim in result["claims"]
    )
    return f"""{kind}{finished} of {len(runs)} runs are finished{left}.

| claim | verdict | estimate |
|---|---|---|
{verdicts}

![{result["title"]}]({study.name}.svg)

[Table of the runs]({study.name}.csv)
"""


def describe_options(study: Study, steps: list[int]) -> str:
    """Return the options of a quick study, with the steps if they are not its own."""
    planned = {run.config.schedule.steps for run in plan_runs(study, data={}, settings={}, quick=True)}
    return "--quick" if set(steps) <= planned else f"--quick schedule.steps={steps[0]}"


def main() -> None:
    """Write all pages."""
    results = {json.loads((path / "result.json").read_bytes())["study"]: path for path in map(Path, sys.argv[1:])}
    for name in NAMES:
        write_page(find_study(name), results.get(name))


if __name__ == "__main__":
    main()
