"""Lookup of models: names, aliases, wildcards, settings and unknown names."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import small

import vitkit
from vitkit.core.errors import ConfigError, UnknownNameError, VitkitError
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.registry import configure, create, find_variant, find_variants, parse_image_size
from vitkit.zoo.variants import VARIANTS

OWNERS = {known: variant.name for variant in VARIANTS for known in (variant.name, *variant.aliases)}


def test_names_and_aliases_are_unique_in_any_case() -> None:
    known = Counter(name.lower() for variant in VARIANTS for name in (variant.name, *variant.aliases))
    assert [name for name, times in known.items() if times > 1] == []


@given(known=st.sampled_from(sorted(OWNERS)), data=st.data())
def test_lookup_ignores_case(known: str, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(known), max_size=len(known)))
    name = "".join(letter.upper() if up else letter.lower() for letter, up in zip(known, upper, strict=True))
    assert find_variant(name).name == OWNERS[known]


@pytest.mark.parametrize("known", OWNERS)
def test_alias_ending_in_384_sets_image_size_384(known: str) -> None:
    expected = 384 if known.endswith("384") else 224
    assert find_variant(known).config.image_size == expected
    assert find_variant(known.upper()).config.image_size == expected
    assert find_variant(known).parameters == find_variant(OWNERS[known]).parameters


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
def test_image_size_is_parsed_from_alias(alias: str, size: int) -> None:
    assert parse_image_size(alias) == size


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
def test_aliases_of_other_libraries(alias: str, name: str) -> None:
    assert find_variant(alias).name == name


def test_timm_tag_is_ignored() -> None:
    for name in ("vit_base_patch16_384.augreg_in21k_ft_in1k", "VIT_BASE_PATCH16_384.orig", "vit_base_patch16_384"):
        assert find_variant(name) == find_variant("vit_base_patch16_384")
    assert find_variant("resnetv2_50x1_bit.goog_in21k").name == "BiT-R50x1"
    for name in ("B/16.anything", "google/vit-base-patch16-224.main"):
        with pytest.raises(UnknownNameError):
            find_variant(name)


# Listing


def test_list_models_lists_every_variant_in_order() -> None:
    assert vitkit.list_models() == [variant.name for variant in VARIANTS]


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
    ],
)
def test_wildcards_match_names_and_aliases_in_any_case(pattern: str, names: list[str]) -> None:
    assert vitkit.list_models(pattern) == names
    assert [variant.name for variant in find_variants(pattern)] == names


def test_pattern_without_match_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="no model matches nothing"):
        vitkit.list_models("nothing*")
    with pytest.raises(UnknownNameError, match="no pretrained weights match nothing"):
        vitkit.list_models("nothing*", pretrained=True)


def test_pretrained_weights_are_listed_by_source() -> None:
    assert vitkit.list_models("google/vit-base-patch16-384", pretrained=True) == ["google/vit-base-patch16-384"]


def test_package_exports_the_functions() -> None:
    assert {"create", "list_models"} <= set(dir(vitkit))
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
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
@pytest.mark.parametrize("function", [find_variant, configure, create])
def test_unknown_name_suggests_the_nearest(function: Callable[[str], object], name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as raised:
        function(name)
    assert raised.value.summary == f"unknown model {name}"
    assert raised.value.hint == f"did you mean {nearest}?"
    assert raised.value.__cause__ is None


def test_name_without_near_match_points_to_the_list() -> None:
    with pytest.raises(UnknownNameError) as raised:
        find_variant("zzzzzzzz")
    assert raised.value.hint == "vitkit models lists every name"


@pytest.mark.parametrize("name", ["", " ", "B/16 ", "*", "B/1?"])
def test_name_is_not_a_pattern(name: str) -> None:
    with pytest.raises(UnknownNameError):
        find_variant(name)


# Creating


def test_configure_applies_arguments() -> None:
    config = configure("B/16", image_size=(96, 160), patch_size=32, channels=1, num_classes=7)
    assert isinstance(config, ViTConfig)
    assert (config.image_size, config.patch_size, config.channels, config.num_classes) == ((96, 160), 32, 1, 7)
    assert config.grid == (3, 5)
    assert config.width == 768


def test_configure_keeps_the_size_of_the_alias() -> None:
    assert configure("vit_base_patch16_384") == configure("B/16", image_size=384)
    assert configure("vit_base_patch16_384", image_size=224) == configure("B/16")


def test_zero_classes_are_allowed() -> None:
    assert configure("B/16", num_classes=0).num_classes == 0


def test_settings_change_any_field() -> None:
    settings = {
        "pooling": "map",
        "positions.kind": "relative",
        "block.attention.qk_norm": True,
        "head": {"bias": -10},
        "depth": 3,
    }
    config = configure("Ti/16", settings=settings)
    assert isinstance(config, ViTConfig)
    assert (config.pooling, config.positions.kind, config.depth) == ("map", "relative", 3)
    assert config.block.attention.qk_norm
    assert config.head.bias == -10.0


def test_settings_reach_the_model() -> None:
    model = create("Ti/16", image_size=32, num_classes=4, settings={"depth": 1, "head": {"bias": -10}})
    assert isinstance(model, ViT)
    assert (model(torch.randn(2, 3, 32, 32)) == -10).all()


def test_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="poling is not a known key") as raised:
        create("B/16", settings={"poling": "mean"})
    assert raised.value.hint == "did you mean pooling?"


def test_inconsistent_setting_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the heads do not divide the width"):
        create("B/16", settings={"heads": 10})


def test_resnet_rejects_patch_size() -> None:
    with pytest.raises(ConfigError, match="patch_size is not a known key"):
        create("BiT-R50x1", patch_size=16)


def test_bad_image_size_suggests_a_valid_one() -> None:
    with pytest.raises(ConfigError, match="expected multiples of 14×14, got 230×230") as raised:
        create("H/14", image_size=230)
    assert raised.value.hint is not None
    assert "224×224" in raised.value.hint


def test_create_accepts_a_configuration() -> None:
    assert create(small(), device="meta").config == small()
    config = BiTConfig(units=(1,), num_classes=3)
    model = create(config, device="meta")
    assert isinstance(model, BiT)
    assert model.config == config


@pytest.mark.parametrize("changes", [{"num_classes": 7}, {"image_size": 64}, {"settings": {"depth": 1}}], ids=str)
def test_changes_to_a_configuration_are_never_ignored(changes: dict[str, object]) -> None:
    try:
        model = create(small(), device="meta", **changes)
    except (VitkitError, TypeError):
        return
    assert model.config != small()


@pytest.mark.parametrize("name", ["B/16", "R50+L/32", "BiT-R200x3"])
def test_meta_device_has_no_data(name: str) -> None:
    model = create(name, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_created_model_computes_gradients() -> None:
    model = create("Ti/16", image_size=32, num_classes=4, settings={"depth": 1})
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 4)
    logits.sum().backward()
    assert model.head.weight.grad is not None


def test_zoo_is_importable_without_torch() -> None:
    modules = ", ".join(f"vitkit.zoo.{name}" for name in ("variants", "registry", "flops", "pretrained", "cost"))
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
