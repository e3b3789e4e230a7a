"""What a user types after a recipe's name goes in, full `section.key=value` assignments come out."""

from collections.abc import Sequence
from dataclasses import fields

from vitkit.core.errors import ConfigError, did_you_mean

SHORT = {
    "data": "data.path",
    "model": "model.name",
    "image_size": "model.image_size",
    "lr": "schedule.lr",
    "epochs": "schedule.epochs",
    "steps": "schedule.steps",
    "batch_size": "schedule.batch_size",
    "workers": "data.workers",
    "channels": "data.channels",
    "device": "parallel.device",
    "teacher": "objective.distillation.teacher",
}
"""Keys that are typed so often that their section may be left out."""

EITHER = {"schedule.epochs": "schedule.steps", "schedule.steps": "schedule.epochs"}
"""A run has one of the two: who sets one means the other to be none."""


def full(assignments: Sequence[str]) -> list[str]:
    """The assignments with their sections.

    >>> full(["data=photos", "epochs=5"])
    ['data.path=photos', 'schedule.epochs=5', 'schedule.steps=none']
    """
    from vitkit.train.config import RunConfig

    sections = [field.name for field in fields(RunConfig)]
    written = []
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if "." not in key and key not in (*SHORT, *sections):
            hint = (
                did_you_mean(key, [*SHORT, *sections])
                or f"{', '.join(SHORT)}; or section.key, as vitkit recipes NAME shows"
            )
            raise ConfigError(f"{key} is not a known key", hint=hint)
        written.append(f"{SHORT.get(key, key)}{equals}{value}" if equals else assignment)
    keys = {assignment.partition("=")[0] for assignment in written}
    return written + [f"{other}=none" for key, other in EITHER.items() if key in keys and other not in keys]
