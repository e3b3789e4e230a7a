"""Distillation: its losses against sums written out by hand, its teacher against the teacher's own way to predict."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitkit.core.errors import ConfigError
from vitkit.data.augment import mix_batch, one_hot
from vitkit.data.decode import decode
from vitkit.data.preprocessing import ORIGINS, Preprocessing, get_preprocessing
from vitkit.model.pretraining import DistilledViT, get_encoder
from vitkit.objectives.base import Objective
from vitkit.objectives.config import DistillationConfig, SupervisedConfig
from vitkit.objectives.distillation import DistillationObjective, distillation_loss
from vitkit.objectives.supervised import SupervisedObjective, cross_entropy
from vitkit.objectives.teacher import Teacher, denormalize, match_classes, renormalize
from vitkit.weights.load import load_bundle
from vitkit.zoo.registry import create

STUDENT = Preprocessing(image_size=16)
OTHER = get_preprocessing("deit", image_size=16)
STUDENT_224 = Preprocessing(image_size=224, resize="crop", interpolation="bicubic")
DATA = Path(__file__).parents[3] / "shared" / "data"
TINY = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 16}


class Says(nn.Module):
    """Gives the same logits for whatever it sees, and remembers what it saw."""

    def __init__(self, *logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.seen.append(images)
        return self.logits if len(self.logits) > 1 else self.logits[0]


def drawn_vit(*, seed: int, image_size: int = 16, num_classes: int = 4, distilled: bool = False) -> nn.Module:
    """A small ViT none of whose weights is zero, so that it has something to say."""
    generator = torch.Generator().manual_seed(seed)
    settings = {**TINY, **({"tokens.distillation": True} if distilled else {})}
    model = create("Ti/16", image_size=image_size, patch_size=8, num_classes=num_classes, settings=settings)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def teacher_of(model: nn.Module, *, fed: Preprocessing = STUDENT) -> Teacher:
    return Teacher(model=model, preprocessing=fed, labels=("a", "b", "c", "d"))


def objective(teacher: nn.Module, *, fed: Preprocessing = STUDENT, **fields: object) -> DistillationObjective:
    config = DistillationConfig(**fields)
    return DistillationObjective(config, supervised=SupervisedConfig(), teacher=teacher_of(teacher), preprocessing=fed)


def pixels(*, images: int = 3, side: int = 16, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (images, 3, side, side), dtype=np.uint8))


# The losses


def log_softmax_by_hand(row: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in row]
    normaliser = math.log(sum(math.exp(value) for value in scaled))
    return [value - normaliser for value in scaled]


def hard_by_hand(logits: Tensor, taught: Tensor) -> float:
    losses = []
    for row, said in zip(logits.double().tolist(), taught.double().tolist(), strict=True):
        losses.append(-log_softmax_by_hand(row, 1.0)[said.index(max(said))])
    return sum(losses) / len(losses)


def soft_by_hand(logits: Tensor, taught: Tensor, temperature: float) -> float:
    losses = []
    for row, said in zip(logits.double().tolist(), taught.double().tolist(), strict=True):
        student, teacher = log_softmax_by_hand(row, temperature), log_softmax_by_hand(said, temperature)
        divergence = sum(math.exp(t) * (t - s) for s, t in zip(student, teacher, strict=True))
        losses.append(temperature**2 * divergence)
    return sum(losses) / len(losses)


def test_hard_loss_equals_its_formula() -> None:
    logits, taught = torch.randn(6, 4), torch.randn(6, 4)
    loss = distillation_loss(logits, taught, kind="hard", temperature=3.0)
    assert loss.item() == pytest.approx(hard_by_hand(logits, taught), rel=1e-5)  # float32 against float64


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 20.0])
def test_soft_loss_equals_its_formula(temperature: float) -> None:
    logits, taught = torch.randn(6, 4), 3.0 * torch.randn(6, 4)
    loss = distillation_loss(logits, taught, kind="soft", temperature=temperature)
    # At τ = 20 the divergence is 400 times smaller than the loss, and float32 has lost two of its seven digits.
    assert loss.item() == pytest.approx(soft_by_hand(logits, taught, temperature), rel=1e-3)


def test_soft_loss_at_high_temperature_compares_logits() -> None:
    """For τ → ∞ it is half the variance over classes of the difference of logits (Hinton et al., 2015, section 2.1)."""
    logits, taught = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    limit = (taught - logits).var(dim=1, unbiased=False).mean() / 2
    found = distillation_loss(logits, taught, kind="soft", temperature=1e4)
    torch.testing.assert_close(found, limit, rtol=1e-3, atol=0)  # the next term is smaller by 1/τ
    shifted = distillation_loss(logits + 5.0, taught - 2.0, kind="soft", temperature=1e4)
    torch.testing.assert_close(shifted, found, rtol=1e-6, atol=0)


def test_soft_loss_at_low_temperature_equals_hard_loss() -> None:
    """For τ → 0 the teacher has one class; at τ = 1 the student's part of the loss is then the hard cross-entropy."""
    logits, taught = torch.randn(5, 7), torch.randn(5, 7)
    certain = 1000.0 * taught  # at τ = 1, what the teacher is at τ = 1/1000
    soft = distillation_loss(logits, certain, kind="soft", temperature=1.0)
    torch.testing.assert_close(soft, distillation_loss(logits, taught, kind="hard", temperature=1.0))


