"""Is a small student better with a teacher than alone? Digits go in, a table of accuracies over seeds comes out.

python bench/distillation.py runs/distillation                 24 students; an hour or more of a busy core
python bench/distillation.py runs/distillation --epochs 3 --teacher-epochs 3

The teacher is the run of the recipe `digits`, the student that of `digits-distilled`. Runs are resumed, and finished
ones are not repeated; the teacher's folder is shared by all of them.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
import torch

from vitkit.core.stopping import SAVED_AND_STOPPED, Stop, listening
from vitkit.objectives.distillation import DistillationConfig
from vitkit.recipes.distillation import digits_distilled
from vitkit.recipes.small import digits
from vitkit.train.config import DataConfig, ObjectiveConfig, RunConfig
from vitkit.train.run import run

SEEDS = (0, 1, 2)


def arms(teacher: str) -> dict[str, ObjectiveConfig]:
    """How the student learns, by what the table calls it."""
    taught = {
        "hard, with a token": DistillationConfig(teacher=teacher),
        "soft, with a token": DistillationConfig(teacher=teacher, kind="soft"),
        "soft, one head": DistillationConfig(teacher=teacher, kind="soft", token=False),
    }
    distilled = {name: ObjectiveConfig(name="distillation", distillation=how) for name, how in taught.items()}
    return {"alone": ObjectiveConfig(), **distilled}


def accuracy(config: RunConfig, out: Path, *, stop: Stop) -> float:
    """Top-1 on the test images after the run."""
    summary = run(config, out, stop=stop).summary
    if summary is None:
        raise SystemExit(SAVED_AND_STOPPED)
    return float(cast("Mapping[str, float]", summary["result"])["top1"])


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--epochs", default=50.0, show_default=True, help="How long a student learns.")
@click.option("--teacher-epochs", default=100.0, show_default=True, help="How long its teacher did.")
@click.option(
    "--share",
    "shares",
    multiple=True,
    default=(1.0, 0.1),
    show_default=True,
    help="Share of the training images that a student learns from; its teacher had all of them.",
)
@click.option("--threads", default=1, show_default=True)
def main(folder: Path, epochs: float, teacher_epochs: float, shares: tuple[float, ...], threads: int) -> None:
    """Train a teacher, and its students with and without it."""
    torch.set_num_threads(threads)
    data = DataConfig(path="digits", channels=1, val_share=0.0, workers=0)
    with listening() as stop:
        teacher = digits()
        teacher = replace(teacher, data=data, schedule=replace(teacher.schedule, epochs=teacher_epochs))
        print(f"teacher: {accuracy(teacher, folder / 'teacher', stop=stop):.1%}\n")
        print("| student learns | from | seeds | mean |\n|---|---|---|---:|", flush=True)
        for share in shares:
            for name, objective in arms(str(folder / "teacher")).items():
                found = []
                for seed in SEEDS:
                    student = digits_distilled()
                    # As many steps whatever the share: few images are seen more often.
                    config = replace(
                        student,
                        seed=seed,
                        data=replace(data, label_share=share),
                        objective=objective,
                        schedule=replace(student.schedule, epochs=epochs / share),
                    )
                    slug = name.replace(", ", "-").replace(" ", "-")
                    found.append(accuracy(config, folder / f"{slug}-{share:g}-{seed}", stop=stop))
                each = ", ".join(f"{top1:.1%}" for top1 in found)
                print(f"| {name} | {share:.0%} of the images | {each} | {statistics.mean(found):.1%} |", flush=True)


if __name__ == "__main__":
    main()
