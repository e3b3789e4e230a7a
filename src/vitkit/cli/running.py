"""Common parts of the commands that train: options, and printing of results."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_json, print_sections, print_table
from vitkit.core.environment import is_main_rank

if TYPE_CHECKING:
    from vitkit.api.run import Run
    from vitkit.training.run import Trial


out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run directory. An interrupted run there is resumed.  [default: runs/NAME-OF-DATA]",
)
from_option = click.option(
    "--from",
    "init",
    metavar="WEIGHTS",
    default="auto",
    show_default=True,
    help="Initial weights: auto, embedded, scratch, a run, a weight file or a hub name.",
)


def print_run(run: "Run", *, as_json: bool) -> None:
    """Print the result of a run, with the trials of a sweep; of several ranks, the main one prints."""
    if not is_main_rank():
        return
    summary = run.to_dict()
    if as_json:
        print_json(summary)
        return
    if run.trials:
        print_trials(run.trials)
    print_selection(summary.get("selection"))
    title = "Already finished, nothing was changed" if run.already_finished else "Finished"
    files = [("report", str(run.report_path)), ("weights", str(run.path / "model.safetensors"))]
    path = shlex.quote(str(run.path))
    next_steps = [("evaluate on other images", f"vitkit eval {path} OTHER-FOLDER")]
    if summary.get("classes") == 0:
        next_steps = [("fine-tune", f"vitkit finetune {path} LABELED-FOLDER --out NEW")]
    if suggestion := summary.get("suggestion"):
        next_steps.insert(0, ("use pretrained weights", str(suggestion)))
    print_sections({title: summary_rows(summary) + files, "Next": next_steps})


def summary_rows(summary: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the main numbers of a run's summary, with labels."""
    from vitkit.core.formatting import format_clock

    result, validation, compute = (summary.get(key) for key in ("result", "validation", "compute"))
    rows = [("model", str(summary.get("model")))]
    if isinstance(result, Mapping):
        low, high = result["intervals"]["top1"]
        images = f"{result['count']} {summary.get('evaluated_on')} images"
        rows += [
            ("top-1", f"{result['top1']:.2%} ({low:.1%}–{high:.1%}) on {images}"),
            ("top-5", f"{result['top5']:.2%}"),
            ("calibration", f"{result['ece']:.3f} expected calibration error"),
        ]
    elif isinstance(validation, Mapping):
        rows.append(("validation", f"loss {validation['val_loss']:.4f}"))
    if isinstance(compute, Mapping) and compute.get("images_per_second"):
        utilization = compute.get("utilization")
        of_peak = "" if utilization is None else f", {utilization:.0%} of peak"
        speed = f"{compute['images_per_second']:,.0f} images/s{of_peak}"
        rows += [("speed", speed), ("time", f"{format_clock(compute['seconds'])} of training steps")]
    return rows


def print_selection(selection: object) -> None:
    """Print what was tried within a time budget, and what would help most."""
    if not isinstance(selection, Mapping):
        return
    tried = selection["tried"]
    rows = [(each["name"], f"{each['top1']:.1%}", f"{each['loss']:.3f}", f"{each['seconds']:.0f} s") for each in tried]
    best = [index for index, each in enumerate(tried) if each["name"] == selection["kept"]]
    print_table(("tried", "held-out top-1", "held-out loss", "time"), rows, left=(0,), bold=tuple(best))
    choice = [("kept", str(selection["kept"]))]
    print_sections({"Choice": choice + [("would help", line) for line in selection["advice"]]})


def print_trials(trials: "Sequence[Trial]") -> None:
    """Print the accuracy of each learning rate."""
    from vitkit.training.run import best_trial

    rows = [(f"{trial.lr:g}", f"{trial.val_top1:.2%}", f"{trial.val_loss:.3f}") for trial in trials]
    print_table(("lr", "held-out top-1", "held-out loss"), rows, left=(), bold=(trials.index(best_trial(trials)),))
