"""Verification of loaded weights against stored logits or the library that the weights are for.

The reference image is run through vitkit's model, and the logits are compared with those stored in the artifact, or
with those of the weights' own library if it is installed. These libraries are needed for nothing else.
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

from vitkit.core.errors import WeightsError, summarize
from vitkit.core.result import Result, select
from vitkit.core.shapes import Tensor
from vitkit.core.sizes import pair
from vitkit.model.config import ViTConfig
from vitkit.typing import ModelSource
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import logits_difference, reference_image, reference_logits
from vitkit.weights.formats.timm import TIMM
from vitkit.weights.formats.timm.config import make_timm_config
from vitkit.weights.io.readers import TensorFile, open_tensors
from vitkit.weights.load import (
    IdentifiedWeights,
    check_shapes,
    format_title,
    identify,
    read_own,
    reads_as_artifact,
    resolve_source,
    source_name,
)
from vitkit.weights.rules import apply_rules
from vitkit.weights.run_checkpoint import is_unfinished_run

STORED_TOLERANCE = 1e-4
"""Relative to the largest logit: another processor sums in another order."""
TOLERANCE = 1e-5
"""Relative to the largest logit or 1: the same float32 values on one machine, with other kernels."""
CLASS_TOKEN_OUTPUT = "last_hidden_state[:, 0]"
Forward = Callable[[Tensor], Tensor]
"""Model of another library in float32 and eval mode: pixels to logits, or to features if it has no classes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class VerificationResult(Result):
    """Largest difference between two outputs for the reference image.

    If there is nothing to compare with, `max_difference` is None, `against` has the reason, and `agrees` is False.
    """

    max_difference: float | None
    against: str
    tolerance: float
    source: str = ""
    format: str = artifact_io.FORMAT_NAME
    model: str = ""

    @property
    def agrees(self) -> bool:
        """Whether outputs were compared and agree."""
        return self.max_difference is not None and self.max_difference <= self.tolerance

    @property
    def title(self) -> str:
        """Title of the format."""
        return format_title(self.format)

    def to_dict(self) -> dict[str, object]:
        """Return the output of `vitkit weights verify --json`."""
        names = ("format", "model", "max_difference", "against", "tolerance", "agrees")
        return {"file": self.source} | select(self, *names)


def verify_source(source: ModelSource, *, format: str | None = None) -> VerificationResult:  # noqa: A002  the word users type
    """Compare the logits of the reference image with stored logits or with the library of origin.

    A file that cannot be loaded is an error; one that disagrees is not.
    """
    path, name = resolve_source(source, format=format), source_name(source)
    if not isinstance(path, Path) or is_unfinished_run(path):
        result = _not_compared("a model in memory or of an unfinished run has no stored logits")
        return replace(result, source=name, model=read_own(path)[0].name)
    if reads_as_artifact(path, format):
        return replace(verify_artifact(path), source=name)
    with open_tensors(path) as tensors:
        weights = identify(tensors, format=format)
        weights.key_match.check()
        result = _compare_with_library(weights, tensors)
    return replace(result, source=name, format=weights.format.name, model=weights.name)


def _compare_with_library(weights: IdentifiedWeights, tensors: TensorFile) -> VerificationResult:
    try:
        against, forward = build_library_model(weights, tensors)
        expected = forward(reference_image(weights.config))
    except WeightsError as error:
        return _not_compared(error.message)
    state = dict(apply_rules(weights.rules, tensors))
    check_shapes(state, weights.config, path=tensors.path)
    logits = reference_logits(weights.to_bundle(state).build_model().float())
    return _compare_logits(logits, expected, against=against, relative=TOLERANCE)


def verify_artifact(path: Path | str) -> VerificationResult:
    """Compare an artifact with the logits that were saved with it."""
    bundle = artifact_io.read_artifact(path)
    stored = artifact_io.read_reference_logits(path)
    if stored is None:
        return replace(_not_compared("the artifact has no reference logits"), model=bundle.name)
    logits = reference_logits(bundle.build_model().float())
    expected = torch.tensor(stored)[None]
    result = _compare_logits(logits, expected, against="stored reference logits", relative=STORED_TOLERANCE)
    return replace(result, model=bundle.name)


def _compare_logits(logits: Tensor, expected: Tensor, *, against: str, relative: float) -> VerificationResult:
    """Compare two outputs; the tolerance grows with the largest logit, as the spacing of float32 does."""
    tolerance = relative * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    difference = logits_difference(logits, expected)
    return VerificationResult(max_difference=difference, against=against, tolerance=tolerance)


def _not_compared(reason: str) -> VerificationResult:
    return VerificationResult(max_difference=None, against=f"nothing to compare with: {reason}", tolerance=TOLERANCE)


# Libraries


def build_library_model(weights: IdentifiedWeights, tensors: TensorFile) -> tuple[str, Forward]:
    """Return the library that a file is for, with its version, and its model of the file; an error if it has none."""
    library = weights.format.library
    if library is None:
        raise WeightsError(f"no library runs files of {weights.format.title}")
    module = import_library(library)
    with _wrap_library_errors(library):
        model = BUILDERS[library](module, weights, tensors)

    def forward(pixels: Tensor) -> Tensor:
        with _wrap_library_errors(library), torch.no_grad():
            return torch.as_tensor(model(pixels)).float()

    return f"{library} {getattr(module, '__version__', '')}".rstrip(), forward


