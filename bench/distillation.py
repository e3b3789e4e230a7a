"""Accuracy of a small student on digits with and without a teacher, over seeds.

python bench/distillation.py runs/distillation                 24 students; an hour or more on one core
python bench/distillation.py runs/distillation --epochs 3 --teacher-epochs 3

The teacher is the run of the recipe `digits`, the student that of `digits-distilled`. Runs are resumed, and finished
ones are not repeated; all of them share the teacher's directory.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
import torch

from vitkit.core.signals import EXIT_INTERRUPTED, StopFlag, catch_stop_signals
from vitkit.objectives.config import DistillationConfig
from vitkit.recipes.distillation import digits_distilled
from vitkit.recipes.small import digits
from vitkit.training.config import DataConfig, ObjectiveConfig, RunConfig
from vitkit.training.run import run_training

SEEDS = (0, 1, 2)


def arms(teacher: str) -> dict[str, ObjectiveConfig]:
    """Return the objectives of the student by their names in the table."""
    configs = {
        "hard, with a token": DistillationConfig(teacher=teacher),
        "soft, with a token": DistillationConfig(teacher=teacher, kind="soft"),
        "soft, one head": DistillationConfig(teacher=teacher, kind="soft", token=False),
    }
    distilled = {name: ObjectiveConfig(name="distillation", distillation=config) for name, config in configs.items()}
    return {"alone": ObjectiveConfig(), **distilled}


def accuracy(config: RunConfig, out: Path, *, stop: StopFlag) -> float:
    """Train and return the top-1 accuracy on the test images."""
    summary = run_training(config, out, stop=stop).summary
    if summary is None:
        raise SystemExit(EXIT_INTERRUPTED)
    return float(cast("Mapping[str, float]", summary["result"])["top1"])


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--epochs", default=50.0, show_default=True, help="Epochs of the students.")
@click.option("--teacher-epochs", default=100.0, show_default=True, help="Epochs of the teacher.")
@click.option(
    "--fraction",
    "fractions",
    multiple=True,
    default=(1.0, 0.1),
    show_default=True,
    help="Fraction of the training images for the students; the teacher uses all.",
)
@click.option("--threads", default=1, show_default=True)
def main(folder: Path, epochs: float, teacher_epochs: float, fractions: tuple[float, ...], threads: int) -> None:
    """Train a teacher, and students with and without it."""
    torch.set_num_threads(threads)
    data = DataConfig(path="digits", channels=1, val_fraction=0.0, workers=0)
    with catch_stop_signals() as stop:
        teacher = digits()
        teacher = replace(teacher, data=data, schedule=replace(teacher.schedule, epochs=teacher_epochs))
        print(f"teacher: {accuracy(teacher, folder / 'teacher', stop=stop):.1%}\n")
        print("| student | images | seeds | mean |\n|---|---|---|---:|", flush=True)
        for fraction in fractions:
            for name, objective in arms(str(folder / "teacher")).items():
                accuracies = []
                for seed in SEEDS:
                    student = digits_distilled()
                    # The number of steps does not depend on the fraction.
                    config = replace(
                        student,
                        seed=seed,
                        data=replace(data, label_fraction=fraction),
                        objective=objective,
                        schedule=replace(student.schedule, epochs=epochs / fraction),
                    )
                    slug = name.replace(", ", "-").replace(" ", "-")
                    accuracies.append(accuracy(config, folder / f"{slug}-{fraction:g}-{seed}", stop=stop))
                each = ", ".join(f"{top1:.1%}" for top1 in accuracies)
                print(
                    f"| {name} | {fraction:.0%} of the images | {each} | {statistics.mean(accuracies):.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
