"""The whole model as its steps: the shortcut, patches left out, and other number formats."""

from dataclasses import replace

import pytest
import torch
from model_cases import ALLOWED, CASES, fresh, images_for, placed, random_vit, small
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import DropoutConfig, TokenConfig
from vitkit.model.encoder import BlockConfig, Keep
from vitkit.model.patches import random_patches
from vitkit.zoo.lookup import Model

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs


@pytest.mark.parametrize("case", CASES)
def test_a_forward_pass_is_embed_encode_pool_and_head(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)
    features = model.pool(model.encode(model.embed(images)).tokens)
    torch.testing.assert_close(model.features(images), features, **EXACT)
    torch.testing.assert_close(model(images), model.head(features), **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_the_shortcut_leaves_every_gradient_as_it_is(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)

    def gradients(features: Tensor) -> dict[str, Tensor | None]:
        model.zero_grad()
        features.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    long_way = gradients(model.pool(model.encode(model.embed(images)).tokens))
    torch.testing.assert_close(gradients(model.features(images)), long_way, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_images_of_a_batch_do_not_see_each_other(case: str) -> None:
    config = CASES[case]
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, batch=3, dtype=torch.float64)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_the_sequence_has_the_configured_tokens_in_front_of_the_patches(case: str) -> None:
    config = CASES[case]
    model = random_vit(config)
    tokens = model.embed(images_for(config))
    assert tokens.shape == (2, config.prefix + config.patches, config.width)
    learned = [token for token in (model.cls_token, model.dist_token, model.reg_token) if token is not None]
    assert sum(token.shape[1] for token in learned) == config.prefix


def test_the_class_token_comes_first_then_the_distillation_token_then_registers() -> None:
    config = placed("none", tokens=TokenConfig(distillation=True, registers=2))
    model = random_vit(config)
    prefix = model.embed(images_for(config))[:, :4]
    assert torch.equal(prefix, torch.cat([model.cls_token, model.dist_token, model.reg_token], dim=1).expand(2, -1, -1))


# Patches left out

LEAVABLE = {
    "positions": small(),
    "registers": small(tokens=TokenConfig(registers=2)),
    "mean": small(pooling="mean"),
    "no-positions": placed("none"),
    "2d": placed("learned_2d", tokens=TokenConfig(distillation=True)),
    "sincos": placed("sincos_2d", pooling="map"),
}


@pytest.mark.parametrize("keep", [1, 6, 24])
@pytest.mark.parametrize("case", LEAVABLE)
def test_visible_patches_are_embedded_as_in_the_whole_image(case: str, keep: int) -> None:
    model = random_vit(LEAVABLE[case])
    config, images = model.config, images_for(model.config)
    visible = random_patches(2, patches=config.patches, keep=keep)
    whole, seen = model.embed(images), model.embed(images, visible=visible)
    assert torch.equal(seen[:, : config.prefix], whole[:, : config.prefix])
    for image in range(2):
        assert torch.equal(seen[image, config.prefix :], whole[image, config.prefix + visible[image]])


@pytest.mark.parametrize("case", LEAVABLE)
def test_patch_dropout_leaves_patches_out_in_training_only(case: str) -> None:
    config = replace(LEAVABLE[case], dropout=DropoutConfig(patches=0.75))
    model = random_vit(config)
    images = images_for(config)
    assert model.embed(images).shape[1] == config.prefix + 24
    model.train()
    tokens = model.embed(images)
    assert tokens.shape[1] == config.prefix + 6
    assert not torch.equal(model.embed(images), tokens)
    assert model(images).shape == (2, 5)


def test_patch_dropout_leaves_at_least_one_patch() -> None:
    model = random_vit(small(dropout=DropoutConfig(patches=0.999))).train()
    assert model.embed(images_for(model.config)).shape[1] == model.config.prefix + 1


NEEDS_ALL_PATCHES = {
    **{f"{kind}-{place}": placed(kind, place) for kind in ALLOWED for place in sorted(ALLOWED[kind] - {"stem"})},
    "axial": small(pooling="mean", block=BlockConfig(axial=True)),
}


@pytest.mark.parametrize("case", NEEDS_ALL_PATCHES)
def test_visible_patches_are_refused_where_later_layers_need_them_all(case: str) -> None:
    config = NEEDS_ALL_PATCHES[case]
    model = random_vit(config)
    visible = torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(ConfigError, match="patches can be left out only where") as raised:
        model.embed(images_for(config), visible=visible)
    assert config.positions.kind in str(raised.value.got)


@pytest.mark.parametrize("case", NEEDS_ALL_PATCHES)
def test_patch_dropout_is_refused_where_later_layers_need_all_patches(case: str) -> None:
    with pytest.raises(ConfigError, match="patches can be left out only where") as raised:
        replace(NEEDS_ALL_PATCHES[case], dropout=DropoutConfig(patches=0.5))
    assert raised.value.expected == "positions.injection = stem and no axial blocks"
    assert NEEDS_ALL_PATCHES[case].positions.kind in str(raised.value.got)


# Number formats

# bfloat16 keeps 8 bits, so each of about ten roundings in a row moves a number by up to 2⁻⁹ of its size: at most 3.
BFLOAT16 = {"rtol": 0.0, "atol": 0.06}


def with_random_head(case: str) -> Model:
    """Weights as they start, but for the head: the logits of trained and fresh models are of size 1."""
    model = fresh(CASES[case]).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("head"):
            torch.nn.init.normal_(parameter, std=0.25)
    return model


@pytest.mark.parametrize("case", CASES)
def test_half_precision_weights_give_almost_the_same_logits(case: str) -> None:
    model = with_random_head(case)
    images = images_for(model.config)
    with torch.no_grad():
        full = model(images)
        half = model.to(torch.bfloat16)(images.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    torch.testing.assert_close(half.float(), full, **BFLOAT16)


@pytest.mark.parametrize("case", CASES)
def test_autocast_gives_almost_the_same_logits_and_full_gradients(case: str) -> None:
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
def test_attention_can_be_kept_under_autocast(case: str) -> None:
    model = random_vit(CASES[case])
    images = images_for(model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = model.encode(model.embed(images), keep=Keep(attention=[-1])).attention[len(model.blocks) - 1]
    # A row sums up to 25 weights, each rounded to 8 bits of its size: half of 2⁻⁸ at the most.
    torch.testing.assert_close(weights.float().sum(dim=-1), torch.ones(weights.shape[:3]), rtol=0, atol=2**-8)


def test_evaluation_leaves_no_trace() -> None:
    model = random_vit(small())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = images_for(model.config)
    untouched = images.clone()
    model(images)
    assert torch.equal(images, untouched)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
