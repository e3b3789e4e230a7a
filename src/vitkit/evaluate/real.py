"""Answers to ImageNet's validation images and the reassessed labels go in; the ReaL accuracy comes out.

"Are we done with ImageNet?" (Beyer et al., arXiv:2006.07159): an answer is right if it is among the labels that people
gave the image, and images that they gave none are skipped.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.source import Source
from vitkit.objectives.metrics import bootstrap_interval

IMAGES = 50_000
CLASSES = 1_000
NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


@dataclass(frozen=True, kw_only=True)
class RealAccuracy:
    """The share of right answers among the images that have labels, how many these are, and how many have none."""

    top1: float
    count: int
    skipped: int
    interval: tuple[float, float]
    """The 95 % bootstrap interval."""

    def to_json(self) -> dict[str, object]:
        """What `vitkit eval --json` prints under "real".

        >>> RealAccuracy(top1=0.5, count=2, skipped=1, interval=(0.0, 1.0)).to_json()["skipped"]
        1
        """
        return {"top1": self.top1, "count": self.count, "skipped": self.skipped, "interval": list(self.interval)}


def read_real(path: Path | str) -> list[list[int]]:
    """The labels of each validation image, in the order of the images' numbers, from the published `real.json`."""
    try:
        labels = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", hint="--real takes the published real.json") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", hint="--real takes the published real.json") from error
    if not isinstance(labels, list) or len(labels) != IMAGES:
        raise DataError(
            f"{path} is not the published real.json",
            expected=f"a list of {IMAGES:,}, one for each validation image",
            got=f"a list of {len(labels):,}" if isinstance(labels, list) else type(labels).__name__,
        )
    for number, of_image in enumerate(labels, start=1):
        if not _are_labels(of_image):
            raise DataError(
                f"{path}: the labels of image {number}",
                expected=f"a list of numbers from 0 to {CLASSES - 1}",
                got=json.dumps(of_image)[:80],
            )
    return labels


def _are_labels(of_image: object) -> bool:
    return isinstance(of_image, list) and all(type(label) is int and 0 <= label < CLASSES for label in of_image)


def validation_numbers(names: Sequence[str]) -> NDArray[np.int64]:
    """The number of each image, from its name in any folder.

    >>> validation_numbers(["val/n01440764/ILSVRC2012_val_00000293.JPEG"]).tolist()
    [293]
    >>> validation_numbers(["cats/7.jpg"])
    Traceback (most recent call last):
    vitkit.core.errors.DataError: cats/7.jpg is no image of ImageNet's validation set (expected ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG)
    """  # noqa: E501
    numbers = []
    for name in names:
        found = NAME.fullmatch(name.rpartition("/")[2])
        if found is None or not 1 <= int(found[1]) <= IMAGES:
            raise DataError(
                f"{name} is no image of ImageNet's validation set",
                expected=f"ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_{IMAGES:08}.JPEG",
                hint="ReaL's labels go by the images' own names",
            )
        numbers.append(int(found[1]))
    return np.array(numbers, dtype=np.int64)


def check_order(order: NDArray[np.int64]) -> None:
    """Refuse a model that lacks some of ImageNet's classes: it could not give the right answer."""
    if missing := int((order < 0).sum()):
        raise DataError(
            "ReaL judges models of all of ImageNet's classes", expected=f"{CLASSES:,}", got=f"{missing:,} fewer"
        )


def real_accuracy(
    logits: Float[Tensor, "N Y"], *, source: Source, labels: Sequence[Sequence[int]], order: NDArray[np.int64]
) -> RealAccuracy:
    """The ReaL accuracy of a source's answers; `order` is the model's number for each of ImageNet's classes."""
    check_order(order)
    numbers = validation_numbers([source.name(index) for index in range(len(source))])
    answers = logits[:, torch.from_numpy(order)].argmax(dim=1).tolist()
    right = [
        answer in labels[number - 1] for answer, number in zip(answers, numbers, strict=True) if labels[number - 1]
    ]
    if not right:
        raise DataError("none of the images has a label in real.json", got=f"{len(answers):,} images without")
    correct = torch.tensor(right)
    return RealAccuracy(
        top1=correct.double().mean().item(),
        count=len(right),
        skipped=len(answers) - len(right),
        interval=bootstrap_interval(correct),
    )
