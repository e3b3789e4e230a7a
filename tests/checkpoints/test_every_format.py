"""One contract for all formats: what a format takes comes back to the bit, and what it does not take it names.

The kinds of models are those of docs/formats.py, which writes the page of what the formats hold, and of model_cases.
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
from model_cases import CASES, fresh, images_for, randomised
from torch import Tensor

from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.foreign import FORMATS, format_called, identify, load
from vitkit.checkpoints.formats.format import Format
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import pair
from vitkit.data.transforms import preprocessing
from vitkit.model.config import DropoutConfig, ViTConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import name_of
from vitkit.zoo.variants import ModelConfig

SCRIPT = Path(__file__).parents[2] / "docs" / "formats.py"
OUT = {"npz": "model.npz", "torch": "model.pth", "safetensors": "folder"}
OF_ANY_SIZE = ("bit", "dinov3")
"""Formats whose files do not tell the image size."""
TWO_KINDS, TRIED = 160, 4
"""How many pairs of kinds make models of two kinds at once, and how many of these are tried in each format."""


def script() -> ModuleType:
    """The program that writes the page."""
    specification = importlib.util.spec_from_file_location("what_the_formats_hold", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


PAGE = script()


def as_each_origin(config: ViTConfig) -> Iterator[ViTConfig]:
    """The model as each origin would have it: its GELU, eps, LayerScale and classes, its square images, its heads."""
    sizes = {"width": 128, "heads": 2, "mlp_dim": 256, "image_size": 32}
    activations = ("gelu_erf", "gelu_tanh") if config.block.activation != "swiglu" else ("swiglu",)
    scales = dict.fromkeys((config.block.layer_scale, 0.1))
    for activation, eps, scale, classes in product(activations, (1e-6, 1e-12, 1e-5), scales, (5, 0)):
        block = replace(config.block, activation=activation, norm_eps=eps, layer_scale=scale)
        for changes in ({}, sizes):
            try:
                yield replace(config, **{"block": block, "classes": classes} | changes)
            except ConfigError:
                continue


MODELS: dict[str, dict[str, list[ModelConfig]]] = {
    to.name: {kind: PAGE.models_of(kind, plain=PAGE.own(to)) for kind in PAGE.KINDS if kind not in PAGE.LARGE}
    | {f"case {case}": [config, *as_each_origin(config)] for case, config in CASES.items()}
    for to in FORMATS
}
"""For each format and each kind of model, some of that kind."""


def held() -> dict[tuple[str, ModelConfig], str]:
    """For each format and kind the first model that the format holds, with all the kinds that it stands for."""
    found: dict[tuple[str, ModelConfig], str] = {}
    for to in FORMATS:
        for kind, models in MODELS[to.name].items():
            if model := next((model for model in models if to.refuses(model) is None), None):
                known = found.get((to.name, model))
                found[to.name, model] = f"{known} + {kind}" if known else kind
    return found


HELD = held()
formats = pytest.mark.parametrize("to", FORMATS, ids=lambda to: to.name)


def artefact_of(config: ModelConfig, *, state: dict[str, Tensor]) -> Artefact:
    return Artefact(
        name=name_of(config),
        config=config,
        state=state,
        preprocessing=preprocessing("paper", image_size=config.image_size, channels=config.channels),
        labels=tuple(f"class {number}" for number in range(config.classes)),
    )


def computed(config: ModelConfig) -> ModelConfig:
    """What decides the answers of a model, in one spelling; what docs/formats.md says is not kept is left out."""
    if isinstance(config, BiTConfig):
        return replace(config, image_size=pair(config.image_size))
    positions, block = config.positions, config.block
    every_token = not positions.is_additive or config.placed_prefix == config.class_tokens
    return replace(
        config,
        image_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        positions=PositionConfig(
            kind="learned_1d" if positions.kind == "sincos_2d" else positions.kind,
            injection=positions.place,
            covers="all" if every_token else "patches",
            rotary_base=positions.rotary_base if positions.kind == "rotary" else 100.0,
        ),
        tokens=replace(config.tokens, class_token=config.class_tokens > config.tokens.distillation),
        block=replace(block, layer_scale=None if block.layer_scale is None else 1.0),
        head=replace(config.head, bias=0.0),
        dropout=DropoutConfig(),
    )


@torch.no_grad()
def assert_comes_back(to: Format, config: ModelConfig, out: Path) -> None:
    """Write a model and read what was written, with no word on what it is: format, settings, tensors and logits."""
    model = randomised(fresh(config))
    artefact = artefact_of(config, state=model.state_dict())
    write_as(to, out, artefact)
    with open_tensors(out) as tensors:
        assert identify(tensors).format.name == to.name
    again = load(out)
    if to.name in OF_ANY_SIZE:
        again = replace(again, config=replace(again.config, image_size=config.image_size))
    assert computed(again.config) == computed(config)
    assert again.state.keys() == artefact.state.keys()
    assert all(torch.equal(again.state[name], tensor) for name, tensor in artefact.state.items())
    # On some CPUs what is summed first depends on where it lies, and a file puts its tensors where they come to lie.
    again = replace(again, state={name: tensor.clone() for name, tensor in again.state.items()})
    images = images_for(config)
    assert torch.equal(again.model()(images), model(images))
    if to.writes == "safetensors":
        assert again.labels == artefact.labels
        assert again.preprocessing == artefact.preprocessing


@pytest.mark.parametrize(("to", "config"), HELD, ids=[f"{to}: {kinds}" for (to, _), kinds in HELD.items()])
def test_a_model_of_each_kind_that_a_format_holds_comes_back_to_the_bit(to, config, tmp_path: Path) -> None:
    format_ = format_called(to)
    assert_comes_back(format_, config, tmp_path / OUT[format_.writes])


@cache
def models_of_two_kinds() -> list[ModelConfig]:
    """Models that are of two kinds at once, from some of the pairs."""
    pairs = list(combinations([kind for kind in PAGE.KINDS if kind not in PAGE.LARGE and "BiT" not in kind], 2))
    some = random.Random(0).sample(pairs, TWO_KINDS)
    return list(dict.fromkeys(model for kinds in some for model in PAGE.models_of(*kinds)))


@formats
def test_models_of_two_kinds_at_once_come_back_to_the_bit(to: Format, tmp_path: Path) -> None:
    able = [model for model in models_of_two_kinds() if to.refuses(model) is None and (to.name, model) not in HELD]
    for number, config in enumerate(random.Random(0).sample(able, min(TRIED, len(able)))):
        (tmp_path / str(number)).mkdir()
        assert_comes_back(to, config, tmp_path / str(number) / OUT[to.writes])


@formats
def test_a_model_that_a_format_cannot_hold_is_refused_with_the_reason_and_nothing_is_written(
    to: Format, tmp_path: Path
) -> None:
    refused = {to.refuses(model): model for models in MODELS[to.name].values() for model in models}
    refused.pop(None)
    assert refused
    for reason, model in refused.items():
        with pytest.raises(WeightsError) as caught:
            write_as(to, tmp_path / OUT[to.writes], artefact_of(model, state={}))
        assert caught.value.message == f"{to.title} cannot hold this model: {reason}"
    assert not list(tmp_path.iterdir())


@formats
def test_the_kinds_that_the_page_says_a_format_holds_are_tried(to: Format) -> None:
    tried = {kind for (name, _), kinds in HELD.items() for kind in kinds.split(" + ") if name == to.name}
    assert {kind for kind in PAGE.KINDS if PAGE.reason(to, kind) is None} - {*PAGE.LARGE} <= tried
    assert tried


def test_the_page_of_formats_is_what_the_code_says() -> None:
    assert PAGE.PAGE.read_text(encoding="utf-8") == PAGE.page(), f"write it again: {PAGE.COMMAND}"
