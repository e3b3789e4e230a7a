"""Tests of adaptation: positions, head, patches, channels and pooling change; everything else is kept or refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import import_timm
from PIL import Image

from vitkit.core.config import parse_assignments
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.model.config import BiTConfig
from vitkit.model.positions import resample_grid
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle, adapt_preprocessing
from vitkit.weights.adapt_state import LabelChange, PreprocessingChange, adapt_state
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.registry import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=16", "depth=2", "heads=2", "mlp_dim=32")


def vit(*settings: str, side: int = 16, num_classes: int = 3) -> ModelConfig:
    small = configure(
        "Ti/16", image_size=side, patch_size=4, num_classes=num_classes, settings=parse_assignments(SIZES)
    )
    return configure(small, settings=parse_assignments(settings))


def weights(config: ModelConfig) -> dict[str, Tensor]:
    model = create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model.state_dict()


BIT = BiTConfig(units=(1, 1), num_classes=3)


SAME = {
    "plain": vit(),
    "hidden layer": vit("head.pre_logits=8"),
    "relative": vit("positions.kind=relative"),
    "rotary": vit("positions.kind=rotary"),
    "rows and columns": vit("positions.kind=learned_2d"),
    "sine and cosine": vit("positions.kind=sincos_2d"),
    "every layer": vit("positions.injection=every_layer"),
    "distilled, registers": vit("tokens.distillation=true", "tokens.registers=2"),
    "attention pooling": vit("pooling=map"),
    "hybrid": vit("backbone.units=[1]", "patch_size=1"),
    "ResNet": BIT,
}


@pytest.mark.parametrize("config", SAME.values(), ids=SAME)
def test_same_configuration_is_identity(config) -> None:
    state = {name: tensor + 1e-3 for name, tensor in weights(config).items()}  # fixed tables too
    adapted = adapt_state(state, old=config, new=config)
    assert adapted.changes == ()
    assert adapted.state.keys() == state.keys()
    assert all(torch.equal(adapted.state[name], state[name]) for name in state)


@pytest.mark.parametrize("settings", [(), ("pooling=mean",), ("tokens.registers=2",), ("positions.origin=timm",)])
def test_positions_are_resampled_as_by_their_origin(settings) -> None:
    old, new = vit(*settings), vit(*settings, side=24)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    before, after, prefix = state["pos_embed"], adapted.state["pos_embed"], old.prefix_positions
    assert torch.equal(after[:, :prefix], before[:, :prefix])
    grid = resample_grid(before[:, prefix:], old=(4, 4), new=(6, 6), origin=old.positions.origin)
    assert torch.equal(after[:, prefix:], grid)
    assert adapted.changes == ("position embeddings: grid 4×4 → 6×6",)
    others = state.keys() - {"pos_embed"}
    assert all(torch.equal(adapted.state[name], state[name]) for name in others)
    create(new).load_state_dict(adapted.state)


def test_2d_positions_are_resampled_per_axis() -> None:
    kind = "positions.kind=learned_2d"
    old, new = vit(kind), configure(vit(kind), image_size=(24, 8))
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new).state
    assert torch.equal(adapted["pos_embed.y"], resample_grid(state["pos_embed.y"], old=(1, 4), new=(1, 6)))
    assert torch.equal(adapted["pos_embed.x"], resample_grid(state["pos_embed.x"], old=(1, 4), new=(1, 2)))
    assert torch.equal(adapted["pos_embed.prefix"], state["pos_embed.prefix"])
    create(new).load_state_dict(adapted)


def test_sincos_positions_are_recomputed() -> None:
    kind = "positions.kind=sincos_2d"
    old, new = vit(kind), vit(kind, side=24)
    adapted = adapt_state(weights(old), old=old, new=new).state
    assert torch.equal(adapted["pos_embed"], create(new).state_dict()["pos_embed"])


def test_positions_of_every_layer_are_resampled() -> None:
    injection = "positions.injection=every_layer"
    old, new = vit(injection), vit(injection, side=24)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new).state
    for name in ("layer_pos_embed.0", "layer_pos_embed.1"):
        assert torch.equal(adapted[name][:, :1], state[name][:, :1])
        assert torch.equal(adapted[name][:, 1:], resample_grid(state[name][:, 1:], old=(4, 4), new=(6, 6)))


@pytest.mark.parametrize(("old", "new"), [(vit(), vit(num_classes=7)), (BIT, BiTConfig(units=(1, 1), num_classes=7))])
def test_other_class_count_gives_zero_head(old, new) -> None:
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == ("head: new, for 7 classes instead of 3",)
    assert adapted.state["head.weight"].shape[0] == 7
    assert not adapted.state["head.weight"].any()
    assert not adapted.state["head.bias"].any()
    others = [name for name in state if not name.startswith("head.")]
    assert all(torch.equal(adapted.state[name], state[name]) for name in others)


def test_new_head_can_be_requested() -> None:
    adapted = adapt_state(weights(vit()), old=vit(), new=vit(), new_head=True)
    assert not adapted.state["head.weight"].any()
    assert len(adapted.changes) == 1


def test_pre_training_head_is_removed() -> None:
    old, new = vit("head.pre_logits=8"), vit(num_classes=7)
    adapted = adapt_state(weights(old), old=old, new=new)
    assert not [name for name in adapted.state if name.startswith("pre_logits")]
    create(new).load_state_dict(adapted.state)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        (vit(), vit("mlp_dim=64"), r"blocks\.0\.mlp\.fc1\.weight"),
        (vit(), vit("depth=3"), r"blocks\.2"),
        (vit("depth=3"), vit(), r"blocks\.2"),
        (vit(), BIT, "stem"),
        (vit("positions.kind=relative"), vit("positions.kind=relative", side=24), r"relative\.0\.table"),
    ],
)
def test_tensor_that_does_not_fit_is_named(old, new, name) -> None:
    with pytest.raises(WeightsError, match=name):
        adapt_state(weights(old), old=old, new=new)


def test_adapted_tensors_do_not_share_memory() -> None:
    state = weights(vit())
    adapted = adapt_state(state, old=vit(), new=vit()).state
    adapted["norm.weight"].zero_()
    assert state["norm.weight"].any()


def logits(config: ModelConfig, state: dict[str, Tensor], images: Tensor) -> Tensor:
    model = create(config).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(images)


def images(channels: int = 3, side: int = 16) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_larger_patches_of_larger_images_keep_logits() -> None:
    old, new = vit(), configure(vit(), image_size=32, patch_size=8)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == ("patch embedding: patches of 4×4 → 8×8",)
    patches = images().unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    larger = torch.nn.functional.interpolate(patches, size=(8, 8), mode="bilinear", align_corners=False)
    enlarged = larger.unflatten(0, (2, 4, 4)).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 32, 32)
    theirs = logits(old, state, images())
    # The kernel is inverted in float64 and rounded; weights of size 1 make logits of size 10.
    assert torch.allclose(logits(new, adapted.state, enlarged), theirs, rtol=1e-4, atol=1e-3)


def test_other_patch_size_resamples_positions() -> None:
    old, new = vit(), configure(vit(), patch_size=8)
    changes = adapt_state(weights(old), old=old, new=new).changes
    assert changes == ("patch embedding: patches of 4×4 → 8×8", "position embeddings: grid 4×4 → 2×2")


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_other_channels_keep_logits_of_gray_images(channels) -> None:
    old, new = vit(), configure(vit(), channels=channels)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == (f"first kernel: 3 channels → {channels}",)
    gray = images(channels=1)
    ours, theirs = (
        logits(config, numbers, gray.expand(-1, config.channels, -1, -1))
        for config, numbers in ((new, adapted.state), (old, state))
    )
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)  # sums in another order, logits of size 10


@pytest.mark.parametrize("config", [vit("backbone.units=[1]", "patch_size=1"), BIT])
def test_resnet_channels_report_standardized_kernel(config) -> None:
    new = configure(config, channels=4)
    adapted = adapt_state(weights(config), old=config, new=new)
    assert adapted.changes == ("first kernel: 3 channels → 4, standardized again: logits change",)
    create(new).load_state_dict(adapted.state)


def test_classes_of_the_same_name_keep_weights() -> None:
    old, new = vit(num_classes=3), vit(num_classes=4)
    state = weights(old)
    names = LabelChange(old=("cat", "dog", "owl"), new=("owl", "newt", "cat", "bat"))
    adapted = adapt_state(state, old=old, new=new, labels=names)
    for part in ("head.weight", "head.bias"):
        assert torch.equal(adapted.state[part][[0, 2]], state[part][[2, 0]])
        assert not adapted.state[part][[1, 3]].any()
    assert adapted.changes == ("head: 2 of 4 classes kept by name, 2 new (zeros), 1 removed",)


def test_reordered_labels_reorder_rows() -> None:
    state = weights(vit())
    adapted = adapt_state(state, old=vit(), new=vit(), labels=LabelChange(old=("a", "b", "c"), new=("c", "a", "b")))
    assert torch.equal(adapted.state["head.bias"], state["head.bias"][[2, 0, 1]])
    assert adapted.changes == ("head: 3 of 3 classes kept by name, in another order",)


def test_mean_pooling_removes_the_class_token() -> None:
    old, new = vit(), vit("pooling=mean")
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == ("pooling: class → mean; class token removed",)
    assert "cls_token" not in adapted.state
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"][:, 1:])
    assert torch.equal(adapted.state["head.weight"], state["head.weight"])


def test_new_class_token_is_zero() -> None:
    old, new = vit("pooling=mean"), vit()
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == ("pooling: mean → class; class token new (zeros)",)
    assert not adapted.state["cls_token"].any()
    assert not adapted.state["pos_embed"][:, 0].any()
    assert torch.equal(adapted.state["pos_embed"][:, 1:], state["pos_embed"])


def test_resampling_equals_timms() -> None:
    timm = import_timm()
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2, num_classes=3
    ).eval()
    old = vit("positions.origin=timm", "block.activation=gelu_erf", side=32)
    state = weights(old)
    theirs.load_state_dict(state)
    theirs.set_input_size(img_size=48)
    new = configure(old, image_size=48)
    adapted = adapt_state(state, old=old, new=new).state
    with torch.no_grad():
        assert torch.allclose(logits(new, adapted, images(side=48)), theirs(images(side=48)), rtol=1e-4, atol=1e-3)


# Positions of other kinds


def test_relative_positions_cannot_be_resampled() -> None:
    kind = "positions.kind=relative"
    with pytest.raises(WeightsError, match="relative positions cannot be resampled") as raised:
        adapt_state(weights(vit(kind)), old=vit(kind), new=vit(kind, side=24))
    assert (raised.value.expected, raised.value.got) == ("a grid of 4×4", "6×6")
    assert "keep image and patch size" in str(raised.value.hint)


def test_relative_positions_refuse_grid_of_equal_area() -> None:
    """The table would fit, but an offset of 4 is one row down only if rows have 4 patches."""
    old = vit("positions.kind=relative")
    with pytest.raises(WeightsError, match="along rows of 4 patches"):
        adapt_state(weights(old), old=old, new=configure(old, image_size=(8, 32)))


def test_relative_positions_lose_rows_of_removed_tokens() -> None:
    kind = "positions.kind=relative"
    old, new = vit(kind), vit(kind, "pooling=mean")
    state = weights(old)
    without = adapt_state(state, old=old, new=new).state
    assert torch.equal(without["relative.0.table"], state["relative.0.table"][:-3])
    back = adapt_state(without, old=new, new=old).state
    assert torch.equal(back["relative.0.table"][:-3], state["relative.0.table"][:-3])
    assert not back["relative.0.table"][-3:].any()


@pytest.mark.parametrize("kind", ["rotary", "none"])
@pytest.mark.parametrize("size", [24, (24, 8)])
def test_rotary_positions_need_no_change(kind, size) -> None:
    """Rotary positions are computed from the grid, so the weights fit any image size."""
    old = configure(vit(), settings={"positions.kind": kind, "heads": 2})
    new = configure(old, image_size=size)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.state.keys() == state.keys()
    assert all(torch.equal(adapted.state[name], state[name]) for name in state)
    [change] = adapted.changes
    assert change.startswith({"rotary": "rotary positions: grid 4×4 → ", "none": "patches: grid 4×4 → "}[kind])


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        (("tokens.distillation=true",), 2),
        (("tokens.registers=3",), 1),
        (("tokens.registers=3", "positions.covers=patches"), 0),
        (("tokens.distillation=true", "tokens.registers=2"), 2),
    ],
)
def test_prefix_tokens_keep_their_positions(settings, prefix) -> None:
    old = vit(*settings)
    new = configure(old, image_size=(24, 8))
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new).state
    assert torch.equal(adapted["pos_embed"][:, :prefix], state["pos_embed"][:, :prefix])
    assert adapted["pos_embed"].shape[1] == prefix + 6 * 2
    for name in {"cls_token", "dist_token", "reg_token"} & state.keys():
        assert torch.equal(adapted[name], state[name])
    create(new).load_state_dict(adapted)


# Positions of tokens

COVERS = ("positions.covers=patches",)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("tokens", ["tokens.distillation=false", "tokens.distillation=true"])
def test_position_coverage_changes_keep_logits(kind, tokens) -> None:
    patches, everything = vit(*COVERS, f"positions.kind={kind}", tokens), vit(f"positions.kind={kind}", tokens)
    state = weights(patches)
    covering = adapt_state(state, old=patches, new=everything)
    assert covering.changes == ("position embeddings: cover patches → all; zero rows for the tokens",)
    answers = logits(patches, state, images())
    assert torch.equal(logits(everything, covering.state, images()), answers)
    state = weights(everything)
    back = adapt_state(state, old=everything, new=patches)
    assert back.changes == ("position embeddings: cover all → patches; their rows are added to the tokens",)
    # The model itself first adds the row to the token, so the logits are bitwise equal.
    assert torch.equal(logits(patches, back.state, images()), logits(everything, state, images()))


def test_position_of_every_layer_cannot_be_folded() -> None:
    injection = "positions.injection=every_layer"
    with pytest.raises(WeightsError, match="cls_token has a position at every layer"):
        adapt_state(weights(vit(injection)), old=vit(injection), new=vit(injection, *COVERS))


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d"])
def test_mean_pooling_and_back_for_every_table(kind) -> None:
    old, new = vit(f"positions.kind={kind}"), vit(f"positions.kind={kind}", "pooling=mean")
    state = weights(old)
    mean = adapt_state(state, old=old, new=new).state
    create(new).load_state_dict(mean)
    create(old).load_state_dict(adapt_state(mean, old=new, new=old).state)


def test_new_class_token_has_no_row_if_uncovered() -> None:
    old, new = vit("pooling=mean", *COVERS), vit(*COVERS)
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])
    assert not adapted.state["cls_token"].any()


def test_existing_unused_class_token_is_kept() -> None:
    old, new = vit("pooling=mean", "tokens.class_token=true"), vit()
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert adapted.changes == ("pooling: mean → class; class token kept",)
    assert torch.equal(adapted.state["cls_token"], state["cls_token"])
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])


def test_missing_class_token_is_an_error() -> None:
    state = weights(vit())
    del state["cls_token"]
    with pytest.raises(WeightsError, match="the weights have no cls_token"):
        adapt_state(state, old=vit(), new=vit())


# Head


def test_zero_classes_remove_the_head() -> None:
    adapted = adapt_state(weights(vit()), old=vit(), new=vit(num_classes=0))
    assert adapted.changes == ("head: removed, with its 3 classes; the model returns features",)
    assert not [name for name in adapted.state if name.startswith("head")]
    back = adapt_state(adapted.state, old=vit(num_classes=0), new=vit(num_classes=2))
    assert back.changes == ("head: new, for 2 classes; there was none",)
    assert adapt_state(adapted.state, old=vit(num_classes=0), new=vit(num_classes=0), new_head=True).changes == ()


@given(names=st.permutations(["cat", "dog", "owl", "newt", "bat"]), count=st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_rows_follow_labels_in_any_order(names, count) -> None:
    new_names, old_names = tuple(names[:count]), ("owl", "cat", "dog")
    state = weights(vit("depth=1"))
    adapted = adapt_state(
        state,
        old=vit("depth=1"),
        new=vit("depth=1", num_classes=count),
        labels=LabelChange(old=old_names, new=new_names),
    )
    for number, name in enumerate(new_names):
        for part in ("head.weight", "head.bias"):
            row = adapted.state[part][number]
            assert torch.equal(row, state[part][old_names.index(name)]) if name in old_names else not row.any()


def test_both_heads_of_a_distilled_model_keep_classes() -> None:
    old = vit("tokens.distillation=true")
    state = weights(old)
    names = LabelChange(old=("cat", "dog", "owl"), new=("owl", "newt"))
    adapted = adapt_state(state, old=old, new=configure(old, num_classes=2), labels=names).state
    for part in ("head.label.weight", "head.label.bias", "head.teacher.weight", "head.teacher.bias"):
        assert torch.equal(adapted[part][0], state[part][2])
        assert not adapted[part][1].any()


def test_wrong_number_of_labels_is_refused() -> None:
    with pytest.raises(WeightsError, match="number of labels is not that of the models"):
        adapt_state(weights(vit()), old=vit(), new=vit(), labels=LabelChange(old=("a", "b"), new=("c", "a", "b")))


def test_setting_that_changes_logits_is_reported() -> None:
    adapted = adapt_state(weights(vit()), old=vit(), new=vit("block.activation=gelu_erf", "dropout.dense=0.1"))
    assert adapted.changes == ("block.activation: gelu_tanh → gelu_erf, which can change logits",)


# Channels and preprocessing


def make_bundle(config: ModelConfig, *, origin: str) -> ModelBundle:
    return ModelBundle(
        name="small",
        config=config,
        state=weights(config),
        preprocessing=get_preprocessing(origin, image_size=16, channels=config.channels),
        labels=("a", "b", "c"),
    )


def gray_logits(model: ModelBundle, level: np.ndarray) -> Tensor:
    """Return the logits of a gray image after the model's own preprocessing."""
    channels = model.config.channels
    picture = Image.fromarray(level) if channels == 1 else np.repeat(level[:, :, None], channels, axis=2)
    if channels == 3:
        picture = Image.fromarray(level).convert("RGB")
    preprocessing = model.preprocessing
    with torch.no_grad():
        return model.build_model()(preprocessing.normalize(torch.from_numpy(preprocessing.to_pixels(picture))[None]))


