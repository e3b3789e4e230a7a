"""Comparison of every Vision Transformer that the installed timm lists with what vitkit makes of its files."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from oracle.comparison import randomize
from oracles import import_timm

import vitkit
from vitkit.core.errors import VitkitError
from vitkit.core.sizes import pair
from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.formats.registry import detect_format
from vitkit.weights.rules import Shapes, match_keys
from vitkit.zoo.variants import ModelConfig

MODULES = (
    *("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam"),
    *("deit", "eva", "beit", "naflexvit"),
)
"""timm's modules of Vision Transformers that have one width."""
MAX_WIDTH = 768
"""Width up to which `make test` compares architectures; `make soak` compares the others."""
TOLERANCE = 1e-5
"""Difference relative to the largest logit; both GELUs, the nearest of what could be confused, differ by 4e-5."""


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """An architecture with one block: its width, image size, tensors, and the model that vitkit reads from its files.

    `signature` describes all modules with their settings. Architectures that differ only in image size share it.
    """

    name: str
    width: int
    args: dict[str, int]
    shapes: Shapes
    signature: str
    ours: ModelConfig | None


def list_architectures() -> list[str]:
    """List the Vision Transformers of the installed timm."""
    import_timm()
    from timm.models._registry import _deprecated_models, _module_to_models  # noqa: PLC0415

    names = {name for module in MODULES for name in _module_to_models.get(module, ())}
    return sorted(names - _deprecated_models.keys())


def build(name: str, **settings: Any) -> Any:
    """Build an architecture with one block and five classes, not initialized; None if timm cannot."""
    timm = import_timm()
    try:
        with mock.patch("timm.layers.weight_init._trunc_normal_", lambda tensor, *_: tensor):
            return timm.create_model(name, depth=1, num_classes=5, **settings)
    except (TypeError, AssertionError):  # SAM, and grouped heads that are listed by block
        return None


def inspect_architecture(name: str) -> Inspected | None:
    """Inspect an architecture without memory for its weights; None if it cannot have one block."""
    with torch.device("meta"):
        model = build(name)
        if model is None:
            return None
        size = _small_size(model)
        args = {} if size is None else {"img_size": size}
        model = build(name, **args) if args else model
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    parts = [(key, type(module).__name__, _settings(module)) for key, module in model.named_modules()]
    return Inspected(
        name=name,
        width=int(model.num_features),
        args=args,
        shapes=shapes,
        signature=repr((parts, shapes)),
        ours=read_config(shapes, _make_metadata(model, args)),
    )


def read_config(shapes: Shapes, metadata: FileMetadata) -> ModelConfig | None:
    """Return the model that vitkit reads from a file of these tensors, None if it refuses the file."""
    if (detected := detect_format(shapes, metadata)) is None:
        return None
    try:
        config = detected.infer_config(shapes, metadata)
        match_keys(detected.rules(config, shapes), shapes, ignored=detected.ignored_names).check()
    except VitkitError:
        return None
    return config


@torch.no_grad()
def compare(inspected: Inspected, directory: Path) -> float:
    """Return the difference of the logits of timm's model and of what vitkit loads from its files."""
    from timm.models._hub import save_for_hf  # noqa: PLC0415

    theirs = build(inspected.name, **inspected.args).eval()
    randomize(theirs)
    save_for_hf(theirs, directory, model_args=inspected.args)
    ours = vitkit.load(directory)
    images = torch.randn(1, 3, *pair(ours.config.image_size), generator=torch.Generator().manual_seed(1))
    expected = theirs(images)
    return float((ours(images) - expected).abs().max() / expected.abs().max())


def _small_size(model: Any) -> int | None:
    """Return a size of a few patches if the model has a position table, whose rows depend on it."""
    has_table = getattr(model, "pos_embed", None) is not None and hasattr(model, "patch_embed")
    if not has_table or not hasattr(model.patch_embed, "patch_size"):
        return None
    is_hybrid = hasattr(model.patch_embed, "backbone")
    return 64 if is_hybrid else 4 * int(model.patch_embed.patch_size[0])


def _settings(module: torch.nn.Module) -> dict[str, object]:
    kinds = (bool, int, float, str, tuple, list, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, kinds)}


def _make_metadata(model: Any, args: dict[str, int]) -> FileMetadata:
    """Make the metadata of the files that timm writes for a model."""
    from timm.models._hub import save_config_for_hf  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        save_config_for_hf(model, path, model_args=args)
        config = json.loads(path.read_text(encoding="utf-8"))
    return FileMetadata(file_type="torch", config=config, file_name="pytorch_model.bin")
