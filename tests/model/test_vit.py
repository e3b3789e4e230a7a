"""The whole model: its steps, visible patches, and lower precision."""

from dataclasses import replace

import pytest
import torch
from model_cases import ALLOWED, CASES, fresh, images_for, random_vit, small, with_positions
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import BlockConfig, DropoutConfig, TokenConfig
from vitkit.model.encoder import Capture
from vitkit.model.patches import sample_patches
from vitkit.zoo.registry import Model

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs


@pytest.mark.parametrize("case", CASES)
def test_forward_is_embed_encode_pool_and_head(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)
    features = model.pool(model.encode(model.embed(images)))
    torch.testing.assert_close(model.features(images), features, **EXACT)
    torch.testing.assert_close(model(images), model.head(features), **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_limiting_rows_does_not_change_gradients(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)

    def gradients(features: Tensor) -> dict[str, Tensor | None]:
        model.zero_grad()
        features.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    long_way = gradients(model.pool(model.encode(model.embed(images))))
    torch.testing.assert_close(gradients(model.features(images)), long_way, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_images_of_a_batch_are_independent(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, batch=3, dtype=torch.float64)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_sequence_starts_with_the_configured_tokens(case: str) -> None:
    config = CASES[case]
    model = random_vit(config)
    tokens = model.embed(images_for(config))
    assert tokens.shape == (2, config.prefix + config.patches, config.width)
    learned = [token for token in (model.cls_token, model.dist_token, model.reg_token) if token is not None]
    assert sum(token.shape[1] for token in learned) == config.prefix


def test_prefix_order_is_class_distillation_registers() -> None:
    config = with_positions("none", tokens=TokenConfig(distillation=True, registers=2))
    model = random_vit(config)
    prefix = model.embed(images_for(config))[:, :4]
    assert torch.equal(prefix, torch.cat([model.cls_token, model.dist_token, model.reg_token], dim=1).expand(2, -1, -1))


# Visible patches and patch dropout

LEAVABLE = {
    "positions": small(),
    "registers": small(tokens=TokenConfig(registers=2)),
    "mean": small(pooling="mean"),
    "no-positions": with_positions("none"),
    "2d": with_positions("learned_2d", tokens=TokenConfig(distillation=True)),
    "sincos": with_positions("sincos_2d", pooling="map"),
}


@pytest.mark.parametrize("keep", [1, 6, 24])
@pytest.mark.parametrize("case", LEAVABLE)
def test_visible_patches_equal_those_of_the_whole_image(case: str, keep: int) -> None:
    model = random_vit(LEAVABLE[case])
    config, images = model.config, images_for(model.config)
    visible = sample_patches(2, patches=config.patches, count=keep)
    whole, seen = model.embed(images), model.embed(images, visible=visible)
    assert torch.equal(seen[:, : config.prefix], whole[:, : config.prefix])
    for image in range(2):
        assert torch.equal(seen[image, config.prefix :], whole[image, config.prefix + visible[image]])


@pytest.mark.parametrize("case", LEAVABLE)
def test_patch_dropout_acts_in_training_only(case: str) -> None:
    config = replace(LEAVABLE[case], dropout=DropoutConfig(patches=0.75))
    model = random_vit(config)
    images = images_for(config)
    assert model.embed(images).shape[1] == config.prefix + 24
    model.train()
    tokens = model.embed(images)
    assert tokens.shape[1] == config.prefix + 6
    assert not torch.equal(model.embed(images), tokens)
    assert model(images).shape == (2, 5)


def test_patch_dropout_keeps_at_least_one_patch() -> None:
    model = random_vit(small(dropout=DropoutConfig(patches=0.999))).train()
    assert model.embed(images_for(model.config)).shape[1] == model.config.prefix + 1


NEEDS_ALL_PATCHES = {
    **{
        f"{kind}-{place}": with_positions(kind, place) for kind in ALLOWED for place in sorted(ALLOWED[kind] - {"stem"})
    },
    "axial": small(pooling="mean", block=BlockConfig(axial=True)),
}


@pytest.mark.parametrize("case", NEEDS_ALL_PATCHES)
def test_visible_patches_need_positions_at_the_stem(case: str) -> None:
    config = NEEDS_ALL_PATCHES[case]
    model = random_vit(config)
    visible = torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(ConfigError, match="patches can be removed only if") as raised:
        model.embed(images_for(config), visible=visible)
    assert config.positions.kind in str(raised.value.got)


@pytest.mark.parametrize("case", NEEDS_ALL_PATCHES)
def test_patch_dropout_needs_positions_at_the_stem(case: str) -> None:
    with pytest.raises(ConfigError, match="patches can be removed only if") as raised:
        replace(NEEDS_ALL_PATCHES[case], dropout=DropoutConfig(patches=0.5))
    assert raised.value.expected == "positions.injection = stem and no axial blocks"
    assert NEEDS_ALL_PATCHES[case].positions.kind in str(raised.value.got)


# Precision

# bfloat16 keeps 8 bits, so each of about ten roundings in a row moves a number by up to 2⁻⁹ of its size: at most 3.
BFLOAT16 = {"rtol": 0.0, "atol": 0.06}


def with_random_head(case: str) -> Model:
    """Return a new model with a random head: logits of trained and new models are of size 1."""
    model = fresh(CASES[case]).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("head"):
            torch.nn.init.normal_(parameter, std=0.25)
    return model


@pytest.mark.parametrize("case", CASES)
def test_half_precision_gives_nearly_the_same_logits(case: str) -> None:
    model = with_random_head(case)
    images = images_for(model.config)
    with torch.no_grad():
        full = model(images)
        half = model.to(torch.bfloat16)(images.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    torch.testing.assert_close(half.float(), full, **BFLOAT16)


@pytest.mark.parametrize("case", CASES)
def test_autocast_gives_nearly_the_same_logits_and_gradients(case: str) -> None:
    model = with_random_head(case)
    images = images_for(model.config)
    with torch.no_grad():
        full = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(images)
    torch.testing.assert_close(half.float(), full, **BFLOAT16)
    half.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    for gradient in gradients:
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


@pytest.mark.parametrize("case", ["learned_1d-stem", "relative-shared", "rotary-shared", "qk-norm", "axial"])
def test_attention_is_captured_under_autocast(case: str) -> None:
    model = random_vit(CASES[case])
    images = images_for(model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = model.encode(model.embed(images), capture=Capture(attention=[-1])).attention[len(model.blocks) - 1]
    # A row sums up to 25 weights, each rounded to 8 bits of its size: half of 2⁻⁸ at the most.
    torch.testing.assert_close(weights.float().sum(dim=-1), torch.ones(weights.shape[:3]), rtol=0, atol=2**-8)


def test_evaluation_does_not_change_the_model() -> None:
    model = random_vit(small())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = images_for(model.config)
    untouched = images.clone()
    model(images)
    assert torch.equal(images, untouched)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
