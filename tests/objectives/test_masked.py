"""Masked patch prediction: corruption, targets, loss, and no leak of the targets into the input."""

import math

import pytest
import torch
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import BackboneConfig, DropoutConfig, PositionConfig, ViTConfig
from vitkit.model.pretraining import MaskedAutoencoder, MaskedPatches, get_encoder
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.model.vit import ViT
from vitkit.objectives.base import EVALUATION_USE, PerImageRNG, SelfSupervised, training_use
from vitkit.objectives.masked_patches import (
    Corruption,
    MaskedPatchObjective,
    MaskedTargets,
    classes_to_pixels,
    color_classes,
    draw_corruption,
)

VIT = ViTConfig(image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=0)
GRAY = ViTConfig(image_size=16, patch_size=4, channels=1, width=32, depth=2, heads=2, mlp_dim=64, num_classes=0)


def pixels_of(count: int, *, config: ViTConfig = VIT) -> Tensor:
    return torch.randint(0, 256, (count, config.channels, 16, 16), dtype=torch.uint8)


def make_batch(objective: MaskedPatchObjective, pixels: Tensor, *, first: int = 0) -> tuple[Tensor, MaskedTargets]:
    images = pixels / 127.5 - 1
    return images, objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=1, first=first))


def test_corruption_rates_match_the_paper() -> None:
    patches = 196
    found = draw_corruption(torch.rand(2000, 3, patches), config=MaskedConfig())
    corrupted = torch.zeros(2000, patches, dtype=torch.bool).scatter(1, found.indices, True)
    own = torch.arange(patches)
    assert found.indices.shape == (2000, patches // 2)  # exactly half of every image
    assert torch.equal(found.indices, found.indices.sort(dim=1).values)
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


def test_other_patch_is_uniform_and_never_the_same() -> None:
    patches, images = 5, 20_000
    config = MaskedConfig(corrupt_ratio=1.0, mask_token_ratio=0.0, other_patch_ratio=1.0)
    sources = draw_corruption(torch.rand(images, 3, patches), config=config).sources
    for place in range(patches):
        counts = torch.bincount(sources[:, place], minlength=patches)
        assert counts[place] == 0
        # Each of the four others has a quarter: five binomial deviations of 20,000 draws are 306.
        assert (counts[torch.arange(patches) != place] - images / 4).abs().max() < 306


def test_targets_do_not_depend_on_the_batch() -> None:
    objective, pixels = MaskedPatchObjective(MaskedConfig(), VIT), pixels_of(6)
    _, together = make_batch(objective, pixels)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        _, part = make_batch(objective, pixels[first:last], first=first)
        for one, all_of_them in zip(
            (*part.corruption, part.values), (*together.corruption, together.values), strict=True
        ):
            assert torch.equal(one, all_of_them[first:last])


def test_targets_differ_by_step_use_and_seed() -> None:
    objective, pixels = MaskedPatchObjective(MaskedConfig(), VIT), pixels_of(2)
    rngs = [PerImageRNG(seed=0, use=training_use(step)) for step in (0, 1, 2, 1000, 10**6, 10**6 + 1)]
    rngs += [
        PerImageRNG(seed=0, use=EVALUATION_USE),
        *(PerImageRNG(seed=2**62 + more, use=training_use(0)) for more in (0, 1)),
    ]
    found = [objective.make_targets(pixels / 255, pixels, rng=rng).corruption.indices for rng in rngs]
    # Two images of which 8 of 16 patches are chosen: the same by chance once in 160 million.
    assert len({tuple(places.flatten().tolist()) for places in found}) == len(rngs)


def slow_class(cell: Tensor) -> int:
    """Return the class of C × h × w integer pixels with integer arithmetic."""
    number = 0
    for channel in cell.tolist():
        values = [int(value) for row in channel for value in row]
        number = number * 8 + sum(values) // (32 * len(values))
    return number


@pytest.mark.parametrize("config", [VIT, GRAY], ids=["color", "gray"])
@pytest.mark.parametrize(("target", "cells"), [("mean_color", 1), ("downsized", 4)])
def test_color_classes_equal_a_slow_loop(config: ViTConfig, target, cells: int) -> None:
    pixels = pixels_of(3, config=config)
    pixels[0], pixels[1] = pixels[0] // 32 * 32, pixels[1] // 8  # many means at the very edge of a level, and dark ones
    _, targets = make_batch(MaskedPatchObjective(MaskedConfig(target=target), config), pixels)
    assert targets.values.shape == (3, 8, cells**2)
    for image in range(3):
        for asked, place in enumerate(targets.corruption.indices[image].tolist()):
            top, left = place // 4 * 4, place % 4 * 4
            patch = pixels[image, :, top : top + 4, left : left + 4]
            step = 4 // cells
            expected = [
                slow_class(patch[:, down * step : (down + 1) * step, across * step : (across + 1) * step])
                for down in range(cells)
                for across in range(cells)
            ]
            assert targets.values[image, asked].tolist() == expected
    assert targets.values.max() < 8**config.channels


def test_pixel_targets_are_the_pixels() -> None:
    pixels = pixels_of(2)
    _, targets = make_batch(MaskedPatchObjective(MaskedConfig(target="pixels"), VIT), pixels)
    place = int(targets.corruption.indices[1, 3])
    top, left = place // 4 * 4, place % 4 * 4
    assert torch.equal(targets.values[1, 3], pixels[1, :, top : top + 4, left : left + 4].flatten() / 255)


def test_pixels_are_averaged_before_quantization() -> None:
    patch = torch.full((1, 1, 4 * 4 * 3), 31.0)
    assert color_classes(patch, patch_size=4).item() == 0
    patch[0, 0, 0] = 47.0  # one pixel of red: the mean is now 32 exactly
    assert color_classes(patch, patch_size=4).item() == 64
    assert classes_to_pixels(torch.tensor([[[64]]]), channels=3, patch_size=4)[0, 0, [0, 16, 32]].tolist() == [
        48.0,
        16.0,
        16.0,
    ]


@pytest.mark.parametrize("target", ["mean_color", "downsized", "pixels"])
def test_loss_is_the_mean_over_corrupted_patches(target) -> None:
    objective = MaskedPatchObjective(MaskedConfig(target=target), VIT)
    model = MaskedPatches(ViT(VIT), MaskedConfig(target=target))
    images, targets = make_batch(objective, pixels_of(3))
    output = objective(model, images, targets)
    said = model(images, *targets.corruption)
    losses, right = [], 0.0
    for image in range(3):
        for asked in range(8):
            if target == "pixels":
                losses.append(((said[image, asked, 0] - targets.values[image, asked]) ** 2).mean())
                continue
            for question, answer in enumerate(targets.values[image, asked]):
                logits = said[image, asked, question]
                losses.append(logits.exp().sum().log() - logits[answer])
                right += float(logits.argmax() == answer) / len(targets.values[image, asked]) / 8
    # float32, summed in another order: some 1e-6 of a loss of 6
    torch.testing.assert_close(output.loss, torch.stack(losses).mean(), rtol=0, atol=1e-5)
    assert set(output.metrics) == (set() if target == "pixels" else {"patch_accuracy"})
    if output.metrics:
        assert output.metrics["patch_accuracy"].item() == pytest.approx(right, abs=1e-6)


def test_batch_loss_is_the_mean_of_its_parts() -> None:
    objective, model = MaskedPatchObjective(MaskedConfig(), VIT), MaskedPatches(ViT(VIT), MaskedConfig()).double()
    images, targets = make_batch(objective, pixels_of(4))
    images = images.double()
    whole = objective(model, images, targets).loss
    parts = [
        objective(
            model,
            images[part],
            MaskedTargets(Corruption(*(each[part] for each in targets.corruption)), targets.values[part]),
        )
        for part in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close((parts[0].loss + 3 * parts[1].loss) / 4, whole, rtol=0, atol=1e-6)


def test_objective_is_self_supervised() -> None:
    assert isinstance(MaskedPatchObjective(MaskedConfig(), VIT), SelfSupervised)


def test_every_parameter_receives_a_gradient() -> None:
    objective, model = MaskedPatchObjective(MaskedConfig(), VIT), MaskedPatches(ViT(VIT), MaskedConfig())
    objective(model, *make_batch(objective, pixels_of(8))).loss.backward()
    missing = [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()]
    assert missing == []
    assert get_encoder(model) is model.encoder


def shaded(count: int) -> Tensor:
    """Return images of one of four shades, so that any patch tells the color of the others."""
    return (torch.randint(0, 4, (count, 1, 1, 1)) * 64 + 10).expand(-1, 1, 16, 16).to(torch.uint8)


def test_masked_patches_are_learned_from_neighbors() -> None:
    config = MaskedConfig(mask_token_ratio=1.0, other_patch_ratio=0.0)
    objective, model = MaskedPatchObjective(config, GRAY), MaskedPatches(ViT(GRAY), config)
    before = model.mask_token.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    right = []
    for step in range(60):
        pixels = shaded(32)
        targets = objective.make_targets(pixels / 255, pixels, rng=PerImageRNG(seed=0, use=step))
        output = objective(model, pixels / 127.5 - 1, targets)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        right.append(output.metrics["patch_accuracy"].item() / 32)
    assert sum(right[-10:]) / 10 > 0.95  # chance is a quarter
    assert (model.mask_token - before).abs().max() > 1e-3


def test_position_alone_gives_chance_accuracy() -> None:
    """If every patch is masked, only positions are left, on which colors do not depend."""
    config = MaskedConfig(corrupt_ratio=1.0, mask_token_ratio=1.0, other_patch_ratio=0.0)
    objective, model = MaskedPatchObjective(config, GRAY), MaskedPatches(ViT(GRAY), config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def drawn(step: int) -> tuple[Tensor, MaskedTargets]:
        levels = torch.randint(0, 4, (64, 1, 4, 4), generator=torch.Generator().manual_seed(step)) * 64 + 10
        pixels = levels.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).to(torch.uint8)
        return pixels / 127.5 - 1, objective.make_targets(pixels / 255, pixels, rng=PerImageRNG(seed=0, use=step))

    for step in range(60):
        optimizer.zero_grad()
        objective(model, *drawn(step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        outputs = [objective(model, *drawn(step)) for step in range(1000, 1020)]
    right = sum(output.metrics["patch_accuracy"].item() for output in outputs) / (20 * 64)
    loss = sum(output.loss.item() for output in outputs) / 20
    # One of four colors at random: 20,480 patches, five binomial deviations are 0.015.
    assert right == pytest.approx(0.25, abs=0.015)
    assert loss > math.log(4) - 0.01


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d", "relative", "rotary", "none"])
def test_masked_patch_does_not_affect_predictions(kind) -> None:
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        width=32,
        depth=2,
        heads=2,
        mlp_dim=64,
        num_classes=0,
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


def test_replaced_patch_keeps_its_own_position() -> None:
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


@pytest.mark.parametrize("target", ["mean_color", "downsized", "pixels"])
def test_reconstruction_changes_corrupted_pixels_only(target) -> None:
    objective = MaskedPatchObjective(MaskedConfig(target=target), VIT)
    model, pixels = MaskedPatches(ViT(VIT), MaskedConfig(target=target)), pixels_of(2)
    images, targets = make_batch(objective, pixels)
    shown = objective.reconstruct(model, images, pixels, targets)
    assert torch.equal(shown.images, pixels.float())
    assert shown.hidden.float().mean() == 0.5
    same = ~shown.hidden[:, None].expand(-1, 3, -1, -1)
    assert torch.equal(shown.predicted[same], shown.images[same])
    assert shown.predicted.min() >= 0
    assert shown.predicted.max() <= 255


def test_unsupported_models_are_rejected() -> None:
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
    with pytest.raises(ConfigError, match="independent of each other"):
        MaskedPatches(ViT(hybrid), MaskedConfig())
    dropping = ViTConfig(
        image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, dropout=DropoutConfig(patches=0.5)
    )
    with pytest.raises(ConfigError, match="cannot be combined with masking"):
        MaskedPatches(ViT(dropping), MaskedConfig())
    with pytest.raises(ConfigError, match="cannot be combined with masking"):
        MaskedAutoencoder(ViT(dropping), MAEConfig(width=8, depth=1, heads=2))
    with pytest.raises(ConfigError, match="no patch would be corrupted"):
        MaskedPatchObjective(MaskedConfig(corrupt_ratio=0.01), VIT)
    with pytest.raises(ConfigError, match="same patches"):
        MaskedConfig(mask_token_ratio=0.8, other_patch_ratio=0.3)
