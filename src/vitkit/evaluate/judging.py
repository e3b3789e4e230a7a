"""A trained model and a data set go in, its judgement on one of the splits comes out."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.source import DataSet, Source
from vitkit.engine.engine import Engine
from vitkit.evaluate.accuracy import Answers, answers
from vitkit.evaluate.judgement import Judgement, judge

PREFERRED = ("test", "val", "all", "train")
"""The split that is judged on where none is named."""


def choose_split(data: DataSet, name: str | None = None) -> tuple[str, Source]:
    """The named split, or the one that a model is fairest judged on."""
    if name is None:
        name = next(split for split in PREFERRED if split in data.splits)
    if name not in data.splits:
        raise DataError(f"{data.place} has no split {name}", expected=" or ".join(data.splits), got=name)
    return name, data.splits[name]


def check_labelled(source: Source) -> None:
    """Refuse images that nobody has named a class of."""
    if not source.classes:
        raise DataError(
            f"the images have no labels ({source.kind})",
            hint="put each class in a folder of its own, or list file_name,label in a CSV file",
        )


def known_classes(artefact: Artefact, source: Source) -> npt.NDArray[np.int64]:
    """The model's number for each class of a source; a class that it does not know is an error, as are no classes."""
    check_labelled(source)
    if not artefact.labels:
        raise DataError(
            "the model has no classes to answer with: it gives features alone",
            hint="give it classes with vitkit finetune, or see what its features are worth with vitkit fewshot",
        )
    numbers = {label: number for number, label in enumerate(artefact.labels)}
    unknown = [name for name in source.classes if name not in numbers]
    if unknown:
        raise DataError(
            f"the model does not know the class {unknown[0]}" + (f" and {len(unknown) - 1} more" * (len(unknown) > 1)),
            expected=", ".join(artefact.labels[:5]) + (" …" if len(artefact.labels) > 5 else ""),
            hint="judge it on images of its own classes, or fine-tune it on these",
        )
    return np.array([numbers[name] for name in source.classes], dtype=np.int64)


def judge_artefact(
    artefact: Artefact,
    source: Source,
    *,
    workers: int = 0,
    batch_size: int = 64,
    device: torch.device,
    progress: Callable[[int], None] = lambda images: None,
) -> Judgement:
    """How good a trained model is on a source whose classes are among those it knows, in whatever order."""
    numbers = known_classes(artefact, source)
    found = answers_of(artefact, source, workers=workers, batch_size=batch_size, device=device, progress=progress)
    return judge(found.logits, torch.from_numpy(numbers)[found.labels], classes=artefact.labels)


def answers_of(
    artefact: Artefact,
    source: Source,
    *,
    workers: int = 0,
    batch_size: int = 64,
    device: torch.device,
    engine: Engine | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> Answers:
    """What a trained model, as written or by an engine, says of every image of a source, prepared as in training."""
    return answers(
        artefact.model().to(device) if engine is None else Logits(engine),
        source,
        preprocessing=artefact.preprocessing,
        batch_size=batch_size,
        workers=workers,
        device=device,
        progress=progress,
    )


class Logits(nn.Module):
    """An engine where a module is expected."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        """The engine's logits."""
        return self.engine.answer(images)[1]