@given(
    old=st.integers(1, 6),
    new=st.integers(1, 9),
    seed=st.integers(0, 99),
    mean=st.lists(st.floats(0.2, 0.8), min_size=6, max_size=6),
    std=st.lists(st.floats(0.1, 0.6), min_size=6, max_size=6),
)
@settings(max_examples=15, deadline=None)
def test_gray_images_keep_logits_through_preprocessing(old, new, seed, mean, std) -> None:
    """The kernel absorbs any mean and std per channel."""
    model = make_bundle(configure(vit("depth=1"), channels=old), origin="paper")
    change = replace(model.preprocessing, mean=tuple(mean[:old]), std=tuple(std[:old]))
    model = replace(model, preprocessing=change)
    level = np.random.default_rng(seed).integers(0, 256, (20, 20), dtype=np.uint8)
    adapted, changes = adapt_bundle(model, AdaptRequest(channels=new))
    assert bool(changes) == (old != new)
    assert (adapted.config.channels, adapted.preprocessing.channels) == (new, new)
    expected = gray_logits(model, level)
    # Pixels of up to 8 deviations times weights of size 1, summed in float32 in another order, through two norms.
    assert torch.allclose(gray_logits(adapted, level), expected, rtol=1e-3, atol=2e-3 * float(expected.abs().max()))


