"""A student, its images and a teacher go in; a loss that follows labels and teacher alike comes out (DeiT).

    student's images → undo its normalisation → resample → the teacher's normalisation → teacher → its logits
                     → student → logits of the label's head and of the teacher's head → two losses, weighed

Touvron et al., "Training data-efficient image transformers & distillation through attention" (2020), section 4. The
teacher is no part of the student: it has no gradient, is in no checkpoint, and every rank has a whole one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError, check_positive
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.data.transforms import Preprocessing
from vitkit.objectives.objective import Outcome
from vitkit.objectives.supervised import SupervisedConfig, cross_entropy

Kind = Literal["hard", "soft"]

_STEPS_A_LEVEL = 4096
"""Pixels are restored to this part of a grey level, so that float32 gives whole ones back as they were.

Normalising rounds twice and undoing it twice, each by 2^-24 of at most 255: 6e-5 levels in all, half a step is 1.2e-4.
"""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What is learned from a teacher, which is a run, or weights of any origin.

    The loss is (1 − weight) · the label's + weight · the teacher's. "hard" takes the teacher's first guess for a label,
    "soft" its distribution at `temperature`. With a `token` the teacher has a token and a head of its own in the
    student, and without one both losses act on the same head.
    """

    teacher: str | None = None
    kind: Kind = "hard"
    weight: float = 0.5
    temperature: float = 3.0
    token: bool = True

    def __post_init__(self) -> None:
        check_positive("objective.distillation.temperature", self.temperature)
        if not 0.0 <= self.weight <= 1.0:
            raise ConfigError("objective.distillation.weight is not a share", expected="0 ≤ share ≤ 1", got=self.weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A trained model, what it must be fed, and what its answers mean; `numbers` are those of its classes that count.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    >>> teacher = Teacher(model=model, preprocessing=Preprocessing(image_size=8), labels=("cat", "dog", "fox"))
    >>> teacher.of_classes(("fox", "cat")).logits(torch.zeros(2, 3, 16, 16), fed=Preprocessing(image_size=16)).shape
    torch.Size([2, 2])
    """

    model: nn.Module
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    numbers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)

    def of_classes(self, classes: Sequence[str]) -> "Teacher":
        """The same teacher, asked for these classes only; one that it does not know is an error."""
        return replace(self, numbers=teachers_numbers(self.labels, classes=classes))

    @torch.no_grad()
    def logits(self, images: Float[Tensor, "B C H W"], *, fed: Preprocessing) -> Float[Tensor, "B Y"]:
        """What it says of images that were prepared for the student as `fed` does."""
        logits = self.model(refed(images, old=fed, new=self.preprocessing)).float()
        return logits if self.numbers is None else logits[:, torch.tensor(self.numbers, device=logits.device)]


class Distillation:
    """Cross-entropy with the labels, and a part of it with what the teacher says of the same images.

    A model whose forward gives two logits has them for the label and for the teacher; one that gives one has it for
    both.

    >>> student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) for _ in range(2))
    >>> fed = Preprocessing(image_size=2, channels=1, mean=(0.5,), deviation=(0.5,))
    >>> taught_by = Teacher(model=teacher, preprocessing=fed, labels=("cat", "dog"))
    >>> objective = Distillation(DistillationConfig(), supervised=SupervisedConfig(), teacher=taught_by, fed=fed)
    >>> objective(student, torch.rand(8, 1, 2, 2), torch.eye(2).repeat(4, 1)).loss.shape
    torch.Size([])
    """

    def __init__(
        self, config: DistillationConfig, *, supervised: SupervisedConfig, teacher: Teacher, fed: Preprocessing
    ) -> None:
        if supervised.loss != "softmax":
            raise ConfigError(
                "a teacher's first guess is one class, and a sigmoid loss is for images of several",
                expected="objective.loss=softmax",
                got=supervised.loss,
            )
        self.config, self.supervised, self.teacher, self.fed = config, supervised, teacher, fed

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Float[Tensor, "B Y"]) -> Outcome:
        """The mean loss of the batch, and how many of its images the student will say right."""
        taught = self.teacher.logits(images, fed=self.fed)
        answered = model(images)
        label, teacher = (logits.float() for logits in (answered if isinstance(answered, tuple) else (answered,) * 2))
        from_labels = cross_entropy(label, targets, loss=self.supervised.loss)
        from_teacher = distillation_loss(teacher, taught, kind=self.config.kind, temperature=self.config.temperature)
        correct = ((label + teacher).argmax(dim=1) == targets.argmax(dim=1)).sum()
        weight = self.config.weight
        return Outcome((1.0 - weight) * from_labels + weight * from_teacher, {"correct": correct})


def distillation_loss(
    logits: Float[Tensor, "B Y"], taught: Float[Tensor, "B Y"], *, kind: Kind, temperature: float
) -> Float[Tensor, ""]:
    """How far a student's logits are from a teacher's, the mean over images.

    "hard" is the cross-entropy with the teacher's first guess (the paper's equation 3). "soft" is τ² times the
    divergence of the student's softmax of logits / τ from the teacher's (equation 2), summed over classes as a
    divergence is; DeiT's released code divides that by the number of classes as well, which makes it a smaller weight.

    >>> same = torch.tensor([[2.0, 1.0, 0.0]])
    >>> distillation_loss(same, same, kind="soft", temperature=3.0).item()
    0.0
    """
    if kind == "hard":
        return functional.cross_entropy(logits, taught.argmax(dim=1))
    student, teacher = (functional.log_softmax(each / temperature, dim=1) for each in (logits, taught))
    divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


def refed(images: Float[Tensor, "B C H W"], *, old: Preprocessing, new: Preprocessing) -> Float[Tensor, "B C H2 W2"]:
    """Images that were normalised for one model as another takes them: its normalisation, its size.

    Whole pixels are restored exactly, and those that mixing made to a 4096th of a grey level. Another size is resampled
    from them, bilinear with antialias and not rounded, and nothing is cut off: what a teacher's own preprocessing crops
    the student's augmentation has cropped already.

    >>> old, new = Preprocessing(image_size=2), Preprocessing(image_size=2, mean=(0.0,), deviation=(1.0,))
    >>> refed(torch.full((1, 3, 2, 2), -1.0), old=old, new=new)[0, 0]
    tensor([[0., 0.],
            [0., 0.]])
    """
    if (old.mean, old.deviation) == (new.mean, new.deviation) and images.shape[2:] == pair(new.image_size):
        return images
    pixels = restored(images, old)
    if pixels.shape[2:] != pair(new.image_size):
        size = pair(new.image_size)
        pixels = functional.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
    return new.normalise(pixels)


def restored(images: Float[Tensor, "B C H W"], how: Preprocessing) -> Float[Tensor, "B C H W"]:
    """The pixels, 0…255, that `how` normalised.

    >>> pixels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    >>> torch.equal(restored(Preprocessing(mean=(0.485,)).normalise(pixels), Preprocessing(mean=(0.485,))), pixels)
    True
    """
    shift, scale = (
        torch.tensor(numbers, dtype=torch.float64, device=images.device).mul_(255).float()[:, None, None]
        for numbers in (how.mean, how.deviation)
    )
    return (images.float() * scale + shift).mul_(_STEPS_A_LEVEL).round_().div_(_STEPS_A_LEVEL)


def teachers_numbers(labels: Sequence[str], *, classes: Sequence[str]) -> tuple[int, ...]:
    """The teacher's number for each class of the student, by name; a class that it does not know is an error.

    Where the teacher knows more classes, what it says of those is left out. ImageNet has two cranes: a name that the
    teacher has twice says which is meant only where all names are the same in the same order, and else is an error.

    >>> teachers_numbers(("cat", "dog", "fox"), classes=("dog", "cat"))
    (1, 0)
    >>> teachers_numbers(("0", "1"), classes=("cat", "dog"))
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: the teacher does not know the class cat and 1 more (expected 0, 1)
    """
    if tuple(labels) == tuple(classes):
        return tuple(range(len(labels)))
    times = Counter(labels)
    if twice := [name for name in classes if times[name] > 1]:
        raise ConfigError(
            f"the teacher has {times[twice[0]]} classes called {twice[0]}",
            hint="tell them apart, as the data does: vitkit weights adapt TEACHER NAMED --labels NAMES",
        )
    numbers = {label: number for number, label in enumerate(labels)}
    unknown = [name for name in classes if name not in numbers]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        nameless = bool(labels) and tuple(labels) == tuple(map(str, range(len(labels))))
        raise ConfigError(
            f"the teacher does not know the class {unknown[0]}{more}",
            expected=", ".join(labels[:5]) + (" …" if len(labels) > 5 else "") if labels else "a teacher with a head",
            hint="give its classes their names: vitkit weights adapt TEACHER NAMED --labels NAMES"
            if nameless
            else "a teacher must know all classes of the data, by the same names; fine-tune it on this data first",
        )
    return tuple(numbers[name] for name in classes)
