"""Contract over every Vision Transformer of the installed timm: equal logits, or refused.

Wider models are compared by `make soak`.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from oracle.timm_architectures import (
    MAX_WIDTH,
    TOLERANCE,
    Inspected,
    compare,
    inspect_architecture,
    list_architectures,
    read_config,
)
from oracles import import_timm

import vitkit
from vitkit.core.errors import UnknownNameError, WeightsError
from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.formats.registry import parse_format
from vitkit.weights.formats.timm.architectures import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("without_type_checks")  # test_timm_names.py checks the functions of the format


@cache
def small_architectures() -> tuple[Inspected, ...]:
    inspected = (inspect_architecture(name) for name in list_architectures())
    return tuple(each for each in inspected if each is not None and each.width <= MAX_WIDTH)


def test_every_architecture_is_equal_or_refused(tmp_path: Path) -> None:
    accepted = [each for each in small_architectures() if each.ours is not None]
    assert {each.name for each in accepted} == ARCHITECTURES.keys() & {each.name for each in small_architectures()}
    assert len(accepted) >= 70
    # One of each group that timm and vitkit build alike is compared.
    groups = {(each.signature, repr(each.ours)): each for each in accepted}
    differences = {each.name: compare(each, tmp_path / each.name) for each in groups.values()}
    assert not {name: value for name, value in differences.items() if not value < TOLERANCE}


def test_known_architectures_exist() -> None:
    assert ARCHITECTURES.keys() <= set(list_architectures())


def test_bare_files_are_refused() -> None:
    """Tensors do not determine heads, pooling, activation, norm order or rotary positions."""
    for container in (None, "model", "state_dict"):
        metadata = FileMetadata(file_type="torch", container=container, file_name="checkpoint.pth")
        assert [each.name for each in small_architectures() if read_config(each.shapes, metadata)] == []


@pytest.mark.parametrize(
    ("architecture", "settings", "error"),
    [
        ("vit_base_patch16_gap_224", {}, "pooling"),
        ("vit_base_patch16_224", {"global_pool": "max"}, "pooling"),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu"}, "pooling"),
        ("vit_base_patch16_rope_ape_224", {}, "pooling"),
    ],
)
def test_bare_file_names_what_is_missing(
    tmp_path: Path, architecture: str, settings: dict[str, str], error: str
) -> None:
    timm = import_timm()
    model = timm.create_model(architecture, depth=1, num_classes=5, **settings)
    torch.save(model.state_dict(), tmp_path / "checkpoint.pth")
    with pytest.raises(WeightsError, match=f"determine the {error}") as caught:
        vitkit.load(tmp_path / "checkpoint.pth")
    assert "--format timm:vit_base_patch16_224" in str(caught.value.hint)


def test_architecture_is_given_by_format_or_file_name(tmp_path: Path) -> None:
    timm = import_timm()
    theirs = timm.create_model("vit_base_patch16_gap_224", depth=1, num_classes=5)
    torch.save(theirs.state_dict(), tmp_path / "mine.pth")
    torch.save(theirs.state_dict(), tmp_path / "vit_base_patch16_gap_224.in1k.pth")
    given = vitkit.load(tmp_path / "mine.pth", format="timm:vit_base_patch16_gap_224")
    named = vitkit.load(tmp_path / "vit_base_patch16_gap_224.in1k.pth")
    assert given.config == named.config
    assert (given.config.heads, given.config.pooling) == (16, "mean")


def test_unknown_architecture_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="vit_base_patch16_rope_224"):
        parse_format("timm:vit_base_patch16_rope_224")
    with pytest.raises(UnknownNameError, match="unknown weight format"):
        parse_format("google:vit_base_patch16_224")


def test_unknown_argument_is_refused(tmp_path: Path) -> None:
    """An argument that vitkit does not interpret may change what the model computes."""
    timm = import_timm()
    from timm.models._hub import save_for_hf  # noqa: PLC0415

    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=5)
    save_for_hf(model, tmp_path, model_args={"norm_layer": "rmsnorm"})
    with pytest.raises(WeightsError, match="unsupported model_args: norm_layer"):
        vitkit.load(tmp_path)