def test_gray_logits_need_the_preprocessing_change() -> None:
    """Without the preprocessing change, DeiT's kernel sees another gray level."""
    model = make_bundle(vit(), origin="deit")
    level = np.full((20, 20), 90, dtype=np.uint8)
    fitted, _ = adapt_bundle(model, AdaptRequest(channels=1))
    config = configure(model.config, channels=1)
    plain = replace(fitted, state=adapt_state(model.state, old=model.config, new=config).state)
    expected = gray_logits(model, level)
    assert (gray_logits(fitted, level) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (gray_logits(plain, level) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_added_channel_keeps_color_logits_and_mean() -> None:
    model = make_bundle(vit(), origin="deit")
    adapted, changes = adapt_bundle(model, AdaptRequest(channels=4))
    assert changes == (
        "first kernel: 3 channels → 4",
        "preprocessing: 3 channels → 4, a mean and std for each",
    )
    assert adapted.preprocessing.mean[:3] == model.preprocessing.mean
    assert torch.equal(adapted.state["patch_embed.proj.weight"][:, :3], model.state["patch_embed.proj.weight"])
    assert torch.equal(adapted.state["patch_embed.proj.bias"], model.state["patch_embed.proj.bias"])
    back, _ = adapt_bundle(adapted, AdaptRequest(channels=3))
    assert back.preprocessing == model.preprocessing
    assert all(torch.equal(back.state[name], model.state[name]) for name in model.state)


def test_patches_and_channels_together_keep_gray_logits() -> None:
    model = make_bundle(vit(), origin="deit")
    large, gray = configure(model.config, patch_size=8), configure(model.config, patch_size=8, channels=1)
    colored = adapt_state(model.state, old=model.config, new=large).state
    change = PreprocessingChange(old=model.preprocessing, new=adapt_preprocessing(model.preprocessing, gray))
    both = adapt_state(model.state, old=model.config, new=gray, preprocessing=change)
    assert both.changes[:2] == ("patch embedding: patches of 4×4 → 8×8", "first kernel: 3 channels → 1")
    level = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    expected = gray_logits(replace(model, config=large, state=colored), level)
    ours = gray_logits(replace(model, config=gray, state=both.state, preprocessing=change.new), level)
    assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("origin", ["paper", "deit", "timm_augreg", "torchvision"])
def test_preprocessing_at_another_size_keeps_the_rest(origin) -> None:
    old = get_preprocessing(origin, image_size=224)
    new = adapt_preprocessing(old, configure("B/16", image_size=(320, 192)))
    assert new == replace(old, image_size=(320, 192))
    if old.resize == "crop":
        assert new.resize_size == (int(320 / old.crop_fraction), int(192 / old.crop_fraction))


def test_preprocessing_of_the_same_shape_is_unchanged() -> None:
    old = Preprocessing(image_size=(224, 224))
    assert adapt_preprocessing(old, configure("B/16", image_size=224)) is old


def test_learned_positions_start_from_sincos() -> None:
    old, new = vit("positions.kind=sincos_2d"), vit()
    state = weights(old)
    adapted = adapt_state(state, old=old, new=new)
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])
    assert adapted.changes == ("positions.kind: sincos_2d → learned_1d, which can change logits",)
    back = adapt_state(weights(new), old=new, new=old)
    assert torch.equal(back.state["pos_embed"], state["pos_embed"])
