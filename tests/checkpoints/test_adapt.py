"""Fitting weights to another model: positions resampled, the head new and zero, all else as it was or refused."""

import pytest
import torch
from oracles import import_timm

from vitkit.checkpoints.adapt import Labels, adapt
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


def logits(config: ModelConfig, state: dict[str, Tensor], images: Tensor) -> Tensor:
    model = create(config).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(images)


def images(channels: int = 3, side: int = 16) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_larger_patches_of_a_larger_image_give_the_same_logits() -> None:
    old, new = vit(), configure(vit(), image_size=32, patch_size=8)
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("patch embedding: patches of 4×4 → 8×8",)
    patches = images().unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    larger = torch.nn.functional.interpolate(patches, size=(8, 8), mode="bilinear", align_corners=False)
    enlarged = larger.unflatten(0, (2, 4, 4)).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 32, 32)
    theirs = logits(old, state, images())
    # The kernel is inverted in float64 and rounded; weights of size 1 make logits of size 10.
    assert torch.allclose(logits(new, adapted.state, enlarged), theirs, rtol=1e-4, atol=1e-3)


def test_other_patches_at_the_same_size_move_the_positions_too() -> None:
    old, new = vit(), configure(vit(), patch_size=8)
    changes = adapt(weights(old), old=old, new=new).changes
    assert changes == ("patch embedding: patches of 4×4 → 8×8", "position embeddings: grid 4×4 → 2×2")


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_other_channels_answer_to_grey_images_as_before(channels) -> None:
    old, new = vit(), configure(vit(), channels=channels)
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == (f"first kernel: 3 channels → {channels}",)
    grey = images(channels=1)
    ours, theirs = (
        logits(config, numbers, grey.expand(-1, config.channels, -1, -1))
        for config, numbers in ((new, adapted.state), (old, state))
    )
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)  # sums in another order, logits of size 10


@pytest.mark.parametrize("config", [vit("backbone.units=[1]", "patch_size=1"), BIT])
def test_resnets_take_other_channels_and_say_that_their_kernel_is_standardised_anew(config) -> None:
    new = configure(config, channels=4)
    adapted = adapt(weights(config), old=config, new=new)
    assert adapted.changes == ("first kernel: 3 channels → 4, and standardised anew: answers change",)
    create(new).load_state_dict(adapted.state)


def test_classes_of_the_same_name_keep_their_weights() -> None:
    old, new = vit(classes=3), vit(classes=4)
    state = weights(old)
    names = Labels(old=("cat", "dog", "owl"), new=("owl", "newt", "cat", "bat"))
    adapted = adapt(state, old=old, new=new, labels=names)
    for part in ("head.weight", "head.bias"):
        assert torch.equal(adapted.state[part][[0, 2]], state[part][[2, 0]])
        assert not adapted.state[part][[1, 3]].any()
    assert adapted.changes == ("head: 2 of 4 classes kept by name, the others new, and zero",)


def test_the_same_names_in_another_order_are_reordered() -> None:
    state = weights(vit())
    adapted = adapt(state, old=vit(), new=vit(), labels=Labels(old=("a", "b", "c"), new=("c", "a", "b")))
    assert torch.equal(adapted.state["head.bias"], state["head.bias"][[2, 0, 1]])
    assert adapted.changes == ("head: 3 of 3 classes kept by name, the others new, and zero",)


def test_a_mean_over_patches_does_without_the_class_token() -> None:
    old, new = vit(), vit("pooling=mean")
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("pooling: class → mean; its token is left out",)
    assert "cls_token" not in adapted.state
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"][:, 1:])
    assert torch.equal(adapted.state["head.weight"], state["head.weight"])


def test_a_class_token_begins_at_zero_where_there_was_none() -> None:
    old, new = vit("pooling=mean"), vit()
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("pooling: mean → class; its token is new, and zero",)
    assert not adapted.state["cls_token"].any()
    assert not adapted.state["pos_embed"][:, 0].any()
    assert torch.equal(adapted.state["pos_embed"][:, 1:], state["pos_embed"])


def test_timm_resamples_as_we_do_for_its_own_weights() -> None:
    timm = import_timm()
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2, num_classes=3
    ).eval()
    old = vit("positions.origin=timm", "block.activation=gelu_erf", side=32)
    state = weights(old)
    theirs.load_state_dict(state)
    theirs.set_input_size(img_size=48)
    new = configure(old, image_size=48)
    adapted = adapt(state, old=old, new=new).state
    with torch.no_grad():
        assert torch.allclose(logits(new, adapted, images(side=48)), theirs(images(side=48)), rtol=1e-4, atol=1e-3)
