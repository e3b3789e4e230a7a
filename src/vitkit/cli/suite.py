"""`vitkit suite`: models and a list of data sets go in; each is fine-tuned and judged on each, one table comes out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from vitkit.cli.machine import prepare_for_training
from vitkit.cli.output import print_json, result_console, safe_text, talk_console
from vitkit.core.stopping import SAVED_AND_STOPPED, listening

if TYPE_CHECKING:
    from vitkit.evaluate.standings import Line, Standings
    from vitkit.recipes.suites import Suite
    from vitkit.train.suite import Part


@click.command("suite")
@click.argument("suite", metavar="NAME|FILE.toml")
@click.argument("assignments", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The suite's folder, new or to go on with.")
@click.option("--weights", multiple=True, help="A model to begin from, or several: give it again.")
@click.option("--data", "root", help="The folder that the data sets lie in.")
@click.option("--only", help="Some of the data sets, such as pets,flowers.")
@click.option("--rates", help="Learning rates to try on every data set; the recipes' own where not given.")
@click.option("--skip-missing", is_flag=True, help="Leave out data sets that are not there.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(
    suite: str,
    assignments: tuple[str, ...],
    out: Path,
    weights: tuple[str, ...],
    root: str | None,
    only: str | None,
    rates: str | None,
    skip_missing: bool,
    as_json: bool,
) -> None:
    """Fine-tune and judge models on every data set of a suite, and put all of it in one table and one picture.

    A suite is vtab-1k, table2 (the paper's Table 2), or a TOML file. For each model and data set it sweeps the learning
    rate, runs on everything and judges on the test images. What is finished is not run again: after Ctrl-C, the same
    command goes on. The table is also in the folder, as suite.csv, suite.json, picture.svg and report.html.

    \b
    vitkit suite vtab-1k --weights ViT-B_16.npz --data vtab-1k --out runs/vtab
    vitkit suite table2 --weights ViT-B_16.npz --weights ViT-L_16.npz --data data --out runs/table2 --only pets,flowers
    vitkit suite mine.toml --out runs/mine steps=100
    """
    leads = os.environ.get("RANK", "0") == "0"
    with listening() as stop:
        prepare_for_training()
        from vitkit.cli.watching import Shown
        from vitkit.recipes.suites import standings
        from vitkit.train.suite import carry_out, finished

        work = resolve(
            suite, assignments, weights=weights, root=root, only=only, rates=rates, skip_missing=skip_missing
        )
        before, others = finished(work.before, out)
        for name, path in work.left_out.items():
            talk_console().print(safe_text(f"warning: left out {name}: there is no {path}"), style="yellow")
        for other in others:
            talk_console().print(safe_text(f"warning: not in the table: {other}"), style="yellow", soft_wrap=True)
        with Shown() as watcher:
            outcome = carry_out(work.todo, out, parallel=work.todo[0].config.parallel, watcher=watcher, stop=stop)
    if leads:
        table = standings(work.suite, before | dict(outcome.scores), left_out=work.left_out)
        keep(table, out)
        if outcome.finished:
            show(table, out, as_json=as_json)
    if not outcome.finished:
        if leads:
            talk_console().print(f"stopped by {stop.signal or 'another rank'}; run the same command again to go on")
        click.get_current_context().exit(SAVED_AND_STOPPED)


class Work(NamedTuple):
    """A suite, the data sets that are not there, what is to do, and what may have been done before and is not asked."""

    suite: "Suite"
    left_out: dict[str, str]
    todo: "list[Part]"
    before: "list[Part]"


def resolve(
    name: str,
    assignments: Sequence[str] = (),
    *,
    weights: Sequence[str] = (),
    root: str | None = None,
    only: str | None = None,
    rates: str | None = None,
    skip_missing: bool = False,
) -> Work:
    """The work that the words on the command line stand for."""
    from vitkit.cli.assignments import full
    from vitkit.cli.sweeping import read_rates
    from vitkit.recipes.suites import check_names, find_suite, named, parts

    found = find_suite(name)
    found = replace(found, root=found.root if root is None else root)
    found = replace(found, weights=named(weights)) if weights else found
    asked = list(found.sets) if only is None else [each.strip() for each in only.split(",") if each.strip()]
    if only is not None and not asked:
        raise click.UsageError("--only names no data set")
    check_names(found, asked)
    every = parts(found, assignments=full(assignments), rates=None if rates is None else read_rates(rates))
    todo = [part for part in every if part.set in asked]
    check_weights(found)
    absent = what_is_missing(found, todo)
    todo = [part for part in todo if part.set not in absent]
    if absent and (not skip_missing or not todo):
        refuse(absent, of=len(asked))
    return Work(found, absent, todo, [part for part in every if part.set not in asked])


def what_is_missing(suite: "Suite", todo: "list[Part]") -> dict[str, str]:
    """Data sets that are not there, ReaL's labels that are not, and what is judged by a model that will not be made."""
    from vitkit.train.suite import missing

    absent = missing(todo)
    for part in todo:
        real = part.protocol.real
        if real is not None and not Path(real).is_file():
            absent.setdefault(part.set, real)
    chosen = {part.set for part in todo}
    return absent | {
        name: absent[one.judge]
        for name, one in suite.sets.items()
        if name in chosen - absent.keys() and one.judge in absent
    }


def check_weights(suite: "Suite") -> None:
    """Refuse weights that are not there before anything starts."""
    from vitkit.core.errors import WeightsError

    for path in suite.weights.values():
        if not path.startswith("hub:") and not Path(path).exists():
            raise WeightsError(f"there are no weights at {path}", hint="give a run, or a file that weights info knows")


def refuse(absent: dict[str, str], *, of: int) -> None:
    """Say which data sets are not there."""
    from vitkit.core.errors import DataError
    from vitkit.data.sources.base import some

    named = some([f"{name} ({path})" for name, path in absent.items()], most=30)
    raise DataError(
        f"{len(absent)} of {of} data sets are not there: {named}",
        hint="say where they lie with --data, or leave them out with --skip-missing",
    )


def keep(table: "Standings", out: Path) -> None:
    """Write the table, the picture and the page into the suite's folder."""
    from vitkit.checkpoints.native import write_json
    from vitkit.core.files import write_text
    from vitkit.evaluate.standings_page import page, picture

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "suite.json", table.to_json())
    write_text(out / "suite.csv", table.to_csv())
    write_text(out / "picture.svg", picture(table))
    write_text(out / "report.html", page(table))


def show(table: "Standings", out: Path, *, as_json: bool) -> None:
    """Print the table: rows are data sets, columns models."""
    if as_json:
        print_json(table.to_json())
        return
    from rich.table import Table
    from rich.text import Text

    printed = Table(box=None, pad_edge=False, header_style="bold")
    printed.add_column(safe_text(table.title))
    for model in table.models:
        printed.add_column(safe_text(model), justify="right")
    for line in table.lines():
        style = None if line.kind == "set" else "bold"
        cells = [Text(cell(line, model)) for model in table.models]
        printed.add_row(Text(title(line)), *cells, style=style)
    result_console().print(printed)
    talk_console().print(safe_text(f"report: {out / 'report.html'}"), soft_wrap=True)


def title(line: "Line") -> str:
    """The line's name, with what it is the mean of."""
    return safe_text(line.title) if line.kind == "set" else f"{safe_text(line.title)}, {line.about}"


def cell(line: "Line", model: str) -> str:
    """An accuracy in per cent, as Table 2 has them."""
    return f"{line.scores[model].top1 * 100:.2f}" if model in line.scores else "–"
