"""Token merging equals a reference implementation of Bolya et al. (2023) with loops over single tokens."""

import math
from typing import Any

import pytest
import torch
from model_cases import CASES, images_for, random_vit, small
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.inference.engine import eager_engine
from vitkit.inference.select import select_engine
from vitkit.inference.token_merging import TokenMergingViT, check_merging, match_tokens, merge_tokens, pair_count
from vitkit.model.config import BlockConfig, HeadConfig, TokenConfig, ViTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create


class Token:
    """A token of the reference: its vector, the patches in it, and whether it may be merged."""

    def __init__(self, vector: Tensor, patches: int, is_patch: bool) -> None:
        self.vector, self.patches, self.is_patch = vector, patches, is_patch


def attended(attention: Any, tokens: list[Token], normed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What each token draws from the others, a token of s patches counting as s tokens; and the mean key of each."""
    queries, keys, values = attention.qkv(normed).chunk(3, dim=-1)
    share = normed.shape[-1] // attention.heads
    drawn = []
    for here in range(len(tokens)):
        parts = []
        for head in range(attention.heads):
            part = slice(head * share, (head + 1) * share)
            weights = [
                other.patches * math.exp(float(queries[here, part] @ keys[there, part]) / math.sqrt(share))
                for there, other in enumerate(tokens)
            ]
            total = sum(weights)
            parts.append(sum(weight / total * values[there, part] for there, weight in enumerate(weights)))
        drawn.append(attention.proj(torch.cat(parts)))
    return drawn, [key.unflatten(0, (attention.heads, -1)).mean(dim=0) for key in keys]


def likeness(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def merge_slowly(tokens: list[Token], keys: list[Tensor], r: int) -> list[Token]:
    """Section 3: alternate, find each one's likest, keep the r likest edges, average what is joined, join the sets."""
    first, second = list(range(0, len(tokens), 2)), list(range(1, len(tokens), 2))
    edges = []
    for here in first:
        mates = [(likeness(keys[here], keys[there]), there) for there in second if tokens[there].is_patch]
        if tokens[here].is_patch and mates:
            edges.append((*max(mates, key=lambda mate: mate[0]), here))
    edges.sort(key=lambda edge: -edge[0])
    moved = {here: there for _, there, here in edges[:r]}
    groups: dict[int, list[int]] = {there: [there] for there in second}
    for here, there in moved.items():
        groups[there].append(here)
    result = [tokens[here] for here in first if here not in moved]
    for there in second:
        members = [tokens[index] for index in groups[there]]
        patches = sum(member.patches for member in members)
        vector = sum(member.vector * member.patches for member in members) / patches
        result.append(Token(vector, patches, tokens[there].is_patch))
    return [token for token in result if not token.is_patch] + [token for token in result if token.is_patch]


def slow_features(model: ViT, image: Tensor, r: int) -> Tensor:
    """The features of one image, token by token, in float64."""
    config = model.config
    vectors = model.embed(image[None])[0]
    tokens = [Token(vector, 1, place >= config.prefix) for place, vector in enumerate(vectors)]
    for block in model.blocks:
        drawn, keys = attended(block.attn, tokens, block.norm1(torch.stack([token.vector for token in tokens])))
        for token, branch in zip(tokens, drawn, strict=True):
            token.vector = token.vector + block.ls1(branch[None, None])[0, 0]
        possible = sum(token.is_patch for token in tokens) // 2
        tokens = merge_slowly(tokens, keys, min(r, possible))
        for token in tokens:
            token.vector = token.vector + block.ls2(block.mlp(block.norm2(token.vector[None, None])))[0, 0]
    if config.pooling == "class":
        pooled = torch.cat([model.norm(token.vector) for token in tokens[: config.class_tokens]])
        return model.pre_logits(model.fc_norm(pooled[None]))[0]
    # As many copies of a token as it has patches: pooling that knows nothing of sizes sees what it should.
    copies = [model.norm(token.vector) for token in tokens for _ in range(token.patches)]
    if model.attn_pool is not None:
        return model.pre_logits(model.fc_norm(model.attn_pool(torch.stack(copies)[None])))[0]
    return model.pre_logits(model.fc_norm(torch.stack(copies[config.prefix :]).mean(dim=0)[None]))[0]


MERGED: dict[str, ViTConfig] = {
    "class": small(depth=3),
    "mean": small(depth=3, pooling="mean"),
    "mean-with-class-token": CASES["mean-with-class-token"],
    "map": small(depth=3, pooling="map"),
    "registers": small(depth=3, tokens=TokenConfig(registers=2)),
    "registers-mean": CASES["registers-mean"],
    "distilled": CASES["distilled"],
    "distilled-registers": CASES["distilled-registers"],
    "layer-scale": CASES["layer-scale"],
    "norm-after-mean-pooling": CASES["norm-after-mean-pooling"],
    "pre-logits": small(head=HeadConfig(pre_logits=12)),
    "swiglu": small(block=BlockConfig(activation="swiglu")),
    "qk-norm": CASES["qk-norm"],
    "hybrid": CASES["hybrid"],
}


@pytest.mark.parametrize("r", [1, 3, 40])
@pytest.mark.parametrize("name", [name for name in MERGED if name != "qk-norm"])
def test_merging_equals_the_reference(name: str, r: int) -> None:
    config = MERGED[name]
    # Float64, so that two likenesses that are nearly the same are not taken for each other.
    model, images = random_vit(config, dtype=torch.float64), images_for(config, dtype=torch.float64)
    with torch.no_grad():
        found = TokenMergingViT(model, merge=r).features(images)
        expected = torch.stack([slow_features(model, image, r) for image in images])
    # Matching compares float32 cosines; everything else is float64.
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", MERGED)
def test_merging_zero_tokens_changes_nothing(name: str) -> None:
    config = MERGED[name]
    model, images = random_vit(config), images_for(config)
    with torch.no_grad():
        expected = model(images)
        # The attention kernel is the same, so are the numbers, up to the order of two sums.
        torch.testing.assert_close(TokenMergingViT(model, merge=0)(images), expected, atol=1e-5, rtol=1e-5)
    assert select_engine(model).engine.name == select_engine(model, merge=0).engine.name


def test_tokens_decrease_per_layer() -> None:
    model = random_vit(small(depth=6))
    seen: list[int] = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    merging = TokenMergingViT(model, merge=8)
    with torch.no_grad():
        merging(images_for(small()))
    assert seen == merging.tokens_per_layer() == [25, 17, 9, 5, 3, 2]
    assert [pair_count(patches, merge=8) for patches in (24, 16, 8, 4, 2, 1)] == [8, 8, 4, 2, 1, 0]


def test_sizes_sum_to_the_number_of_patches() -> None:
    tokens, keys = torch.randn(2, 13, 4), torch.randn(2, 13, 4)
    found, sizes = merge_tokens(tokens, None, match_tokens(keys, merge=5, prefix=1), prefix=1)
    again, counts = merge_tokens(found, sizes, match_tokens(torch.randn(2, 8, 4), merge=3, prefix=1), prefix=1)
    assert (found.shape[1], again.shape[1]) == (8, 5)
    for numbers, weights in ((found, sizes), (again, counts)):
        assert weights.sum(dim=1).tolist() == [13.0, 13.0]
        # The weighted sum over all tokens is what it was: merging takes means and loses nothing.
        torch.testing.assert_close((numbers * weights[:, :, None]).sum(dim=1), tokens.sum(dim=1), atol=1e-5, rtol=0)
        assert torch.equal(numbers[:, 0], tokens[:, 0])  # the class token is itself


def test_prefix_tokens_are_never_merged() -> None:
    tokens = torch.randn(1, 12, 4)
    match = match_tokens(torch.ones(1, 12, 4), merge=4, prefix=3)  # all alike: anyone could be merged with anyone
    found, sizes = merge_tokens(tokens, None, match, prefix=3)
    assert torch.equal(found[:, :3], tokens[:, :3])
    assert sizes[0, :3].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_merging_in_every_precision(precision: str) -> None:
    config = MERGED["registers"]
    model, images = random_vit(config), images_for(config)
    engine = select_engine(model, precision=precision, merge=2).engine
    with torch.no_grad():
        merging = TokenMergingViT(model, merge=2)(images)
        expected = model(images)
    found = engine.forward(images)[1]
    if precision == "fp32":
        torch.testing.assert_close(found, merging, atol=1e-4, rtol=0)
    assert not torch.allclose(found, expected, atol=1e-4)
    assert "merging 2 tokens per layer" in engine.name
    assert torch.equal(eager_engine(model).forward(images)[1], expected)


@pytest.mark.parametrize(
    "name", ["axial", "relative-every_layer", "rotary-shared", "learned_1d-every_layer", "learned_2d-shared"]
)
def test_model_without_mergeable_tokens_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="tokens can be merged only if") as caught:
        select_engine(random_vit(CASES[name]), merge=2)
    assert caught.value.hint


def test_resnets_and_negative_counts_are_rejected() -> None:
    with pytest.raises(ConfigError, match="only Vision Transformers"):
        check_merging(create("BiT-R50x1", device="meta"), 4)
    with pytest.raises(ConfigError, match="cannot be negative"):
        check_merging(create("Ti/16", device="meta"), -1)
