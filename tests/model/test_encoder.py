"""Blocks and encoding: capture, limited rows, stochastic depth and dropout."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import CASES, block_with_attention, images_for, random_vit, randomized, small, with_positions
from torch import Tensor, nn
from torch.nn import functional

from vitkit.core.errors import ConfigError, InputError
from vitkit.model.config import BlockConfig, DropoutConfig, TokenConfig
from vitkit.model.encoder import Capture, LayerScale, Mlp, StochasticDepth, SwiGlu, create_blocks
from vitkit.model.vit import ViT

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs
DEPTH = 4

KEPT = {
    "plain": small(depth=DEPTH),
    "relative": with_positions("relative", depth=DEPTH),
    "rotary": with_positions("rotary", depth=DEPTH, tokens=TokenConfig(registers=2)),
    "qk-norm": small(depth=DEPTH, block=block_with_attention(qk_norm=True)),
    "every-layer": with_positions("learned_1d", "every_layer", depth=DEPTH),
    "shared": with_positions("learned_2d", "shared", depth=DEPTH),
    "axial": small(depth=DEPTH // 2, pooling="mean", block=BlockConfig(axial=True)),
}


@pytest.fixture(params=list(KEPT))
def model(request: pytest.FixtureRequest) -> ViT:
    return random_vit(KEPT[request.param], dtype=torch.float64)


@pytest.fixture
def tokens(model: ViT) -> Tensor:
    return model.embed(images_for(model.config, dtype=torch.float64)).detach()


# Capture


def test_encode_captures_nothing_by_default(model: ViT, tokens: Tensor) -> None:
    encoded = model.encode(tokens)
    assert (encoded.attention, encoded.queries, encoded.keys, encoded.outputs) == ({}, {}, {}, {})


def test_encode_captures_exactly_the_requested_layers(model: ViT, tokens: Tensor) -> None:
    keep = Capture(attention=[0, -1], queries=[1], keys=[-2, 1], outputs=[0, 2])
    encoded = model.encode(tokens, capture=keep)
    assert set(encoded.attention) == {0, DEPTH - 1}
    assert set(encoded.queries) == {1}
    assert set(encoded.keys) == {DEPTH - 2, 1}
    assert set(encoded.outputs) == {0, 2}


def test_captured_tensors_cover_the_whole_sequence(model: ViT, tokens: Tensor) -> None:
    config, length = model.config, tokens.shape[1]
    encoded = model.encode(tokens, capture=Capture(attention=[1], queries=[1], keys=[1], outputs=[1]))
    assert encoded.attention[1].shape == (2, config.heads, length, length)
    assert encoded.queries[1].shape == encoded.keys[1].shape == (2, config.heads, length, config.head_width)
    assert encoded.outputs[1].shape == tokens.shape


def test_capture_does_not_change_the_output(model: ViT, tokens: Tensor) -> None:
    everything = range(DEPTH)
    keep = Capture(attention=everything, queries=everything, keys=everything, outputs=everything)
    assert torch.equal(model.encode(tokens, capture=keep).tokens, model.encode(tokens).tokens)


def test_negative_layer_index_counts_from_the_end(model: ViT, tokens: Tensor) -> None:
    from_the_end = model.encode(tokens, capture=Capture(attention=[-3], outputs=[-3]))
    from_the_start = model.encode(tokens, capture=Capture(attention=[1], outputs=[1]))
    assert torch.equal(from_the_end.attention[1], from_the_start.attention[1])
    assert torch.equal(from_the_end.outputs[1], from_the_start.outputs[1])


def test_captured_outputs_are_the_tokens_after_each_block(model: ViT, tokens: Tensor) -> None:
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda *call: seen.append(call[2])) for block in model.blocks]
    encoded = model.encode(tokens, capture=Capture(outputs=range(DEPTH)))
    for hook in hooks:
        hook.remove()
    assert len(seen) == DEPTH
    for layer, output in enumerate(seen):
        assert torch.equal(encoded.outputs[layer], output)
    assert torch.equal(encoded.outputs[DEPTH - 1], encoded.tokens)


def test_captured_attention_reproduces_the_layer_output(model: ViT, tokens: Tensor) -> None:
    layer, heads = 2, model.config.heads
    block = model.blocks[layer]
    entering: list[Tensor] = []
    hook = block.attn.qkv.register_forward_pre_hook(lambda _, arguments: entering.append(arguments[0]))
    attended: list[Tensor] = []
    other = block.attn.register_forward_hook(lambda *call: attended.append(call[2]))
    weights = model.encode(tokens, capture=Capture(attention=[layer])).attention[layer]
    hook.remove()
    other.remove()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]), **EXACT)
    values = block.attn.qkv(entering[0]).chunk(3, dim=-1)[2].unflatten(2, (heads, -1)).transpose(1, 2)
    by_hand = block.attn.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(by_hand, attended[0], **EXACT)


@pytest.mark.parametrize("case", ["plain", "rotary", "qk-norm", "every-layer", "shared"])
def test_captured_queries_and_keys_give_the_attention(case: str) -> None:
    model = random_vit(KEPT[case], dtype=torch.float64)
    tokens = model.embed(images_for(model.config, dtype=torch.float64))
    encoded = model.encode(tokens, capture=Capture(attention=[1], queries=[1], keys=[1]))
    logits = encoded.queries[1] @ encoded.keys[1].mT / math.sqrt(model.config.head_width)
    torch.testing.assert_close(logits.softmax(dim=-1), encoded.attention[1], **EXACT)


def test_captured_queries_keys_and_bias_give_the_attention() -> None:
    model = random_vit(KEPT["relative"], dtype=torch.float64)
    tokens = model.embed(images_for(model.config, dtype=torch.float64))
    encoded = model.encode(tokens, capture=Capture(attention=[1], queries=[1], keys=[1]))
    logits = encoded.queries[1] @ encoded.keys[1].mT / math.sqrt(model.config.head_width)
    relative = model.relative[1]
    logits = logits + relative(encoded.queries[1])
    torch.testing.assert_close(logits.softmax(dim=-1), encoded.attention[1], **EXACT)


def test_captured_queries_do_not_keep_the_projections_alive(model: ViT, tokens: Tensor) -> None:
    queries = model.encode(tokens, capture=Capture(queries=[0])).queries[0]
    assert queries.untyped_storage().nbytes() == queries.numel() * queries.element_size()


def test_attention_weights_are_computed_in_captured_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_vit(KEPT["plain"])
    calls: list[int] = []
    for layer, block in enumerate(model.blocks):
        weights = block.attn.attention_weights
        spy = lambda *a, weights=weights, n=layer: (calls.append(n), weights(*a))[1]  # noqa: E731
        monkeypatch.setattr(block.attn, "attention_weights", spy)
    model.encode(model.embed(images_for(model.config)), capture=Capture(attention=[1, -1], queries=[0]))
    assert calls == [1, 3]


@pytest.mark.parametrize("what", ["attention", "queries", "keys", "outputs"])
@pytest.mark.parametrize("layer", [DEPTH, -DEPTH - 1, 100])
def test_capture_rejects_unknown_layers(what: str, layer: int) -> None:
    model = random_vit(KEPT["plain"])
    tokens = model.embed(images_for(model.config))
    with pytest.raises(InputError, match="no such layer to capture") as raised:
        model.encode(tokens, capture=Capture(**{what: [0, layer]}))
    assert (raised.value.expected, raised.value.got) == (f"{-DEPTH} to {DEPTH - 1}", layer)


def test_axial_layer_counts_as_two() -> None:
    model = random_vit(KEPT["axial"])
    tokens = model.embed(images_for(model.config))
    assert set(model.encode(tokens, capture=Capture(outputs=[-1])).outputs) == {2 * model.config.depth - 1}


# The first rows only


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_equal_the_first_rows_of_the_full_encoding(model: ViT, tokens: Tensor, rows: int) -> None:
    """For all positions and all kinds of attention, axial included."""
    full = model.encode(tokens).tokens
    first = model.encode(tokens, rows=rows).tokens
    assert first.shape == (2, rows, model.config.width)
    torch.testing.assert_close(first, full[:, :rows], **EXACT)


@pytest.mark.parametrize("case", KEPT)
def test_rows_have_the_gradients_of_the_full_encoding(case: str) -> None:
    model = random_vit(KEPT[case], dtype=torch.float64)
    images = images_for(model.config, dtype=torch.float64)
    direction = torch.randn(2, model.config.width, dtype=torch.float64)

    def gradients(rows: int | None) -> dict[str, Tensor | None]:
        model.zero_grad()
        (model.encode(model.embed(images), rows=rows).tokens[:, 0] * direction).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients(1), gradients(None), rtol=1e-10, atol=1e-10)  # up to the order of sums


@pytest.mark.parametrize("case", ["plain", "relative", "rotary", "axial"])
def test_capture_is_complete_when_rows_are_limited(case: str) -> None:
    model = random_vit(KEPT[case])
    tokens = model.embed(images_for(model.config))
    few = model.encode(tokens, capture=Capture(attention=[-1]), rows=1).attention[DEPTH - 1]
    assert torch.equal(few, model.encode(tokens, capture=Capture(attention=[-1])).attention[DEPTH - 1])


# Blocks


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
def test_mlp_is_two_dense_layers_with_gelu(activation: str) -> None:
    module = randomized(Mlp(width=6, mlp_dim=10, activation=activation, dropout=0.0)).double()
    tokens = torch.randn(2, 3, 6, dtype=torch.float64)
    hidden = module.fc1(tokens)
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        gate = (1 + torch.tanh(inner)) / 2
    else:
        gate = (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(module(tokens), module.fc2(hidden * gate), **EXACT)


def test_swiglu_gates_one_half_by_the_silu_of_the_other() -> None:
    module = randomized(SwiGlu(width=6, mlp_dim=10, dropout=0.0)).double()
    tokens = torch.randn(2, 3, 6, dtype=torch.float64)
    gate = functional.linear(tokens, module.fc1.weight[:10], module.fc1.bias[:10])
    hidden = functional.linear(tokens, module.fc1.weight[10:], module.fc1.bias[10:])
    expected = module.fc2(gate * torch.sigmoid(gate) * hidden)
    torch.testing.assert_close(module(tokens), expected, **EXACT)


def test_layer_scale_multiplies_both_branches() -> None:
    config = small(depth=1, block=BlockConfig(layer_scale=0.1))
    model = random_vit(config, dtype=torch.float64)
    block = model.blocks[0]
    assert isinstance(block.ls1, LayerScale)
    tokens = torch.randn(2, 7, config.width, dtype=torch.float64)
    middle = tokens + block.attn(block.norm1(tokens)) * block.ls1.gamma
    expected = middle + block.mlp(block.norm2(middle)) * block.ls2.gamma
    torch.testing.assert_close(block(tokens), expected, **EXACT)


def test_zero_layer_scale_makes_a_block_the_identity() -> None:
    model = random_vit(small(block=BlockConfig(layer_scale=0.1)))
    for block in model.blocks:
        nn.init.zeros_(block.ls1.gamma)
        nn.init.zeros_(block.ls2.gamma)
    tokens = model.embed(images_for(model.config))
    assert torch.equal(model.encode(tokens).tokens, tokens)


def test_norms_have_the_configured_epsilon() -> None:
    model = ViT(small(pooling="map", block=BlockConfig(norm_eps=1e-3)))
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 1 + 1  # two per block, the last one, and that of the pooling
    assert {norm.eps for norm in norms} == {1e-3}
    assert {m.eps for m in ViT(small()).modules() if isinstance(m, nn.LayerNorm)} == {1e-6}


# Stochastic depth


def test_stochastic_depth_is_off_in_evaluation_or_at_rate_zero() -> None:
    branch = torch.randn(5, 3, 4)
    assert StochasticDepth(0.7).eval()(branch) is branch
    assert StochasticDepth(0.0).train()(branch) is branch


@given(share=st.floats(0.1, 0.9), seed=st.integers(0, 1000))
def test_stochastic_depth_drops_whole_images_and_rescales(share: float, seed: int) -> None:
    torch.manual_seed(seed)
    branch = torch.rand(50, 3, 4) + 1
    dropped = StochasticDepth(share).train()(branch)
    zero = dropped == 0
    whole = zero.all(dim=(1, 2))
    assert torch.equal(whole, zero.any(dim=(1, 2)))
    torch.testing.assert_close(dropped[~whole], branch[~whole] / (1 - share))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_stochastic_depth_preserves_the_expectation(share: float) -> None:
    images = 20_000
    dropped = StochasticDepth(share).train()(torch.ones(images, 1, 1))
    # One image is 1/(1-s) with probability 1-s, so the standard deviation of the mean is sqrt(s / (1-s) / images).
    assert dropped.mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(share / (1 - share) / images))


@pytest.mark.parametrize(("depth", "axial"), [(1, False), (2, False), (5, False), (3, True)])
def test_stochastic_depth_rate_grows_linearly_with_depth(depth: int, axial: bool) -> None:
    settings = {"block": BlockConfig(axial=axial), "dropout": DropoutConfig(stochastic_depth=0.6)}
    made = create_blocks(small(depth=depth, pooling="mean", **settings))
    shares = [block.stochastic_depth.rate for block in made]
    count = depth * (2 if axial else 1)
    assert shares == pytest.approx([0.6 * layer / max(count - 1, 1) for layer in range(count)])
    assert depth == 1 or (shares[0], shares[-1]) == (0.0, 0.6)


def test_image_with_dropped_branches_is_unchanged() -> None:
    model = random_vit(small(depth=2, dropout=DropoutConfig(stochastic_depth=0.9))).train()
    tokens = torch.randn(200, 5, model.config.width)
    passed = model.blocks[1](tokens)
    unchanged = (passed == tokens).all(dim=(1, 2))
    # Both branches are dropped with probability 0.81: 162 of 200, standard deviation 5.5, and 5 of those to each side.
    assert 134 <= unchanged.sum() <= 190
    assert not (passed[~unchanged] == tokens[~unchanged]).all(dim=(1, 2)).any()


# Dropout of dense layers


def test_dropout_acts_in_training_only() -> None:
    model = random_vit(small(dropout=DropoutConfig(dense=0.2)))
    images = images_for(model.config)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.isclose(model(images), model(images)).any()


def test_zero_dropout_makes_training_deterministic() -> None:
    model = random_vit(small()).train()
    images = images_for(model.config)
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("case", ["learned_1d-stem", "relative-shared", "rotary-shared", "qk-norm", "axial"])
def test_dropout_does_not_act_on_qkv(case: str) -> None:
    fields = {"dropout": DropoutConfig(dense=0.5)}
    config = CASES[case]
    model = random_vit(small(positions=config.positions, block=config.block, pooling=config.pooling, **fields))
    attention = model.blocks[0].attn
    tokens = torch.randn(2, model.config.prefix + model.config.patches, model.config.width)
    evaluated = attention.project_sequence(tokens)
    attention.train()
    trained = attention.project_sequence(tokens)
    assert torch.equal(trained.queries, evaluated.queries)
    assert torch.equal(trained.keys, evaluated.keys)
    assert torch.equal(trained.values, evaluated.values)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_dropout_follows_positions_and_every_dense_layer_but_qkv(activation: str) -> None:
    """Appendix B.1: one dropout at the stem and three per block, one after the attention and two in the MLP."""
    config = small(depth=3, dropout=DropoutConfig(dense=0.2), block=BlockConfig(activation=activation))
    model = random_vit(config).train()
    entering: dict[str, list[Tensor]] = {}
    leaving: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.2
            module.register_forward_pre_hook(lambda _, a, name=name: entering.setdefault(name, []).append(a[0]))
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *call, name=name: leaving.__setitem__(name, call[2]))
    images = images_for(config)
    model.encode(model.embed(images))
    assert sum(len(calls) for calls in entering.values()) == 1 + 3 * config.depth
    with torch.no_grad():
        embedded = model.eval().embed(images)
        torch.testing.assert_close(entering["dropout"][0], embedded)
    for layer in range(config.depth):
        block = f"blocks.{layer}"
        assert entering[f"{block}.dropout"][0] is leaving[f"{block}.attn.proj"]
        hidden, output = entering[f"{block}.mlp.dropout"]
        assert output is leaving[f"{block}.mlp.fc2"]
        assert hidden.shape[-1] == config.mlp_dim


@pytest.mark.parametrize(("name", "share"), [("dense", 1.0), ("stochastic_depth", -0.1), ("patches", float("nan"))])
def test_dropout_rate_must_be_a_fraction(name: str, share: float) -> None:
    wrong: dict[str, Any] = {name: share}
    with pytest.raises(ConfigError, match=rf"dropout\.{name} is not a fraction") as raised:
        DropoutConfig(**wrong)
    assert raised.value.expected == "0 ≤ fraction < 1"
    assert raised.value.got is share
