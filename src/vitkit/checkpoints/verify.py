"""A file of weights goes in; whether it answers here as it did where it comes from comes out.

A fixed drawn image is run through our model, and its answer compared with the one that an artefact of ours keeps, or
else with that of the library the file is from, where it is installed. Nothing of these libraries is needed otherwise.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vitkit.checkpoints import foreign, native
from vitkit.checkpoints.files.readers import TensorFile, open_tensors
from vitkit.checkpoints.foreign import Found
from vitkit.checkpoints.formats.huggingface import hub_config
from vitkit.checkpoints.formats.timm import TIMM
from vitkit.checkpoints.formats.timm_config import timm_config
from vitkit.checkpoints.hub import located
from vitkit.checkpoints.mapping import read
from vitkit.checkpoints.native import Artefact
from vitkit.checkpoints.reference import answers, drawn_image, largest_difference
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor, pair
from vitkit.model.config import ViTConfig

STORED_TOLERANCE = 1e-4
"""Of the largest logit: another processor adds up in another order."""
TOLERANCE = 1e-5
"""Of the largest logit, or of 1: the same numbers in float32 on one machine, by other kernels."""
UNKNOWN = "nothing to compare with"
FIRST_TOKEN = "last_hidden_state[:, 0]"
Ask = Callable[[Tensor], Tensor]
"""A model of anyone's, in evaluation and float32: pixels to logits, or to features where it has no classes."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The largest difference between two answers to the drawn image, and between whose.

    Where there is nothing to compare with, the difference is None, `against` says why, and nothing agrees.
    """

    max_difference: float | None
    against: str
    tolerance: float
    format: str = "vitkit"
    model: str = ""

    @property
    def agrees(self) -> bool:
        """Whether there was something to compare with, and it is the same."""
        return self.max_difference is not None and self.max_difference <= self.tolerance


def verify(path: Path | str, *, format: str | None = None) -> Verification:  # noqa: A002  the word users type
    """Compare what a model answers to the drawn image with what it should; a file that is no model is an error."""
    path = located(path)
    if format == "vitkit" or (format is None and native.is_ours(path)):
        return verify_own(path)
    with open_tensors(path) as tensors:
        found = foreign.identify(tensors, format=format)
        found.fit.check()
        return replace(_compared_with_its_library(found, tensors), format=found.format.name, model=found.name)


def _compared_with_its_library(found: Found, tensors: TensorFile) -> Verification:
    try:
        against, theirs = model_of_its_library(found, tensors)
        expected = theirs(drawn_image(found.config))
    except WeightsError as error:
        return nothing(error.message)
    state = dict(read(found.rules, tensors))
    foreign.check_shapes(state, found.config, path=tensors.path)
    ours = answers(_artefact(found, state).model().float())
    return compared(ours, expected, against=against, relative=TOLERANCE)


def model_of_its_library(found: Found, tensors: TensorFile) -> tuple[str, Ask]:
    """The library that a file is for, with its version, and the model that it makes of it; an error where it cannot."""
    library = LIBRARIES.get(found.format.name)
    if library is None:
        raise WeightsError(f"{found.format.title} has no library that runs here")
    theirs = imported(library)
    with _said_of(library):
        model = MODELS[library](theirs, found, tensors)

    def ask(pixels: Tensor) -> Tensor:
        with _said_of(library), torch.no_grad():
            return torch.as_tensor(model(pixels)).float()

    return f"{library} {getattr(theirs, '__version__', '')}".rstrip(), ask


@contextmanager
def _said_of(library: str) -> Iterator[None]:
    """Whatever their code raises is one error: it cannot run the file."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(f"{library} cannot run it: {reason or type(error).__name__}") from error


def verify_own(folder: Path | str) -> Verification:
    """Compare an artefact of ours with the answer that was saved with it."""
    artefact = native.load(folder)
    stored = native.stored_reference(folder)
    if stored is None:
        return replace(nothing("the artefact keeps no reference logits"), model=artefact.name)
    ours = answers(artefact.model().float())
    expected = torch.tensor(stored)[None]
    found = compared(ours, expected, against="the reference logits saved with it", relative=STORED_TOLERANCE)
    return replace(found, model=artefact.name)


def compared(ours: Tensor, expected: Tensor, *, against: str, relative: float) -> Verification:
    """The verdict on two answers; the tolerance grows with the largest logit, as float32's spacing does."""
    tolerance = relative * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    return Verification(max_difference=largest_difference(ours, expected), against=against, tolerance=tolerance)


def nothing(reason: str) -> Verification:
    """No verdict, and why.

    >>> nothing("timm is not installed").agrees
    False
    """
    return Verification(max_difference=None, against=f"{UNKNOWN}: {reason}", tolerance=TOLERANCE)


def imported(library: str) -> ModuleType:
    """A library; where it is absent or broken, an error says so."""
    if find_spec(library) is None:
        raise WeightsError(f"{library}, which could run it, is not installed (pip install {library})")
    _mend_torchvision()
    try:
        return _imported(library)
    except Exception as error:  # a broken installation fails in many ways
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise WeightsError(f"{library} is installed, and cannot be imported: {reason}") from error


