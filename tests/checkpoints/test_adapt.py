"""Fitting weights to another model: positions resampled, the head new and zero, all else as it was or refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import import_timm
from PIL import Image

from vitkit.checkpoints.adapt import Feeding, Labels, adapt, fed, with_channels
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.data.transforms import Preprocessing, preprocessing
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
def test_the_same_model_keeps_every_bit(config) -> None:
    state = {name: tensor + 1e-3 for name, tensor in weights(config).items()}  # fixed tables too, which files may round
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
    assert adapted.changes == ("head: 2 of 4 classes kept by name, 2 new and zero, 1 left out",)


def test_the_same_names_in_another_order_are_reordered() -> None:
    state = weights(vit())
    adapted = adapt(state, old=vit(), new=vit(), labels=Labels(old=("a", "b", "c"), new=("c", "a", "b")))
    assert torch.equal(adapted.state["head.bias"], state["head.bias"][[2, 0, 1]])
    assert adapted.changes == ("head: 3 of 3 classes kept by name, in another order",)


def test_a_mean_over_patches_does_without_the_class_token() -> None:
    old, new = vit(), vit("pooling=mean")
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("pooling: class → mean; the class token is left out",)
    assert "cls_token" not in adapted.state
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"][:, 1:])
    assert torch.equal(adapted.state["head.weight"], state["head.weight"])


def test_a_class_token_begins_at_zero_where_there_was_none() -> None:
    old, new = vit("pooling=mean"), vit()
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("pooling: mean → class; the class token is new, and zero",)
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


# Positions of other kinds


def test_relative_positions_keep_their_grid_and_say_why() -> None:
    kind = "positions.kind=relative"
    with pytest.raises(WeightsError, match="relative positions cannot be resampled") as raised:
        adapt(weights(vit(kind)), old=vit(kind), new=vit(kind, side=24))
    assert (raised.value.expected, raised.value.got) == ("a grid of 4×4", "6×6")
    assert "keep image and patch size" in str(raised.value.hint)


def test_relative_positions_of_as_many_patches_on_another_grid_are_refused_too() -> None:
    """The table would fit, and mean something else: an offset of 4 is one row down only where rows have 4 patches."""
    old = vit("positions.kind=relative")
    with pytest.raises(WeightsError, match="along rows of 4 patches"):
        adapt(weights(old), old=old, new=configure(old, image_size=(8, 32)))


def test_relative_positions_lose_the_rows_of_tokens_with_the_tokens() -> None:
    kind = "positions.kind=relative"
    old, new = vit(kind), vit(kind, "pooling=mean")
    state = weights(old)
    without = adapt(state, old=old, new=new).state
    assert torch.equal(without["relative.0.table"], state["relative.0.table"][:-3])
    back = adapt(without, old=new, new=old).state
    assert torch.equal(back["relative.0.table"][:-3], state["relative.0.table"][:-3])
    assert not back["relative.0.table"][-3:].any()


@pytest.mark.parametrize("kind", ["rotary", "none"])
@pytest.mark.parametrize("size", [24, (24, 8)])
def test_positions_without_numbers_need_no_change(kind, size) -> None:
    """Rotary positions are computed from the grid: the same weights are the model at any size."""
    old = configure(vit(), settings=[f"positions.kind={kind}", "heads=2"])
    new = configure(old, image_size=size)
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
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
def test_tokens_in_front_keep_their_rows_on_an_oblong_grid(settings, prefix) -> None:
    old = vit(*settings)
    new = configure(old, image_size=(24, 8))
    state = weights(old)
    adapted = adapt(state, old=old, new=new).state
    assert torch.equal(adapted["pos_embed"][:, :prefix], state["pos_embed"][:, :prefix])
    assert adapted["pos_embed"].shape[1] == prefix + 6 * 2
    for name in {"cls_token", "dist_token", "reg_token"} & state.keys():
        assert torch.equal(adapted[name], state[name])
    create(new).load_state_dict(adapted)


# Rows of tokens

COVERS = ("positions.covers=patches",)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("tokens", ["tokens.distillation=false", "tokens.distillation=true"])
def test_positions_of_patches_alone_become_those_of_all_tokens_and_back_with_the_same_answers(kind, tokens) -> None:
    patches, everything = vit(*COVERS, f"positions.kind={kind}", tokens), vit(f"positions.kind={kind}", tokens)
    state = weights(patches)
    covering = adapt(state, old=patches, new=everything)
    assert covering.changes == ("position embeddings: cover patches → all; zero rows for the tokens",)
    answers = logits(patches, state, images())
    assert torch.equal(logits(everything, covering.state, images()), answers)
    state = weights(everything)
    back = adapt(state, old=everything, new=patches)
    assert back.changes == ("position embeddings: cover all → patches; their rows are added to the tokens",)
    # The sum of token and row is what the model itself computes first: not a bit changes.
    assert torch.equal(logits(patches, back.state, images()), logits(everything, state, images()))


def test_a_row_that_is_added_at_every_layer_cannot_go_into_the_token() -> None:
    place = "positions.injection=every_layer"
    with pytest.raises(WeightsError, match="cls_token has a position at every layer"):
        adapt(weights(vit(place)), old=vit(place), new=vit(place, *COVERS))


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d"])
def test_the_mean_over_patches_and_back_whatever_the_table(kind) -> None:
    old, new = vit(f"positions.kind={kind}"), vit(f"positions.kind={kind}", "pooling=mean")
    state = weights(old)
    mean = adapt(state, old=old, new=new).state
    create(new).load_state_dict(mean)
    create(old).load_state_dict(adapt(mean, old=new, new=old).state)


def test_a_class_token_gets_no_row_where_positions_cover_patches_alone() -> None:
    old, new = vit("pooling=mean", *COVERS), vit(*COVERS)
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])
    assert not adapted.state["cls_token"].any()


def test_a_token_that_was_there_unread_is_read_and_not_made_anew() -> None:
    old, new = vit("pooling=mean", "tokens.class_token=true"), vit()
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert adapted.changes == ("pooling: mean → class; the class token is kept",)
    assert torch.equal(adapted.state["cls_token"], state["cls_token"])
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])


def test_a_class_token_that_is_missing_in_the_file_is_not_made_up() -> None:
    state = weights(vit())
    del state["cls_token"]
    with pytest.raises(WeightsError, match="the weights have no cls_token"):
        adapt(state, old=vit(), new=vit())


# The head


def test_no_classes_are_no_head_and_said_so() -> None:
    adapted = adapt(weights(vit()), old=vit(), new=vit(classes=0))
    assert adapted.changes == ("head: left out, with its 3 classes; the model gives features",)
    assert not [name for name in adapted.state if name.startswith("head")]
    back = adapt(adapted.state, old=vit(classes=0), new=vit(classes=2))
    assert back.changes == ("head: new, for 2 classes; there was none",)
    assert adapt(adapted.state, old=vit(classes=0), new=vit(classes=0), new_head=True).changes == ()


@given(names=st.permutations(["cat", "dog", "owl", "newt", "bat"]), count=st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_rows_follow_their_names_into_any_order(names, count) -> None:
    new_names, old_names = tuple(names[:count]), ("owl", "cat", "dog")
    state = weights(vit("depth=1"))
    adapted = adapt(
        state, old=vit("depth=1"), new=vit("depth=1", classes=count), labels=Labels(old=old_names, new=new_names)
    )
    for number, name in enumerate(new_names):
        for part in ("head.weight", "head.bias"):
            row = adapted.state[part][number]
            assert torch.equal(row, state[part][old_names.index(name)]) if name in old_names else not row.any()


def test_both_heads_of_a_distilled_model_keep_known_classes() -> None:
    old = vit("tokens.distillation=true")
    state = weights(old)
    names = Labels(old=("cat", "dog", "owl"), new=("owl", "newt"))
    adapted = adapt(state, old=old, new=configure(old, classes=2), labels=names).state
    for part in ("head.label.weight", "head.label.bias", "head.teacher.weight", "head.teacher.bias"):
        assert torch.equal(adapted[part][0], state[part][2])
        assert not adapted[part][1].any()


def test_labels_of_another_model_are_refused() -> None:
    with pytest.raises(WeightsError, match="labels are not those of the models"):
        adapt(weights(vit()), old=vit(), new=vit(), labels=Labels(old=("a", "b"), new=("c", "a", "b")))


def test_a_setting_that_changes_answers_and_no_tensor_is_told() -> None:
    adapted = adapt(weights(vit()), old=vit(), new=vit("block.activation=gelu_erf", "dropout.dense=0.1"))
    assert adapted.changes == ("block.activation: gelu_tanh → gelu_erf, which can change answers",)


# Channels and preprocessing


def artefact(config: ModelConfig, *, origin: str) -> Artefact:
    return Artefact(
        name="small",
        config=config,
        state=weights(config),
        preprocessing=preprocessing(origin, image_size=16, channels=config.channels),
        labels=("a", "b", "c"),
    )


def answers_to_grey(model: Artefact, level: np.ndarray) -> Tensor:
    """What a model says of a grey picture, through its own preprocessing."""
    channels = model.config.channels
    picture = Image.fromarray(level) if channels == 1 else np.repeat(level[:, :, None], channels, axis=2)
    if channels == 3:
        picture = Image.fromarray(level).convert("RGB")
    how = model.preprocessing
    with torch.no_grad():
        return model.model()(how.normalise(torch.from_numpy(how.pixels(picture))[None]))


@given(
    old=st.integers(1, 6),
    new=st.integers(1, 9),
    seed=st.integers(0, 99),
    mean=st.lists(st.floats(0.2, 0.8), min_size=6, max_size=6),
    deviation=st.lists(st.floats(0.1, 0.6), min_size=6, max_size=6),
)
@settings(max_examples=15, deadline=None)
def test_grey_pictures_keep_their_answers_through_the_preprocessing(old, new, seed, mean, deviation) -> None:
    """Whatever mean and deviation each channel has: the kernel takes up the difference."""
    model = artefact(configure(vit("depth=1"), channels=old), origin="paper")
    feeding = replace(model.preprocessing, mean=tuple(mean[:old]), deviation=tuple(deviation[:old]))
    model = replace(model, preprocessing=feeding)
    level = np.random.default_rng(seed).integers(0, 256, (20, 20), dtype=np.uint8)
    adapted, changes = with_channels(model, new)
    assert bool(changes) == (old != new)
    assert (adapted.config.channels, adapted.preprocessing.channels) == (new, new)
    expected = answers_to_grey(model, level)
    # Pixels of up to 8 deviations times weights of size 1, summed in float32 in another order, through two norms.
    assert torch.allclose(answers_to_grey(adapted, level), expected, rtol=1e-3, atol=2e-3 * float(expected.abs().max()))


def test_the_mean_of_each_channel_matters_to_grey_pictures() -> None:
    """Without the preprocessing, DeiT's kernel in one channel answers to another level of grey."""
    model = artefact(vit(), origin="deit")
    level = np.full((20, 20), 90, dtype=np.uint8)
    fitted, _ = with_channels(model, 1)
    config = configure(model.config, channels=1)
    plain = replace(fitted, state=adapt(model.state, old=model.config, new=config).state)
    expected = answers_to_grey(model, level)
    assert (answers_to_grey(fitted, level) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (answers_to_grey(plain, level) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_colours_keep_their_answers_and_their_mean_where_a_channel_is_added() -> None:
    model = artefact(vit(), origin="deit")
    adapted, changes = with_channels(model, 4)
    assert changes == (
        "first kernel: 3 channels → 4",
        "preprocessing: 3 channels → 4, each of its own mean and deviation",
    )
    assert adapted.preprocessing.mean[:3] == model.preprocessing.mean
    assert torch.equal(adapted.state["patch_embed.proj.weight"][:, :3], model.state["patch_embed.proj.weight"])
    assert torch.equal(adapted.state["patch_embed.proj.bias"], model.state["patch_embed.proj.bias"])
    back, _ = with_channels(adapted, 3)
    assert back.preprocessing == model.preprocessing
    assert all(torch.equal(back.state[name], model.state[name]) for name in model.state)


def test_other_patches_and_channels_at_once_keep_grey_too() -> None:
    model = artefact(vit(), origin="deit")
    large, grey = configure(model.config, patch_size=8), configure(model.config, patch_size=8, channels=1)
    coloured = adapt(model.state, old=model.config, new=large).state
    feeding = Feeding(old=model.preprocessing, new=fed(model.preprocessing, grey))
    both = adapt(model.state, old=model.config, new=grey, feeding=feeding)
    assert both.changes[:2] == ("patch embedding: patches of 4×4 → 8×8", "first kernel: 3 channels → 1")
    level = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    expected = answers_to_grey(replace(model, config=large, state=coloured), level)
    ours = answers_to_grey(replace(model, config=grey, state=both.state, preprocessing=feeding.new), level)
    assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("origin", ["paper", "deit", "timm_augreg", "torchvision"])
def test_preprocessing_at_another_size_keeps_its_share_and_all_else(origin) -> None:
    old = preprocessing(origin, image_size=224)
    new = fed(old, configure("B/16", image_size=(320, 192)))
    assert new == replace(old, image_size=(320, 192))
    if old.resize == "crop":
        assert new.resized == (int(320 / old.crop_share), int(192 / old.crop_share))


def test_preprocessing_of_the_same_shape_is_the_same_object() -> None:
    old = Preprocessing(image_size=(224, 224))
    assert fed(old, configure("B/16", image_size=224)) is old


def test_a_formula_that_becomes_a_table_begins_with_its_numbers() -> None:
    old, new = vit("positions.kind=sincos_2d"), vit()
    state = weights(old)
    adapted = adapt(state, old=old, new=new)
    assert torch.equal(adapted.state["pos_embed"], state["pos_embed"])
    assert adapted.changes == ("positions.kind: sincos_2d → learned_1d, which can change answers",)
    back = adapt(weights(new), old=new, new=old)
    assert torch.equal(back.state["pos_embed"], state["pos_embed"])
