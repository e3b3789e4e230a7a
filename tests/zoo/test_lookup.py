"""Names to models: aliases, wildcards, settings, and names that do not exist."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import small

import vitkit
from vitkit.core.errors import ConfigError, UnknownNameError, VitkitError
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiT, BiTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import configure, create, find, image_size_in, matching, models
from vitkit.zoo.variants import VARIANTS

OWNERS = {known: variant.name for variant in VARIANTS for known in (variant.name, *variant.aliases)}


def test_no_two_models_share_a_name_or_alias_in_any_case() -> None:
    known = Counter(name.lower() for variant in VARIANTS for name in (variant.name, *variant.aliases))
    assert [name for name, times in known.items() if times > 1] == []


@given(known=st.sampled_from(sorted(OWNERS)), data=st.data())
def test_every_name_and_alias_is_found_in_any_case(known: str, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(known), max_size=len(known)))
    spelled = "".join(letter.upper() if up else letter.lower() for letter, up in zip(known, upper, strict=True))
    assert find(spelled).name == OWNERS[known]


@pytest.mark.parametrize("known", OWNERS)
def test_an_alias_that_ends_in_384_is_the_model_at_384_pixels(known: str) -> None:
    expected = 384 if known.endswith("384") else 224
    assert find(known).config.image_size == expected
    assert find(known.upper()).config.image_size == expected
    assert find(known).parameters == find(OWNERS[known]).parameters


@pytest.mark.parametrize(
    ("alias", "size"),
    [
        ("vit_base_patch16_384", 384),
        ("vit_base_patch16_224", 224),
        ("google/vit-large-patch32-384", 384),
        ("google/vit-base-patch16-224-in21k", 224),
        ("R50x1", 224),
        ("vit_b_16", 224),
    ],
)
def test_the_image_size_is_read_off_the_end_of_an_alias(alias: str, size: int) -> None:
    assert image_size_in(alias) == size


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("vit_base_patch16_224", "B/16"),
        ("vit_tiny_patch16_384", "Ti/16"),
        ("vit_huge_patch14_224", "H/14"),
        ("vit_l_32", "L/32"),
        ("google/vit-base-patch32-384", "B/32"),
        ("google/vit-huge-patch14-224-in21k", "H/14"),
        ("google/vit-hybrid-base-bit-384", "R50+B/16"),
        ("vit_large_r50_s32_384", "R50+L/32"),
        ("vit_tiny_r_s16_p8_224", "R+Ti/16"),
        ("ViT-B_16", "B/16"),
        ("R50+ViT-B_16", "R50+B/16"),
        ("BiT-M-R152x2", "BiT-R152x2"),
        ("R101x1", "BiT-R101x1"),
        ("resnetv2_50x1_bit", "BiT-R50x1"),
    ],
)
def test_other_peoples_names_are_known(alias: str, name: str) -> None:
    assert find(alias).name == name


def test_what_follows_a_dot_in_a_timm_name_is_about_weights() -> None:
    for name in ("vit_base_patch16_384.augreg_in21k_ft_in1k", "VIT_BASE_PATCH16_384.orig", "vit_base_patch16_384"):
        assert find(name) == find("vit_base_patch16_384")
    assert find("resnetv2_50x1_bit.goog_in21k").name == "BiT-R50x1"
    for name in ("B/16.anything", "google/vit-base-patch16-224.main"):
        with pytest.raises(UnknownNameError):
            find(name)


# Listing


def test_models_lists_every_name_once_in_the_tables_order() -> None:
    assert models() == [variant.name for variant in VARIANTS]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("L/*", ["L/16", "L/32"]),
        ("l/*", ["L/16", "L/32"]),
        ("r50+*", ["R50+B/16", "R50+B/32", "R50+L/16", "R50+L/32"]),
        ("B/?", ["B/8"]),
        ("b/[13]*", ["B/16", "B/32"]),
        ("axial*", ["Axial-B/16", "Axial-B/32"]),
        ("vit_huge*", ["H/14"]),
        ("B/16", ["B/16"]),
        ("nothing*", []),
    ],
)
def test_wildcards_match_names_and_aliases_in_any_case(pattern: str, names: list[str]) -> None:
    assert models(pattern) == names
    assert [variant.name for variant in matching(pattern)] == names


def test_the_package_offers_the_same_functions() -> None:
    assert vitkit.create is create
    assert vitkit.models is models
    assert {"create", "models"} <= set(dir(vitkit))
    with pytest.raises(AttributeError, match="no attribute anything"):
        _ = vitkit.anything


# Names that do not exist


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("B/61", "B/16"),
        ("h/15", "H/14"),
        ("R50+B16", "R50+B/16"),
        ("vit_base_patch16_225", "vit_base_patch16_224"),
        ("BiT-R200x2", "BiT-R200x3"),
        ("google/vit-base-patch16-224-in22k", "google/vit-base-patch16-224-in21k"),
    ],
)
@pytest.mark.parametrize("function", [find, configure, create])
def test_an_unknown_name_is_refused_with_the_nearest(
    function: Callable[[str], object], name: str, nearest: str
) -> None:
    with pytest.raises(UnknownNameError) as raised:
        function(name)
    assert str(raised.value) == f"no model is called {name}"
    assert raised.value.hint == f"did you mean {nearest}?"
    assert raised.value.__cause__ is None


def test_a_name_like_no_other_is_refused_with_where_to_look() -> None:
    with pytest.raises(UnknownNameError) as raised:
        find("zzzzzzzz")
    assert raised.value.hint == "vitkit models lists every name"


@pytest.mark.parametrize("name", ["", " ", "B/16 ", "*", "B/1?"])
def test_a_name_is_taken_as_it_is(name: str) -> None:
    with pytest.raises(UnknownNameError):
        find(name)


# Creating


def test_what_is_asked_for_is_in_the_configuration() -> None:
    config = configure("B/16", image_size=(96, 160), patch_size=32, channels=1, classes=7)
    assert isinstance(config, ViTConfig)
    assert (config.image_size, config.patch_size, config.channels, config.classes) == ((96, 160), 32, 1, 7)
    assert config.grid == (3, 5)
    assert config.width == 768


def test_what_is_not_asked_for_stays_as_the_name_says() -> None:
    assert configure("vit_base_patch16_384") == configure("B/16", image_size=384)
    assert configure("vit_base_patch16_384", image_size=224) == configure("B/16")


def test_no_classes_can_be_asked_for() -> None:
    assert configure("B/16", classes=0).classes == 0


def test_settings_change_whatever_else_there_is() -> None:
    settings = ["pooling=map", "positions.kind=relative", "block.attention.qk_norm=true", "head.bias=-10", "depth=3"]
    config = configure("Ti/16", settings=settings)
    assert isinstance(config, ViTConfig)
    assert (config.pooling, config.positions.kind, config.depth) == ("map", "relative", 3)
    assert config.block.attention.qk_norm
    assert config.head.bias == -10.0


def test_settings_reach_the_model() -> None:
    model = create("Ti/16", image_size=32, classes=4, settings=["depth=1", "head.bias=-10"])
    assert isinstance(model, ViT)
    assert (model(torch.randn(2, 3, 32, 32)) == -10).all()


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="poling is not a known key") as raised:
        create("B/16", settings=["poling=mean"])
    assert raised.value.hint == "did you mean pooling?"


def test_a_setting_that_does_not_fit_the_rest_is_refused() -> None:
    with pytest.raises(ConfigError, match="the heads do not divide the width"):
        create("B/16", settings=["heads=10"])


def test_a_baseline_has_no_patches_to_ask_for() -> None:
    with pytest.raises(ConfigError, match="patch_size is not a known key"):
        create("BiT-R50x1", patch_size=16)


def test_an_image_size_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match="expected multiples of 14×14, got 230×230") as raised:
        create("H/14", image_size=230)
    assert raised.value.hint is not None
    assert "224×224" in raised.value.hint


def test_a_configuration_makes_the_model_it_describes() -> None:
    assert create(small(), device="meta").config == small()
    config = BiTConfig(units=(1,), classes=3)
    model = create(config, device="meta")
    assert isinstance(model, BiT)
    assert model.config == config


@pytest.mark.parametrize("asked", [{"classes": 7}, {"image_size": 64}, {"settings": ["depth=1"]}], ids=str)
def test_changes_to_a_configuration_are_made_or_refused_and_never_swallowed(asked: dict[str, object]) -> None:
    try:
        made = create(small(), device="meta", **asked)
    except (VitkitError, TypeError):
        return
    assert made.config != small()


@pytest.mark.parametrize("name", ["B/16", "R50+L/32", "BiT-R200x3"])
def test_on_the_meta_device_there_are_shapes_and_no_numbers(name: str) -> None:
    model = create(name, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_created_model_runs_and_learns() -> None:
    model = create("Ti/16", image_size=32, classes=4, settings=["depth=1"])
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 4)
    logits.sum().backward()
    assert model.head.weight.grad is not None
