"""Fitting weights to another model: positions resampled, the head new and zero, all else as it was or refused."""

import pytest
import torch

from vitkit.checkpoints.adapt import adapt
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.model.resample import resample_grid, resample_positions
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=16", "depth=2", "heads=2", "mlp_dim=32")


def vit(*settings: str, side: int = 16, classes: int = 3) -> ModelConfig:
    small = configure("Ti/16", image_size=side, patch_size=4, classes=classes, settings=SIZES)
    return configure(small, settings=settings)


def weights(config: ModelConfig) -> dict[str, Tensor]:
    model = create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model.state_dict()


BIT = BiTConfig(units=(1, 1), classes=3)


@pytest.mark.parametrize("config", [vit(), vit("head.pre_logits=8"), vit("positions.kind=relative"), BIT])
def test_the_same_model_keeps_every_bit(config) -> None:
    state = weights(config)
    adapted = adapt(state, old=config, new=config)
    assert adapted.changes == ()
    assert adapted.state.keys() == state.keys()
    assert all(torch.equal(adapted.state[name], state[name]) for name in state)


@pytest.mark.parametrize("settings", [(), ("pooling=mean",), ("tokens.registers=2",), ("positions.origin=timm",)])
def test_positions_are_resampled_by_their_place_and_by_the_kernel_of_their_origin(settings) -> None:
    old, new = vit(*settings), vit(*settings, side=24)
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    wanted = resample_positions(
        state["pos_embed"], prefix=old.placed_prefix, old=(4, 4), new=(6, 6), origin=old.positions.origin
    )
    assert torch.equal(adapted.state["pos_embed"], wanted)
    assert adapted.changes == ("position embeddings: grid 4×4 → 6×6",)
    others = state.keys() - {"pos_embed"}
    assert all(torch.equal(adapted.state[name], state[name]) for name in others)
    create(new).load_state_dict(adapted.state)


def test_rows_and_columns_are_resampled_each_along_their_own_side() -> None:
    kind = "positions.kind=learned_2d"
    old, new = vit(kind), configure(vit(kind), image_size=(24, 8))
    state = weights(old)
    adapted = adapt(state, old=old, new=new).state
    assert torch.equal(adapted["pos_embed.y"], resample_grid(state["pos_embed.y"], old=(1, 4), new=(1, 6)))
    assert torch.equal(adapted["pos_embed.x"], resample_grid(state["pos_embed.x"], old=(1, 4), new=(1, 2)))
    assert torch.equal(adapted["pos_embed.prefix"], state["pos_embed.prefix"])
    create(new).load_state_dict(adapted)


def test_fixed_positions_are_computed_on_the_new_grid() -> None:
    kind = "positions.kind=sincos_2d"
    old, new = vit(kind), vit(kind, side=24)
    adapted = adapt(weights(old), old=old, new=new).state
    assert torch.equal(adapted["pos_embed"], create(new).state_dict()["pos_embed"])


def test_tables_of_every_layer_are_resampled() -> None:
    place = "positions.injection=every_layer"
    old, new = vit(place), vit(place, side=24)
    state = weights(old)
    adapted = adapt(state, old=old, new=new).state
    for name in ("layer_pos_embed.0", "layer_pos_embed.1"):
        assert torch.equal(adapted[name], resample_positions(state[name], prefix=1, old=(4, 4), new=(6, 6)))


@pytest.mark.parametrize(("old", "new"), [(vit(), vit(classes=7)), (BIT, BiTConfig(units=(1, 1), classes=7))])
def test_another_number_of_classes_has_a_new_head_of_zeros(old, new) -> None:
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("head: new, for 7 classes instead of 3",)
    assert adapted.state["head.weight"].shape[0] == 7
    assert not adapted.state["head.weight"].any()
    assert not adapted.state["head.bias"].any()
    others = [name for name in state if not name.startswith("head.")]
    assert all(torch.equal(adapted.state[name], state[name]) for name in others)


def test_a_new_head_can_be_asked_for() -> None:
    adapted = adapt(weights(vit()), old=vit(), new=vit(), new_head=True)
    assert not adapted.state["head.weight"].any()
    assert len(adapted.changes) == 1


def test_the_whole_pre_training_head_is_removed() -> None:
    old, new = vit("head.pre_logits=8"), vit(classes=7)
    adapted = adapt(weights(old), old=old, new=new)
    assert not [name for name in adapted.state if name.startswith("pre_logits")]
    create(new).load_state_dict(adapted.state)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (vit(), vit("mlp_dim=64"), r"blocks\.0\.mlp\.fc1\.weight"),
        (vit(), vit("depth=3"), r"blocks\.2"),
        (vit("depth=3"), vit(), r"blocks\.2"),
        (vit(), BIT, "stem"),
        (vit("positions.kind=relative"), vit("positions.kind=relative", side=24), r"relative\.0\.table"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_tensors_name(old, new, named) -> None:
    with pytest.raises(WeightsError, match=named):
        adapt(weights(old), old=old, new=new)


def test_adapted_weights_do_not_share_memory_with_the_old() -> None:
    state = weights(vit())
    adapted = adapt(state, old=vit(), new=vit()).state
    adapted["norm.weight"].zero_()
    assert state["norm.weight"].any()
