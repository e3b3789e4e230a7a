"""A configuration that is still to be made goes in; the run is carried out, shown and concluded with an exit code."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.machine import prepare_for_training
from vitkit.cli.output import print_json, print_sections, talk_console
from vitkit.core.stopping import SAVED_AND_STOPPED, listening
from vitkit.train.watch import on_the_clock

if TYPE_CHECKING:
    from vitkit.train.config import RunConfig
    from vitkit.train.run import Result


def carry_out(make: "Callable[[], RunConfig]", *, out: Path, as_json: bool) -> None:
    """Run, show progress, print the result; a stop signal, even one that comes while torch loads, saves and leaves."""
    leads = os.environ.get("RANK", "0") == "0"
    with listening() as stop:
        prepare_for_training()
        from vitkit.cli.watching import Shown
        from vitkit.train.run import run

        with Shown() as watcher:
            result = run(make(), out, watcher=watcher, stop=stop)
    if result.summary is None:
        if leads:
            talk_console().print(f"stopped by {stop.signal or 'another rank'}; run the same command again to go on")
        click.get_current_context().exit(SAVED_AND_STOPPED)
    if leads:
        print_result(result, as_json=as_json)


def print_result(result: "Result", *, as_json: bool) -> None:
    """Print what came of a run."""
    summary = result.summary or {}
    if as_json:
        print_json(summary)
        return
    folder = result.folder.path
    judged, ledger = summary.get("result"), summary.get("ledger")
    rows = [("model", str(summary.get("model")))]
    if isinstance(judged, Mapping):
        low, high = judged["intervals"]["top1"]
        rows += [
            (
                "top-1",
                f"{judged['top1']:.2%} of {judged['count']} {summary.get('judged_on')} images ({low:.1%}–{high:.1%})",
            ),
            ("top-5", f"{judged['top5']:.2%}"),
            ("calibration", f"{judged['ece']:.3f} expected calibration error"),
        ]
    validation = summary.get("validation")
    if not isinstance(judged, Mapping) and isinstance(validation, Mapping):
        rows.append(("validation", f"loss {validation['val_loss']:.4f}"))
    if isinstance(ledger, Mapping) and ledger.get("images_per_second"):
        rows.append(("speed", f"{ledger['images_per_second']:,.0f} images/s, {ledger['utilisation']:.0%} of the peak"))
    if isinstance(ledger, Mapping) and ledger.get("seconds"):
        rows.append(("time", f"{on_the_clock(ledger['seconds'])} in its steps"))
    rows += [("report", str(result.folder.report)), ("weights", str(folder / "model.safetensors"))]
    title = "Already done, nothing was changed" if result.was_finished else "Done"
    following = ("judge it on other images", f"vitkit eval {folder} OTHER-FOLDER")
    if summary.get("classes") == 0:
        following = ("teach it classes", f"vitkit finetune {folder} LABELLED-FOLDER --out NEW")
    print_sections({title: rows, "Next": [following]})