def _imported(library: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(library)


@cache  # a library's schemas go when it goes
def _mend_torchvision() -> torch.library.Library | None:
    """Make a torchvision that cannot find its operators importable, and with it timm and parts of transformers.

    A wheel made for another torch fails because two schemas are missing. No model here runs these operators, so that
    declaring the schemas is enough (docs/decisions/0008).
    """
    if find_spec("torchvision") is None:
        return None
    try:
        _imported("torchvision")
    except Exception:  # whoever imports it next says what remains
        for half_imported in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[half_imported]
        schemas = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return schemas
    return None


def _artefact(found: Found, state: dict[str, Tensor]) -> Artefact:
    return Artefact(
        name=found.name,
        config=found.config,
        state=state,
        preprocessing=found.preprocessing,
        labels=found.labels,
    )


# Their models. The modules are not typed here: none of them need be installed.


def model_of_timm(timm: Any, found: Found, tensors: TensorFile) -> Ask:
    """timm's model: its architecture by config.json, or else by what we found, with the file's own tensors.

    Google's files timm reads by itself, with code of its own.
    """
    about, config = found.about.config, found.config
    if not config.classes and isinstance(config, ViTConfig) and config.tokens.distillation:
        raise WeightsError("its features are the mean of two tokens")
    said: dict[str, Any] = dict(about if "architecture" in about else timm_config(config))
    architecture, args = timm_call(said, classes=config.classes)
    model = timm.create_model(architecture, pretrained=False, pretrained_cfg=said.get("pretrained_cfg"), **args)
    if found.about.kind == "npz":
        if reason := TIMM.refuses(config):
            raise WeightsError(f"it has no such model: {reason}")
        path = tensors.path
        model.load_pretrained(str(next(path.glob("*.npz")) if path.is_dir() else path))
        return _evaluating(model)
    home = importlib.import_module(timm.models.model_entrypoint(architecture).__module__)
    cleaned = dict(tensors)
    if hasattr(home, "checkpoint_filter_fn"):
        cleaned = home.checkpoint_filter_fn(cleaned, model)
    model.load_state_dict(cleaned, strict=True)
    return _evaluating(model)


def timm_call(said: Mapping[str, Any], *, classes: int) -> tuple[str, dict[str, Any]]:
    """What to give to `timm.create_model`, by a config.json: the architecture and its arguments."""
    return str(said["architecture"]), {"num_classes": classes} | dict(said.get("model_args") or {})


def transformers_answer(config: ViTConfig) -> str:
    """Where in its output a model of Hugging Face's has what ours answers; an error where it has it nowhere."""
    if config.classes:
        return "logits"
    if config.tokens.distillation:
        raise WeightsError("its features are of one token")
    return "pooler_output" if config.head.pre_logits else FIRST_TOKEN


def model_of_transformers(transformers: Any, found: Found, tensors: TensorFile) -> Ask:
    """Hugging Face's model, by its logits, or its class token after the last norm where it has no head."""
    config = found.config
    if not isinstance(config, ViTConfig) or found.format.name == "huggingface-mae":
        raise WeightsError("it answers to a random part of an image only")
    said = dict(found.about.config) or hub_config(config, found.labels, to=found.format)
    family = transformers.CONFIG_MAPPING[said["model_type"]]
    names = hub_config(config, (), to=found.format)["architectures"]
    assert isinstance(names, list)
    model, remarks = getattr(transformers, names[0]).from_pretrained(
        None, config=family.from_dict(said), state_dict=dict(tensors), output_loading_info=True
    )
    if remarks["missing_keys"] and config.classes:
        raise WeightsError(f"it misses {min(remarks['missing_keys'])}")
    answered, place = _evaluating(model), transformers_answer(config)

    def ask(pixels: Tensor) -> Tensor:
        output: Any = answered(pixels)
        return torch.as_tensor(output.last_hidden_state[:, 0] if place == FIRST_TOKEN else getattr(output, place))

    return ask


def model_of_torchvision(torchvision: Any, found: Found, tensors: TensorFile) -> Ask:
    """torchvision's VisionTransformer."""
    config = found.config
    assert isinstance(config, ViTConfig)
    model = torchvision.models.VisionTransformer(
        image_size=pair(config.image_size)[0],
        patch_size=pair(config.patch_size)[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.classes,
        representation_size=config.head.pre_logits,
    )
    model.load_state_dict(dict(tensors), strict=True)
    return _evaluating(model)


def _evaluating(model: torch.nn.Module) -> Ask:
    """A module as it is used."""
    return model.float().eval()


LIBRARIES = {
    **dict.fromkeys(("google", "big_vision", "bit", "timm", "deit", "mae", "dinov2"), "timm"),
    **dict.fromkeys(("huggingface", "huggingface-deit", "huggingface-mae", "huggingface-dinov2"), "transformers"),
    "torchvision": "torchvision",
}
"""Who can run the files of a format."""
MODELS: dict[str, Callable[[Any, Found, TensorFile], Ask]] = {
    "timm": model_of_timm,
    "transformers": model_of_transformers,
    "torchvision": model_of_torchvision,
}