def _first_words(error: Exception) -> str:
    return " ".join(summarize(error).split())[:200] or type(error).__name__


@contextmanager
def _wrap_library_errors(library: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise WeightsError(f"{library} cannot run it: {_first_words(error)}") from error


def import_library(library: str) -> ModuleType:
    """Import a library; if it is absent or broken, raise an error that says so."""
    if find_spec(library) is None:
        raise WeightsError(f"{library}, which could run it, is not installed (pip install {library})")
    _declare_torchvision_ops()
    try:
        return _import_quietly(library)
    except Exception as error:  # a broken installation fails in many ways
        raise WeightsError(f"{library} is installed but cannot be imported: {_first_words(error)}") from error


def _import_quietly(library: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(library)


@cache  # schemas are removed with the Library object
def _declare_torchvision_ops() -> torch.library.Library | None:
    """Make a torchvision without its operators importable, and with it timm and parts of transformers.

    A wheel built for another torch fails because two schemas are missing. No model here runs these operators, so
    declaring the schemas is enough (docs/decisions/0008).
    """
    if find_spec("torchvision") is None:
        return None
    try:
        _import_quietly("torchvision")
    except Exception:  # a remaining problem is reported by the next import
        for partial_module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[partial_module]
        schemas = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return schemas
    return None


# Models of the libraries. The modules are untyped: none of them need be installed.


def build_timm_model(timm: Any, weights: IdentifiedWeights, tensors: TensorFile) -> Forward:
    """Build timm's model, by config.json or else by the identified configuration, with the file's own tensors.

    timm loads Google's files itself.
    """
    config, declared = weights.config, weights.metadata.config
    if not config.num_classes and isinstance(config, ViTConfig) and config.tokens.distillation:
        raise WeightsError("its features are the mean of two tokens")
    timm_json: dict[str, Any] = dict(declared if "architecture" in declared else make_timm_config(config))
    architecture, args = timm_create_args(timm_json, num_classes=config.num_classes)
    model = timm.create_model(architecture, pretrained=False, pretrained_cfg=timm_json.get("pretrained_cfg"), **args)
    if weights.metadata.file_type == "npz":
        if reason := TIMM.unsupported_reason(config):
            raise WeightsError(f"it has no such model: {reason}")
        path = tensors.path
        model.load_pretrained(str(next(path.glob("*.npz")) if path.is_dir() else path))
        return model.float().eval()
    module = importlib.import_module(timm.models.model_entrypoint(architecture).__module__)
    state = dict(tensors)
    if hasattr(module, "checkpoint_filter_fn"):
        state = module.checkpoint_filter_fn(state, model)
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def timm_create_args(timm_json: Mapping[str, Any], *, num_classes: int) -> tuple[str, dict[str, Any]]:
    """Return the architecture and the arguments of `timm.create_model` that a config.json specifies."""
    args = {"num_classes": num_classes} | dict(timm_json.get("model_args") or {})
    return str(timm_json["architecture"]), args


def transformers_output(config: ViTConfig) -> str:
    """Return the output of a Hugging Face model that corresponds to vitkit's; an error if there is none."""
    if config.num_classes:
        return "logits"
    if config.tokens.distillation:
        raise WeightsError("its features are of one token")
    return "pooler_output" if config.head.pre_logits else CLASS_TOKEN_OUTPUT


def build_transformers_model(transformers: Any, weights: IdentifiedWeights, tensors: TensorFile) -> Forward:
    """Build Hugging Face's model; its features are the class token after the last norm."""
    config = weights.config
    if not isinstance(config, ViTConfig) or weights.format.name == "huggingface-mae":
        raise WeightsError("it encodes only a random part of an image")
    make_config = weights.format.make_config
    assert make_config is not None
    hub_json = dict(weights.metadata.config) or make_config(config, weights.labels)
    family = transformers.CONFIG_MAPPING[hub_json["model_type"]]
    architectures = make_config(config, ())["architectures"]
    assert isinstance(architectures, list)
    model, loading_info = getattr(transformers, architectures[0]).from_pretrained(
        None, config=family.from_dict(hub_json), state_dict=dict(tensors), output_loading_info=True
    )
    if loading_info["missing_keys"] and config.num_classes:
        raise WeightsError(f"it misses {min(loading_info['missing_keys'])}")
    model, key = model.float().eval(), transformers_output(config)

    def forward(pixels: Tensor) -> Tensor:
        output: Any = model(pixels)
        return torch.as_tensor(output.last_hidden_state[:, 0] if key == CLASS_TOKEN_OUTPUT else getattr(output, key))

    return forward


def build_torchvision_model(torchvision: Any, weights: IdentifiedWeights, tensors: TensorFile) -> Forward:
    """Build torchvision's VisionTransformer."""
    config = weights.config
    assert isinstance(config, ViTConfig)
    model = torchvision.models.VisionTransformer(
        image_size=pair(config.image_size)[0],
        patch_size=pair(config.patch_size)[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
        representation_size=config.head.pre_logits,
    )
    model.load_state_dict(dict(tensors), strict=True)
    return model.float().eval()


BUILDERS: dict[str, Callable[[Any, IdentifiedWeights, TensorFile], Forward]] = {
    "timm": build_timm_model,
    "transformers": build_transformers_model,
    "torchvision": build_torchvision_model,
}
