"""Pooling and heads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import CASES, images_for, random_vit, randomized, small
from torch import Tensor

from vitkit.model.config import Activation, BlockConfig, HeadConfig, TokenConfig, ViTConfig
from vitkit.model.heads import AttentionPool, DistilledHead, PreLogits
from vitkit.model.vit import ViT

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs


def tokens_of(model: ViT) -> Tensor:
    return torch.randn(2, model.config.prefix + model.config.patches, model.config.width, dtype=torch.float64)


def layer_norm(vectors: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """LayerNorm by its definition."""
    centered = vectors - vectors.mean(dim=-1, keepdim=True)
    variance = centered.square().mean(dim=-1, keepdim=True)
    return centered / (variance + norm.eps).sqrt() * norm.weight + norm.bias


# Pooling


@pytest.mark.parametrize("registers", [0, 2])
def test_class_pooling_is_the_normalized_first_token(registers: int) -> None:
    model = random_vit(small(tokens=TokenConfig(registers=registers)), dtype=torch.float64)
    tokens = tokens_of(model)
    torch.testing.assert_close(model.pool_layer(tokens), layer_norm(tokens[:, 0], model.norm), **EXACT)


@pytest.mark.parametrize("tokens_before", [TokenConfig(), TokenConfig(class_token=True, registers=2)], ids=str)
def test_mean_pooling_averages_normalized_patches_only(tokens_before: TokenConfig) -> None:
    model = random_vit(small(pooling="mean", tokens=tokens_before), dtype=torch.float64)
    tokens = tokens_of(model)
    patches = tokens[:, model.config.prefix :]
    torch.testing.assert_close(model.pool_layer(tokens), layer_norm(patches, model.norm).mean(dim=1), **EXACT)


def test_norm_after_pooling_normalizes_the_mean() -> None:
    model = random_vit(small(pooling="mean", head=HeadConfig(norm="after_pooling")), dtype=torch.float64)
    tokens = tokens_of(model)
    torch.testing.assert_close(model.pool_layer(tokens), layer_norm(tokens.mean(dim=1), model.fc_norm), **EXACT)


def test_distilled_features_concatenate_both_tokens() -> None:
    model = random_vit(small(tokens=TokenConfig(distillation=True, registers=1)), dtype=torch.float64)
    tokens = tokens_of(model)
    expected = torch.cat([layer_norm(tokens[:, 0], model.norm), layer_norm(tokens[:, 1], model.norm)], dim=1)
    torch.testing.assert_close(model.pool_layer(tokens), expected, **EXACT)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "swiglu"])
@given(batch=st.integers(1, 3), length=st.integers(1, 6), heads=st.integers(1, 3), share=st.integers(1, 4))
def test_attention_pooling_attends_with_one_learned_query(
    activation: Activation, batch: int, length: int, heads: int, share: int
) -> None:
    width = heads * share
    config = ViTConfig(width=width, heads=heads, mlp_dim=5, block=BlockConfig(activation=activation))
    pool = AttentionPool(config)
    torch.nn.init.zeros_(pool.latent)
    pool = randomized(pool).double()
    tokens = torch.randn(batch, length, width, dtype=torch.float64)
    keys, values = pool.kv(tokens).chunk(2, dim=-1)
    query = pool.q(pool.latent)[0, 0]
    for image in range(batch):
        seen = []
        for head in range(heads):
            part = slice(head * share, (head + 1) * share)
            logits = torch.stack([torch.dot(query[part], key[part]) / math.sqrt(share) for key in keys[image]])
            seen.append(logits.softmax(dim=0) @ values[image, :, part])
        pooled = pool.proj(torch.cat(seen))
        expected = pooled + pool.mlp(layer_norm(pooled, pool.norm)[None, None])[0, 0]
        torch.testing.assert_close(pool(tokens)[image], expected, **EXACT)


def test_attention_pooling_includes_prefix_tokens() -> None:
    model = random_vit(small(pooling="map", tokens=TokenConfig(class_token=True)), dtype=torch.float64)
    tokens = tokens_of(model)
    assert model.attn_pool is not None
    torch.testing.assert_close(model.pool_layer(tokens), model.attn_pool(layer_norm(tokens, model.norm)), **EXACT)
    changed = tokens.clone()
    changed[:, 0] += torch.randn(model.config.width)
    assert not torch.isclose(model.pool_layer(changed), model.pool_layer(tokens)).all(dim=1).any()


# Heads


def test_pre_logits_are_dense_and_tanh() -> None:
    layer = randomized(PreLogits(6, 4)).double()
    features = torch.randn(3, 6, dtype=torch.float64)
    by_hand = torch.tanh(features @ layer.fc.weight.T + layer.fc.bias)
    torch.testing.assert_close(layer(features), by_hand, **EXACT)


def test_the_classifier_reads_the_pre_logits() -> None:
    config = CASES["pre-logits"]
    model = random_vit(config)
    features = model.features(images_for(config))
    assert features.shape == (2, 12)
    assert features.abs().max() < 1
    assert model.head.in_features == config.num_features == 12


def test_distilled_head_averages_two_classifiers() -> None:
    head = randomized(DistilledHead(6, 4)).double()
    features = torch.randn(3, 12, dtype=torch.float64)
    label, teacher = head.forward_both(features)
    torch.testing.assert_close(label, features[:, :6] @ head.label.weight.T + head.label.bias, **EXACT)
    torch.testing.assert_close(teacher, features[:, 6:] @ head.teacher.weight.T + head.teacher.bias, **EXACT)
    torch.testing.assert_close(head(features), (label + teacher) / 2, **EXACT)


@pytest.mark.parametrize("bias", [0.0, -10.0])
@pytest.mark.parametrize("case", ["learned_1d-stem", "map", "distilled", "pre-logits-mean", "axial", "hybrid"])
def test_new_model_returns_its_initial_bias(case: str, bias: float) -> None:
    config = CASES[case]
    head = HeadConfig(bias=bias, pre_logits=config.head.pre_logits)
    fields = {name: getattr(config, name) for name in ("pooling", "tokens", "block", "backbone", "image_size")}
    model = ViT(small(head=head, patch_size=config.patch_size, **fields)).eval()
    assert (model(images_for(model.config)) == bias).all()


@pytest.mark.parametrize(("case", "width"), [("headless", 16), ("headless-distilled", 32)])
def test_without_classes_the_logits_are_the_features(case: str, width: int) -> None:
    config = CASES[case]
    model = random_vit(config)
    images = images_for(config)
    assert torch.equal(model(images), model.features(images))
    assert model(images).shape == (2, width)


@pytest.mark.parametrize("case", CASES)
def test_features_have_the_configured_width(case: str) -> None:
    config = CASES[case]
    assert random_vit(config).features(images_for(config)).shape == (2, config.num_features)
