"""Contract of all formats: supported models survive a round trip bit for bit, others are rejected with the reason.

The kinds of models are those of docs/formats.py, which generates the page of supported models, and of model_cases.
"""

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_cases import CASES, fresh, images_for, randomized
from torch import Tensor

from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.sizes import pair
from vitkit.data.preprocessing import get_preprocessing
from vitkit.model.config import BiTConfig, DropoutConfig, PositionConfig, ViTConfig
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats import registry
from vitkit.weights.formats.base import Format
from vitkit.weights.formats.registry import FORMATS, detect_format, get_format
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.load import load_bundle
from vitkit.zoo.registry import get_model_name
from vitkit.zoo.variants import ModelConfig

pytestmark = pytest.mark.usefixtures("without_type_checks")  # other modules check the functions of each format

SCRIPT = Path(__file__).parents[2] / "docs" / "formats.py"
OUT = {"npz": "model.npz", "torch": "model.pth", "safetensors": "folder"}
ANY_SIZE = ("bit", "dinov3")
"""Formats that do not store the image size."""
PAIRS, PAIRS_PER_FORMAT = 160, 4
"""Number of pairs of kinds that are combined, and of combinations that are tried per format."""


def import_script() -> ModuleType:
    """Import docs/formats.py."""
    specification = importlib.util.spec_from_file_location("formats_page", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


PAGE = import_script()


def vary_by_origin(config: ViTConfig) -> Iterator[ViTConfig]:
    """Yield the model with the GELU, eps, LayerScale, classes and dimensions of each origin."""
    sizes = {"width": 128, "heads": 2, "mlp_dim": 256, "image_size": 32}
    activations = ("gelu_erf", "gelu_tanh") if config.block.activation != "swiglu" else ("swiglu",)
    scales = dict.fromkeys((config.block.layer_scale, 0.1))
    for activation, eps, scale, num_classes in product(activations, (1e-6, 1e-12, 1e-5), scales, (5, 0)):
        block = replace(config.block, activation=activation, norm_eps=eps, layer_scale=scale)
        for changes in ({}, sizes):
            try:
                yield replace(config, **{"block": block, "num_classes": num_classes} | changes)
            except ConfigError:
                continue


VARIED: dict[str, list[ModelConfig]] = {
    f"case {case}": [config, *vary_by_origin(config)] for case, config in CASES.items()
}
MODELS: dict[str, dict[str, list[ModelConfig]]] = {
    to.name: {
        kind: PAGE.models_of(kind, plain=PAGE.sort_standard_models(to)) for kind in PAGE.KINDS if kind not in PAGE.LARGE
    }
    | VARIED
    for to in FORMATS.values()
}
"""Models by format and kind."""


def find_supported() -> dict[tuple[str, ModelConfig], str]:
    """Return the first supported model of each format and kind, with all kinds that it represents."""
    supported: dict[tuple[str, ModelConfig], str] = {}
    for to in FORMATS.values():
        for kind, models in MODELS[to.name].items():
            if model := next((model for model in models if to.unsupported_reason(model) is None), None):
                kinds = supported.get((to.name, model))
                supported[to.name, model] = f"{kinds} + {kind}" if kinds else kind
    return supported


SUPPORTED = find_supported()
formats = pytest.mark.parametrize("to", FORMATS.values(), ids=lambda to: to.name)


def artifact_of(config: ModelConfig, *, state: dict[str, Tensor]) -> ModelBundle:
    return ModelBundle(
        name=get_model_name(config),
        config=config,
        state=state,
        preprocessing=get_preprocessing("paper", image_size=config.image_size, channels=config.channels),
        labels=tuple(f"class {number}" for number in range(config.num_classes)),
    )


def normalize(config: ModelConfig) -> ModelConfig:
    """Return the settings that determine the outputs, without those that docs/formats.md lists as lost."""
    if isinstance(config, BiTConfig):
        return replace(config, image_size=pair(config.image_size))
    positions, block = config.positions, config.block
    every_token = not positions.is_additive or config.prefix_positions == config.class_tokens
    return replace(
        config,
        image_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        positions=PositionConfig(
            kind="learned_1d" if positions.kind == "sincos_2d" else positions.kind,
            injection=positions.injection_point,
            covers="all" if every_token else "patches",
            rotary_base=positions.rotary_base if positions.kind == "rotary" else 100.0,
        ),
        tokens=replace(config.tokens, class_token=config.class_tokens > config.tokens.distillation),
        block=replace(block, layer_scale=None if block.layer_scale is None else 1.0),
        head=replace(config.head, bias=0.0),
        dropout=DropoutConfig(),
    )


@torch.no_grad()
def assert_round_trip(to: Format, config: ModelConfig, out: Path) -> None:
    """Write a model, detect its format, read it as that, and compare format, settings, tensors and logits."""
    model = randomized(fresh(config))
    artifact = artifact_of(config, state=model.state_dict())
    write_format(to, out, artifact)
    with open_tensors(out) as tensors:
        assert detect_format(tensors.shapes, tensors.metadata) is to
    again = load_bundle(out, format=to.name)
    if to.name in ANY_SIZE:
        again = replace(again, config=replace(again.config, image_size=config.image_size))
    assert normalize(again.config) == normalize(config)
    assert again.state.keys() == artifact.state.keys()
    assert all(torch.equal(again.state[name], tensor) for name, tensor in artifact.state.items())
    # On some CPUs the summation order depends on memory alignment, which differs in a mapped file.
    again = replace(again, state={name: tensor.clone() for name, tensor in again.state.items()})
    images = images_for(config)
    assert torch.equal(again.build_model()(images), model(images))
    if to.file_type == "safetensors":
        assert again.labels == artifact.labels
        assert again.preprocessing == artifact.preprocessing


@pytest.mark.parametrize(("to", "config"), SUPPORTED, ids=[f"{to}: {kinds}" for (to, _), kinds in SUPPORTED.items()])
def test_supported_model_survives_round_trip(to, config, tmp_path: Path) -> None:
    format_ = get_format(to)
    assert_round_trip(format_, config, tmp_path / OUT[format_.file_type])


@cache
def combine_kinds() -> list[ModelConfig]:
    """Return models of two kinds at once, for a sample of the pairs."""
    pairs = list(combinations([kind for kind in PAGE.KINDS if kind not in PAGE.LARGE and "BiT" not in kind], 2))
    some = random.Random(0).sample(pairs, PAIRS)
    return list(dict.fromkeys(model for kinds in some for model in PAGE.models_of(*kinds)))


@formats
def test_model_of_two_kinds_survives_round_trip(to: Format, tmp_path: Path) -> None:
    supported = [
        model for model in combine_kinds() if to.unsupported_reason(model) is None and (to.name, model) not in SUPPORTED
    ]
    for number, config in enumerate(random.Random(0).sample(supported, min(PAIRS_PER_FORMAT, len(supported)))):
        (tmp_path / str(number)).mkdir()
        assert_round_trip(to, config, tmp_path / str(number) / OUT[to.file_type])


@formats
def test_unsupported_model_is_rejected_with_the_reason(to: Format, tmp_path: Path) -> None:
    rejected = {to.unsupported_reason(model): model for models in MODELS[to.name].values() for model in models}
    rejected.pop(None)
    assert rejected
    for reason, model in rejected.items():
        with pytest.raises(WeightsError) as caught:
            write_format(to, tmp_path / OUT[to.file_type], artifact_of(model, state={}))
        assert caught.value.message == f"{to.title} cannot represent this model: {reason}"
    assert not list(tmp_path.iterdir())


@formats
def test_supported_kinds_of_the_page_are_tried(to: Format) -> None:
    tried = {kind for (name, _), kinds in SUPPORTED.items() for kind in kinds.split(" + ") if name == to.name}
    assert {kind for kind in PAGE.KINDS if PAGE.find_reason(to, kind) is None} - {*PAGE.LARGE} <= tried
    assert tried


def test_page_of_formats_is_up_to_date() -> None:
    assert PAGE.PAGE.read_text(encoding="utf-8") == PAGE.make_page(), f"regenerate it: {PAGE.COMMAND}"


def test_format_is_added_by_a_registry_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "mine."
    timm = get_format("timm")
    mine = replace(
        timm,
        name="mine",
        title="My format",
        file_type="npz",
        matches=lambda shapes, metadata: all(name.startswith(prefix) for name in shapes),
        infer_config=lambda shapes, metadata: PAGE.ERF,
        rules=lambda config, shapes: [
            replace(rule, theirs=tuple(prefix + name for name in rule.theirs)) for rule in timm.rules(config, None)
        ],
    )
    monkeypatch.setattr(registry, "FORMATS", {"mine": mine} | FORMATS)
    assert_round_trip(get_format("mine"), PAGE.ERF, tmp_path / "model.npz")
