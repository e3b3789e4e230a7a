"""Masked patch prediction: what is corrupted and how, what is asked, and that nothing of the answer leaks."""

import math

import pytest
import torch
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import DropoutConfig, ViTConfig
from vitkit.model.masked import AutoencoderConfig, MaskedAutoencoder, MaskedConfig, MaskedPatches, encoder_of
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig
from vitkit.model.vit import ViT
from vitkit.objectives.masked import Corruption, MaskedPrediction, MaskedTask, colour_classes, coloured, corrupt
from vitkit.objectives.objective import EVALUATING, Chance, Unlabelled, training

VIT = ViTConfig(image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, classes=0)
GREY = ViTConfig(image_size=16, patch_size=4, channels=1, width=32, depth=2, heads=2, mlp_dim=64, classes=0)


def pixels_of(count: int, *, config: ViTConfig = VIT) -> Tensor:
    return torch.randint(0, 256, (count, config.channels, 16, 16), dtype=torch.uint8)


def posed(objective: MaskedPrediction, pixels: Tensor, *, first: int = 0) -> tuple[Tensor, MaskedTask]:
    images = pixels / 127.5 - 1
    return images, objective.set_task(images, pixels, chance=Chance(seed=0, use=1, first=first))


# What is corrupted


def test_shares_are_those_of_the_paper() -> None:
    patches = 196
    found = corrupt(torch.rand(2000, 3, patches), config=MaskedConfig())
    corrupted = torch.zeros(2000, patches, dtype=torch.bool).scatter(1, found.places, True)
    own = torch.arange(patches)
    assert found.places.shape == (2000, patches // 2)  # exactly half of every image
    assert torch.equal(found.places, found.places.sort(dim=1).values)
    assert not (found.masked & ~corrupted).any()
    assert torch.equal(found.sources[~corrupted], own.expand(2000, -1)[~corrupted])

    total = 2000 * patches
    moved = found.sources != own
    assert not (moved & found.masked).any()
    same = corrupted & ~moved & ~found.masked
    for share, expected in ((found.masked, 0.4), (moved, 0.05), (same, 0.05)):
        # Of the corrupted half each patch is drawn by itself: five binomial deviations, missed once in 2 million.
        deviation = math.sqrt(total / 2 * (2 * expected) * (1 - 2 * expected)) / total
        assert share.sum().item() / total == pytest.approx(expected, abs=5 * deviation)


def test_another_patch_is_never_the_same_and_any_other_may_be_it() -> None:
    patches, images = 5, 20_000
    config = MaskedConfig(corrupted=1.0, mask=0.0, other=1.0)
    sources = corrupt(torch.rand(images, 3, patches), config=config).sources
    for place in range(patches):
        counts = torch.bincount(sources[:, place], minlength=patches)
        assert counts[place] == 0
        # Each of the four others has a quarter: five binomial deviations of 20,000 draws are 306.
        assert (counts[torch.arange(patches) != place] - images / 4).abs().max() < 306


def test_an_image_has_the_same_task_in_any_batch() -> None:
    objective, pixels = MaskedPrediction(MaskedConfig(), VIT), pixels_of(6)
    _, together = posed(objective, pixels)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        _, part = posed(objective, pixels[first:last], first=first)
        for one, all_of_them in zip(
            (*part.corruption, part.answers), (*together.corruption, together.answers), strict=True
        ):
            assert torch.equal(one, all_of_them[first:last])


def test_steps_evaluations_and_seeds_have_other_tasks() -> None:
    objective, pixels = MaskedPrediction(MaskedConfig(), VIT), pixels_of(2)
    chances = [Chance(seed=0, use=training(step)) for step in (0, 1, 2, 1000, 10**6, 10**6 + 1)]
    chances += [Chance(seed=0, use=EVALUATING), *(Chance(seed=2**62 + more, use=training(0)) for more in (0, 1))]
    found = [objective.set_task(pixels / 255, pixels, chance=chance).corruption.places for chance in chances]
    # Two images of which 8 of 16 patches are chosen: the same by chance once in 160 million.
    assert len({tuple(places.flatten().tolist()) for places in found}) == len(chances)


# What is asked


def slow_class(cell: Tensor) -> int:
    """The class of C × h × w whole pixels, by whole numbers alone."""
    number = 0
    for channel in cell.tolist():
        values = [int(value) for row in channel for value in row]
        number = number * 8 + sum(values) // (32 * len(values))
    return number


@pytest.mark.parametrize("config", [VIT, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize(("target", "cells"), [("mean_colour", 1), ("downsized", 4)])
def test_colour_classes_equal_a_slow_loop(config: ViTConfig, target, cells: int) -> None:
    pixels = pixels_of(3, config=config)
    pixels[0], pixels[1] = pixels[0] // 32 * 32, pixels[1] // 8  # many means at the very edge of a level, and dark ones
    _, task = posed(MaskedPrediction(MaskedConfig(target=target), config), pixels)
    assert task.answers.shape == (3, 8, cells**2)
    for image in range(3):
        for asked, place in enumerate(task.corruption.places[image].tolist()):
            top, left = place // 4 * 4, place % 4 * 4
            patch = pixels[image, :, top : top + 4, left : left + 4]
            step = 4 // cells
            expected = [
                slow_class(patch[:, down * step : (down + 1) * step, across * step : (across + 1) * step])
                for down in range(cells)
                for across in range(cells)
            ]
            assert task.answers[image, asked].tolist() == expected
    assert task.answers.max() < 8**config.channels


def test_pixels_are_asked_for_as_they_are() -> None:
    pixels = pixels_of(2)
    _, task = posed(MaskedPrediction(MaskedConfig(target="pixels"), VIT), pixels)
    place = int(task.corruption.places[1, 3])
    top, left = place // 4 * 4, place % 4 * 4
    assert torch.equal(task.answers[1, 3], pixels[1, :, top : top + 4, left : left + 4].flatten() / 255)


def test_a_patch_of_sixteen_pixels_is_averaged_before_its_levels_are_told() -> None:
    patch = torch.full((1, 1, 4 * 4 * 3), 31.0)
    assert colour_classes(patch, patch_size=4).item() == 0
    patch[0, 0, 0] = 47.0  # one pixel of red: the mean is now 32 exactly
    assert colour_classes(patch, patch_size=4).item() == 64
    assert coloured(torch.tensor([[[64]]]), channels=3, patch_size=4)[0, 0, [0, 16, 32]].tolist() == [48.0, 16.0, 16.0]


# The loss


@pytest.mark.parametrize("target", ["mean_colour", "downsized", "pixels"])
def test_the_loss_is_the_mean_over_corrupted_patches_alone(target) -> None:
    objective = MaskedPrediction(MaskedConfig(target=target), VIT)
    model = MaskedPatches(ViT(VIT), MaskedConfig(target=target))
    images, task = posed(objective, pixels_of(3))
    outcome = objective(model, images, task)
    said = model(images, *task.corruption)
    losses, right = [], 0.0
    for image in range(3):
        for asked in range(8):
            if target == "pixels":
                losses.append(((said[image, asked, 0] - task.answers[image, asked]) ** 2).mean())
                continue
            for question, answer in enumerate(task.answers[image, asked]):
                logits = said[image, asked, question]
                losses.append(logits.exp().sum().log() - logits[answer])
                right += float(logits.argmax() == answer) / len(task.answers[image, asked]) / 8
    # float32, summed in another order: some 1e-6 of a loss of 6
    torch.testing.assert_close(outcome.loss, torch.stack(losses).mean(), rtol=0, atol=1e-5)
    assert set(outcome.sums) == (set() if target == "pixels" else {"right"})
    if outcome.sums:
        assert outcome.sums["right"].item() == pytest.approx(right, abs=1e-6)


def test_the_whole_batch_is_the_mean_of_its_parts() -> None:
    objective, model = MaskedPrediction(MaskedConfig(), VIT), MaskedPatches(ViT(VIT), MaskedConfig()).double()
    images, task = posed(objective, pixels_of(4))
    images = images.double()
    whole = objective(model, images, task).loss
    parts = [
        objective(
            model, images[part], MaskedTask(Corruption(*(each[part] for each in task.corruption)), task.answers[part])
        )
        for part in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close((parts[0].loss + 3 * parts[1].loss) / 4, whole, rtol=0, atol=1e-6)


def test_the_objective_is_one_without_labels() -> None:
    assert isinstance(MaskedPrediction(MaskedConfig(), VIT), Unlabelled)


# What is learned


def test_the_mask_token_receives_gradients_and_every_parameter_does() -> None:
    objective, model = MaskedPrediction(MaskedConfig(), VIT), MaskedPatches(ViT(VIT), MaskedConfig())
    objective(model, *posed(objective, pixels_of(8))).loss.backward()
    missing = [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()]
    assert missing == []
    assert encoder_of(model) is model.encoder


def shaded(count: int) -> Tensor:
    """Images of one shade among four each: any patch tells the colour of the others."""
    return (torch.randint(0, 4, (count, 1, 1, 1)) * 64 + 10).expand(-1, 1, 16, 16).to(torch.uint8)


def test_masked_patches_are_learned_from_their_neighbours_and_so_is_the_mask_token() -> None:
    config = MaskedConfig(mask=1.0, other=0.0)
    objective, model = MaskedPrediction(config, GREY), MaskedPatches(ViT(GREY), config)
    before = model.mask_token.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    right = []
    for step in range(60):
        pixels = shaded(32)
        task = objective.set_task(pixels / 255, pixels, chance=Chance(seed=0, use=step))
        outcome = objective(model, pixels / 127.5 - 1, task)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        right.append(outcome.sums["right"].item() / 32)
    assert sum(right[-10:]) / 10 > 0.95  # chance is a quarter
    assert (model.mask_token - before).abs().max() > 1e-3


def test_who_sees_only_a_patchs_position_knows_no_more_than_the_marginal() -> None:
    """Every patch is masked: what is left is where it is. Colours do not depend on that, so chance is the best."""
    config = MaskedConfig(corrupted=1.0, mask=1.0, other=0.0)
    objective, model = MaskedPrediction(config, GREY), MaskedPatches(ViT(GREY), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def drawn(step: int) -> tuple[Tensor, MaskedTask]:
        levels = torch.randint(0, 4, (64, 1, 4, 4), generator=torch.Generator().manual_seed(step)) * 64 + 10
        pixels = levels.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).to(torch.uint8)
        return pixels / 127.5 - 1, objective.set_task(pixels / 255, pixels, chance=Chance(seed=0, use=step))

    for step in range(60):
        optimizer.zero_grad()
        objective(model, *drawn(step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        outcomes = [objective(model, *drawn(step)) for step in range(1000, 1020)]
    right = sum(outcome.sums["right"].item() for outcome in outcomes) / (20 * 64)
    loss = sum(outcome.loss.item() for outcome in outcomes) / 20
    # One of four colours at random: 20,480 patches, five binomial deviations are 0.015.
    assert right == pytest.approx(0.25, abs=0.015)
    assert loss > math.log(4) - 0.01


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d", "relative", "rotary", "none"])
def test_a_masked_patch_can_change_without_changing_any_answer(kind) -> None:
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        width=32,
        depth=2,
        heads=2,
        mlp_dim=64,
        classes=0,
        positions=PositionConfig(kind=kind),
    )
    model = MaskedPatches(ViT(config), MaskedConfig()).eval()
    images = torch.randn(2, 3, 16, 16)
    masked = torch.zeros(2, 16, dtype=torch.bool)
    masked[:, 5] = True
    sources, places = torch.arange(16).expand(2, -1), torch.tensor([[5, 6]] * 2)
    changed = images.clone()
    changed[:, :, 4:8, 4:8] += 10.0  # patch 5
    with torch.no_grad():
        before, after = (model(each, sources, masked, places) for each in (images, changed))
        unmasked = model(changed, sources, torch.zeros_like(masked), places)
    assert torch.equal(before, after)
    assert not torch.equal(after, unmasked)


def test_a_replaced_patch_has_the_other_ones_embedding_at_its_own_position() -> None:
    model = MaskedPatches(ViT(VIT), MaskedConfig()).eval()
    images = torch.randn(1, 3, 16, 16)
    sources = torch.arange(16)[None].clone()
    sources[0, 3] = 9
    swapped = images.clone()
    swapped[:, :, 0:4, 12:16] = images[:, :, 8:12, 4:8]  # patch 9 copied over patch 3
    nothing, places = torch.zeros(1, 16, dtype=torch.bool), torch.arange(16)[None]
    with torch.no_grad():
        by_source = model(images, sources, nothing, places)
        by_pixels = model(swapped, torch.arange(16)[None], nothing, places)
    torch.testing.assert_close(by_source, by_pixels, rtol=0, atol=1e-6)


# Pictures


@pytest.mark.parametrize("target", ["mean_colour", "downsized", "pixels"])
def test_a_picture_differs_from_the_image_only_where_it_was_corrupted(target) -> None:
    objective = MaskedPrediction(MaskedConfig(target=target), VIT)
    model, pixels = MaskedPatches(ViT(VIT), MaskedConfig(target=target)), pixels_of(2)
    images, task = posed(objective, pixels)
    shown = objective.reconstruct(model, images, pixels, task)
    assert torch.equal(shown.images, pixels.float())
    assert shown.hidden.float().mean() == 0.5
    same = ~shown.hidden[:, None].expand(-1, 3, -1, -1)
    assert torch.equal(shown.predicted[same], shown.images[same])
    assert shown.predicted.min() >= 0
    assert shown.predicted.max() <= 255


# What cannot be


def test_what_cannot_be_masked_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small to be downsized"):
        MaskedPatches(
            ViT(ViTConfig(image_size=4, patch_size=2, width=8, depth=1, heads=2, mlp_dim=8)),
            MaskedConfig(target="downsized"),
        )
    with pytest.raises(ConfigError, match="at most three channels"):
        MaskedPatches(
            ViT(ViTConfig(image_size=8, patch_size=4, channels=4, width=8, depth=1, heads=2, mlp_dim=8)), MaskedConfig()
        )
    hybrid = ViTConfig(
        image_size=32,
        patch_size=1,
        width=8,
        depth=1,
        heads=2,
        mlp_dim=8,
        backbone=BackboneConfig(units=(1,), root_width=32),
    )
    with pytest.raises(ConfigError, match="neighbours"):
        MaskedPatches(ViT(hybrid), MaskedConfig())
    dropping = ViTConfig(
        image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, dropout=DropoutConfig(patches=0.5)
    )
    with pytest.raises(ConfigError, match="left out"):
        MaskedPatches(ViT(dropping), MaskedConfig())
    with pytest.raises(ConfigError, match="left out"):
        MaskedAutoencoder(ViT(dropping), AutoencoderConfig(width=8, depth=1, heads=2))
    with pytest.raises(ConfigError, match="no patch would be corrupted"):
        MaskedPrediction(MaskedConfig(corrupted=0.01), VIT)
    with pytest.raises(ConfigError, match="same patches"):
        MaskedConfig(mask=0.8, other=0.3)