def test_equal_logits_have_no_soft_loss_and_gradient() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    loss = distillation_loss(logits, logits.detach() + 7.0, kind="soft", temperature=2.0)
    loss.backward()
    # Rounding of the logits after 7 was added is 5e-7, and the loss is of second order in it.
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(4, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_total_is_the_weighted_sum_of_both_losses(kind: str, weight: float) -> None:
    label, teacher, taught = (torch.randn(6, 4) for _ in range(3))
    targets = one_hot(torch.tensor([0, 1, 2, 3, 0, 1]), num_classes=4, smoothing=0.1)
    outcome = objective(Says(taught), kind=kind, weight=weight)(
        Says(label, teacher), torch.zeros(6, 3, 16, 16), targets
    )
    by_hand = hard_by_hand(teacher, taught) if kind == "hard" else soft_by_hand(teacher, taught, 3.0)
    from_labels = cross_entropy(label, targets, loss="softmax").item()
    assert outcome.loss.item() == pytest.approx((1 - weight) * from_labels + weight * by_hand, rel=1e-5)


def test_without_token_both_losses_use_one_head() -> None:
    logits, taught = torch.randn(6, 4), torch.randn(6, 4)
    targets = one_hot(torch.tensor([0, 1, 2, 3, 0, 1]), num_classes=4)
    images = torch.zeros(6, 3, 16, 16)
    one = objective(Says(taught), kind="soft")(Says(logits), images, targets)
    twice = objective(Says(taught), kind="soft")(Says(logits, logits), images, targets)
    assert one.loss.item() == twice.loss.item()


def test_correct_counts_predictions_of_the_mean() -> None:
    label = torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    teacher = torch.tensor([[0.0, 9.0], [0.0, 0.5], [0.0, 0.0]])
    targets = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    made = DistillationObjective(
        DistillationConfig(),
        supervised=SupervisedConfig(),
        teacher=teacher_of(Says(torch.zeros(3, 2))),
        preprocessing=STUDENT,
    )
    assert made(Says(label, teacher), torch.zeros(3, 3, 16, 16), targets).metrics["correct"].item() == 3


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_weight_0_equals_supervised_objective(kind: str) -> None:
    images, targets = STUDENT.normalize(pixels()), one_hot(torch.tensor([0, 1, 3]), num_classes=4, smoothing=0.1)
    gradients = []
    for made in (objective(drawn_vit(seed=1), kind=kind, weight=0.0), SupervisedObjective(SupervisedConfig())):
        student = drawn_vit(seed=2)
        outcome = made(student, images, targets)
        outcome.loss.backward()
        gradients.append([outcome.loss.detach(), *(parameter.grad for parameter in student.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_weight_1_ignores_labels() -> None:
    images = STUDENT.normalize(pixels())
    losses = []
    for labels in ([0, 1, 3], [2, 2, 2]):
        targets = one_hot(torch.tensor(labels), num_classes=4)
        losses.append(objective(drawn_vit(seed=1), weight=1.0)(drawn_vit(seed=2), images, targets).loss.item())
    assert losses[0] == losses[1]


def test_distillation_is_an_objective() -> None:
    assert isinstance(objective(drawn_vit(seed=1)), Objective)


# What the teacher sees


@pytest.mark.parametrize("origin", ORIGINS)
def test_integer_pixels_are_restored_exactly(origin: str) -> None:
    how = get_preprocessing(origin, image_size=16)
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    assert torch.equal(denormalize(how.normalize(every), how), every.float())


@pytest.mark.parametrize("student", ["paper", "torchvision", "dinov2"])
def test_teacher_logits_equal_its_own_predictions(student: str) -> None:
    teacher, shown = drawn_vit(seed=1), pixels()
    fed = get_preprocessing(student, image_size=16)
    found = teacher_of(teacher, fed=OTHER).logits(fed.normalize(shown), preprocessing=fed)
    squashed = Preprocessing(image_size=16, mean=OTHER.mean, std=OTHER.std)
    predicted = torch.cat([teacher(squashed(image.permute(1, 2, 0).numpy())) for image in shown])
    # The pixels are the same to the bit; a batch of three may be multiplied in another order than three of one.
    torch.testing.assert_close(found, predicted, rtol=1e-5, atol=1e-5)
    assert torch.equal(renormalize(fed.normalize(shown), old=fed, new=OTHER), OTHER.normalize(shown))


def test_images_with_the_teachers_preprocessing_are_unchanged() -> None:
    images = STUDENT.normalize(pixels())
    assert renormalize(images, old=STUDENT, new=Preprocessing(image_size=16, resize="crop")) is images


@pytest.mark.parametrize(("side", "tolerance"), [(8, 1.01), (24, 1.01)])
def test_resampling_equals_pillow(side: int, tolerance: float) -> None:
    """Pillow's bilinear filter with antialias, which rounds to whole pixels after each of its two passes."""
    shown = pixels()
    new = Preprocessing(image_size=side, mean=OTHER.mean, std=OTHER.std)
    found = denormalize(renormalize(STUDENT.normalize(shown), old=STUDENT, new=new), new)
    for image, resampled in zip(shown, found, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
        assert (resampled - expected).abs().max() <= tolerance


def test_teacher_gets_images_of_its_own_size() -> None:
    teacher = drawn_vit(seed=1, image_size=24)
    fed = get_preprocessing("deit", image_size=24)
    assert teacher_of(teacher, fed=fed).logits(STUDENT.normalize(pixels()), preprocessing=STUDENT).shape == (3, 4)


def test_teacher_sees_mixed_images() -> None:
    shown = pixels(images=4)
    targets = one_hot(torch.arange(4), num_classes=4)
    for mixing in ({"mixup": 0.8}, {"cutmix": 1.0}):
        images, mixed = mix_batch(STUDENT.normalize(shown), targets, rng=np.random.default_rng(3), **mixing)
        by_hand, _ = mix_batch(shown.float(), targets, rng=np.random.default_rng(3), **mixing)
        teacher = Says(torch.zeros(4, 4))
        made = DistillationObjective(
            DistillationConfig(),
            supervised=SupervisedConfig(),
            teacher=teacher_of(teacher, fed=OTHER),
            preprocessing=STUDENT,
        )
        made(drawn_vit(seed=2), images, mixed)
        [seen] = teacher.seen
        assert not torch.equal(by_hand, shown.float())
        # Mixing normalized images and mixing their pixels are the same but for rounding and a 4096th of a level.
        torch.testing.assert_close(seen, OTHER.normalize(by_hand), rtol=0, atol=3e-6)


def test_published_teacher_recognizes_photos() -> None:
    """DeiT-Ti's weights have a mean and deviation of their own; fed without them they know far fewer photos."""
    photos, weights = DATA / "photos" / "labels.csv", DATA / "weights" / "deit_tiny_patch16_224.pth"
    if not (photos.is_file() and weights.is_file()):
        pytest.skip(f"{DATA} is not there")
    with photos.open(newline="") as lines:
        rows = list(csv.DictReader(lines))[::63]
    found = load_bundle(weights)
    teacher = Teacher(model=found.build_model(), preprocessing=found.preprocessing, labels=found.labels)
    right = {}
    for name, how in {"as large": STUDENT_224, "smaller": replace(STUDENT_224, image_size=160)}.items():
        shown = np.stack([how.to_pixels(decode((photos.parent / row["file_name"]).read_bytes())) for row in rows])
        logits = teacher.logits(how.normalize(torch.from_numpy(shown)), preprocessing=how)
        right[name] = sum(int(row["class_index"]) == guess for row, guess in zip(rows, logits.argmax(1), strict=True))
        if how is STUDENT_224:
            own = found.build_model()(found.preprocessing.normalize(torch.from_numpy(shown)))
            torch.testing.assert_close(logits, own, rtol=0, atol=1e-4)  # the same pixels, rounded elsewhere
    assert len(rows) == 16
    assert right["as large"] >= 10  # 81.5 % by its own way over 200 photos: 13 of 16
    assert right["smaller"] >= 8


def test_teacher_runs_once_per_batch() -> None:
    teacher, student = Says(torch.zeros(3, 4)), Says(torch.zeros(3, 4), torch.zeros(3, 4))
    objective(teacher)(student, STUDENT.normalize(pixels()), one_hot(torch.arange(3), num_classes=4))
    assert len(teacher.seen) == len(student.seen) == 1


# What the teacher is not


def test_teacher_has_no_gradient_and_no_dropout() -> None:
    teacher = create(
        "Ti/16", image_size=16, patch_size=8, num_classes=4, settings=TINY | {"dropout.dense": 0.5}
    ).train()
    student = drawn_vit(seed=2)
    made = objective(teacher)
    before = torch.get_rng_state()
    outcome = made(student, STUDENT.normalize(pixels()), one_hot(torch.arange(3), num_classes=4))
    assert torch.equal(torch.get_rng_state(), before)
    outcome.loss.backward()
    assert not teacher.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    images = STUDENT.normalize(pixels()).requires_grad_()
    assert not teacher_of(teacher, fed=OTHER).logits(images, preprocessing=STUDENT).requires_grad


@pytest.mark.parametrize(("weight", "learns", "stays"), [(0.0, "label", "teacher"), (1.0, "teacher", "label")])
def test_each_head_learns_from_its_own_target(weight: float, learns: str, stays: str) -> None:
    student = DistilledViT(drawn_vit(seed=2, distilled=True)).train()
    made = objective(drawn_vit(seed=1), weight=weight)
    made(student, STUDENT.normalize(pixels()), one_hot(torch.arange(3), num_classes=4)).loss.backward()
    head = student.encoder.head
    assert getattr(head, learns).weight.grad.abs().max() > 0
    assert getattr(head, stays).weight.grad.abs().max() == 0  # and not None: ranks wait for every gradient


def test_a_distilled_model_answers_in_evaluation_as_the_model_in_it() -> None:
    vit, images = drawn_vit(seed=2, distilled=True), STUDENT.normalize(pixels())
    model = DistilledViT(vit)
    label, teacher = model.train()(images)
    torch.testing.assert_close(model.eval()(images), (label + teacher) / 2)
    assert torch.equal(model(images), vit(images))
    assert get_encoder(model) is vit


def test_half_precision_logits_have_a_float32_loss() -> None:
    half = torch.zeros(3, 4, dtype=torch.bfloat16)
    outcome = objective(Says(half))(
        Says(half, half), STUDENT.normalize(pixels()), one_hot(torch.arange(3), num_classes=4)
    )
    assert outcome.loss.dtype == torch.float32
    assert outcome.loss.item() == pytest.approx(math.log(4))


# Classes


def test_classes_are_matched_by_name() -> None:
    assert match_classes(("a", "b", "c"), classes=("a", "b", "c")) == (0, 1, 2)
    assert match_classes(("a", "b", "c"), classes=("c", "a")) == (2, 0)
    taught = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, 3)
    teacher = Teacher(model=Says(taught), preprocessing=STUDENT, labels=("a", "b", "c"))
    images = torch.zeros(2, 3, 16, 16)
    assert teacher.select_classes(("c", "a")).logits(images, preprocessing=STUDENT).tolist() == [[3.0, 1.0]] * 2
    assert teacher.select_classes(("a", "b", "c")).logits(images, preprocessing=STUDENT).tolist() == taught.tolist()


def test_repeated_class_names_need_the_same_order() -> None:
    cranes = ("crane", "dog", "crane")
    assert match_classes(cranes, classes=cranes) == (0, 1, 2)
    assert match_classes(cranes, classes=("dog",)) == (1,)
    with pytest.raises(ConfigError, match="the teacher has 2 classes called crane") as caught:
        match_classes(cranes, classes=("dog", "crane"))
    assert "weights adapt" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("labels", "message", "hint"),
    [
        (("cat", "fox"), "does not know the class dog$|does not know the class dog ", "fine-tune"),
        (("0", "1", "2"), "the class cat and 1 more", "weights adapt"),
    ],
)
def test_a_class_that_the_teacher_does_not_know_is_an_error(labels: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        match_classes(labels, classes=("cat", "dog"))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("fields", [{"weight": -0.1}, {"weight": 1.1}, {"temperature": 0.0}])
def test_settings_that_mean_nothing_are_errors(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        DistillationConfig(**fields)


def test_sigmoid_loss_is_rejected() -> None:
    with pytest.raises(ConfigError, match="sigmoid"):
        DistillationObjective(
            DistillationConfig(),
            supervised=SupervisedConfig(loss="sigmoid"),
            teacher=teacher_of(drawn_vit(seed=1)),
            preprocessing=STUDENT,
        )
