"""A model and a data set go in; features to learn from and to judge by come out, and with a head a model again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from vitkit.checkpoints.native import Artefact
from vitkit.core.shapes import Tensor
from vitkit.data.loader import CPU
from vitkit.data.source import DataSet, Source
from vitkit.data.split import split
from vitkit.data.transforms import Preprocessing
from vitkit.evaluate.features import cache_folder, cached_features
from vitkit.evaluate.fewshot import Labelled
from vitkit.evaluate.judging import check_labelled
from vitkit.evaluate.least_squares import Head
from vitkit.model.config import ViTConfig

HELD_OUT = 0.2
"""Share of each class to judge by where a data set has no split for it."""


def learn_and_judge(data: DataSet) -> tuple[Source, Source]:
    """The images to draw examples from, and those to judge by; held out of the former where there are none."""
    train = data.splits.get("train") or data.splits.get("all") or data.first
    check_labelled(train)
    test = data.splits.get("test") or data.splits.get("val")
    if test is not None and test is not train:
        return train, test
    kept, held = split(train, share=HELD_OUT)
    return kept, held


def as_released(preprocessing: Preprocessing) -> Preprocessing:
    """The released probe's: squashed to 8/7 of the size, then the centre; 256 and 224.

    >>> as_released(Preprocessing()).resized
    (256, 256)
    """
    return replace(preprocessing, resize="squash_crop", crop_share=0.875)


def labelled_features(
    artefact: Artefact,
    source: Source,
    *,
    folder: Path | None = None,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda images: None,
) -> Labelled:
    """The features of a source with its labels; from the cache where they are in it."""
    rows = cached_features(
        artefact,
        source,
        folder=folder or cache_folder(),
        preprocessing=preprocessing,
        batch_size=batch_size,
        workers=workers,
        device=device,
        progress=progress,
    )
    # Copied into memory: a mapping that is read-only is no tensor that torch would own.
    return Labelled(features=torch.tensor(rows), labels=torch.from_numpy(source.labels.copy()))


def with_head(artefact: Artefact, head: Head, *, labels: tuple[str, ...], preprocessing: Preprocessing) -> Artefact:
    """The model with another head, ready to be saved, judged and exported like any other."""
    state = {name: tensor for name, tensor in artefact.state.items() if not name.startswith("head.")}
    config = replace(artefact.config, classes=len(labels))
    state |= head_tensors(head, distilled=isinstance(config, ViTConfig) and config.tokens.distillation)
    return Artefact(name=artefact.name, config=config, state=state, preprocessing=preprocessing, labels=labels)


def head_tensors(head: Head, *, distilled: bool) -> dict[str, Tensor]:
    """A head under the names of the model; a distilled one has a half for each of its two tokens, and takes their mean.

    >>> sorted(head_tensors(Head(weight=torch.ones(2, 4), bias=torch.ones(2)), distilled=False))
    ['head.bias', 'head.weight']
    """
    weight, bias = head.weight.float(), head.bias.float()
    if not distilled:
        return {"head.weight": weight, "head.bias": bias}
    label, teacher = (2 * weight).chunk(2, dim=1)
    return {
        "head.label.weight": label.contiguous(),
        "head.label.bias": 2 * bias,
        "head.teacher.weight": teacher.contiguous(),
        "head.teacher.bias": torch.zeros_like(bias),
    }
