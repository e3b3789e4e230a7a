"""Pre-training wrapper of an encoder: beside an artifact, and in files of MAE's code and of Hugging Face.

`pretraining.safetensors` holds the mask token and the prediction head or decoder, `pretraining.json` their
configuration and checksum. The artifact is complete without them: they serve to inspect what the model reconstructs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import WeightsError, summarize
from vitkit.core.files import sha256, write_json
from vitkit.core.shapes import Tensor
from vitkit.model.pretraining import ENCODER_PREFIX, MaskedAutoencoder, MaskedPatches
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.model.vit import ViT
from vitkit.typing import ModelSource
from vitkit.weights import artifact as artifact_io
from vitkit.weights.artifact import check_size, read_tensors
from vitkit.weights.bundle import ModelBundle, load_state
from vitkit.weights.io.checks import check_config_limits, read_json
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.io.writers import save_safetensors
from vitkit.weights.load import identify, load_bundle, resolve_source
from vitkit.weights.rules import Rule, Shapes, apply_rules, layer_rules, rename
from vitkit.weights.run_checkpoint import is_unfinished_run
from vitkit.zoo.registry import create

WEIGHTS, DESCRIPTION = "pretraining.safetensors", "pretraining.json"
FORMAT_VERSION = 2

WrapperConfig = MaskedConfig | MAEConfig
PretrainingModel = MaskedPatches | MaskedAutoencoder
KINDS: dict[str, type[WrapperConfig]] = {"masked": MaskedConfig, "autoencoder": MAEConfig}
DECODER_HEADS = 16
"""Heads of MAE's decoders if config.json does not have them."""
LAYER_PREFIXES = ("decoder_blocks.", "decoder.decoder_layers.", "decoder.decoder_encoder.layer.")
"""Prefixes of decoder layers: MAE, Hugging Face's published files, and those written by its version 5."""
LAYER_PARTS = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Parts of a decoder layer: vitkit's and MAE's names, and those of Hugging Face."""


@dataclass(frozen=True, kw_only=True)
class PretrainingWrapper:
    """Tensors of a pre-training model that are not the encoder's, under their names in that model."""

    settings: WrapperConfig
    state: dict[str, Tensor]


def write_pretraining(path: Path | str, wrapper: PretrainingWrapper) -> None:
    """Write a wrapper into the directory of an artifact; the description last, with the checksum of the weights."""
    path = Path(path)
    (path / DESCRIPTION).unlink(missing_ok=True)
    save_safetensors(path / WEIGHTS, wrapper.state, {"format": "pt"})
    kind = next(kind for kind, cls in KINDS.items() if isinstance(wrapper.settings, cls))
    description = {"version": FORMAT_VERSION, "objective": kind, "settings": to_mapping(wrapper.settings)}
    write_json(path / DESCRIPTION, description | {"sha256": sha256(path / WEIGHTS)})


def has_pretraining(path: Path | str) -> bool:
    """Return whether a directory has a pre-training wrapper beside its model."""
    return (Path(path) / DESCRIPTION).is_file()


def read_pretraining(path: Path | str) -> PretrainingWrapper:
    """Read a wrapper. A missing or changed file is an error that names it."""
    path = Path(path)
    if not has_pretraining(path):
        hint = "name the directory of a self-supervised run"
        raise WeightsError(f"{path}: no pre-training weights", expected=f"{DESCRIPTION} beside the model", hint=hint)
    file = path / DESCRIPTION
    description = read_json(file)
    try:
        version, kind, values, checksum = (description[key] for key in ("version", "objective", "settings", "sha256"))
        if version != FORMAT_VERSION:
            raise WeightsError(
                f"{file}: another version", expected=FORMAT_VERSION, got=version, hint="run the pre-training again"
            )
        if not isinstance(values, Mapping):
            raise TypeError("settings are not a mapping")
        check_config_limits(values, where=file)
        settings: WrapperConfig = from_mapping(KINDS[str(kind)], values, where=f"{file}: settings.")
    except WeightsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{file}: not the description of a pre-training wrapper: {summarize(error)}") from error
    if (path / WEIGHTS).is_file():
        check_size(path / WEIGHTS)
    if not (path / WEIGHTS).is_file() or sha256(path / WEIGHTS) != checksum:
        raise WeightsError(f"{path / WEIGHTS}: missing or damaged", hint="copy it again, or train again")
    return PretrainingWrapper(settings=settings, state=read_tensors(path / WEIGHTS))


def load_pretraining_model(path: Path | str) -> PretrainingModel:
    """Load the pre-training model of a run, in eval mode: the artifact's encoder inside its wrapper."""
    return _build_model(artifact_io.read_artifact(path), read_pretraining(path), path=Path(path))


def load_mae_model(path: Path) -> MaskedAutoencoder | None:
    """Load a masked autoencoder from a file of another library; None if the file has no decoder."""
    with open_tensors(path) as tensors:
        if identify(tensors).format.name not in ("mae", "huggingface-mae"):
            return None
        settings = infer_decoder_config(tensors.shapes, tensors.metadata.config, name=path.name)
        if settings is None:
            return None
        state = dict(apply_rules(make_decoder_rules(tensors.shapes, depth=settings.depth), tensors))
    model = _build_model(load_bundle(path), PretrainingWrapper(settings=settings, state=state), path=path)
    assert isinstance(model, MaskedAutoencoder)
    return model


def find_pretraining_model(source: ModelSource) -> PretrainingModel | None:
    """Return the pre-training model of a run or weight file, or None if it has only an encoder."""
    path = resolve_source(source)
    if not isinstance(path, Path) or is_unfinished_run(path):
        return None
    if has_pretraining(path):
        return load_pretraining_model(path)
    return None if artifact_io.is_artifact(path) else load_mae_model(path)


def _build_model(bundle: ModelBundle, wrapper: PretrainingWrapper, *, path: Path) -> PretrainingModel:
    with torch.device("meta"):
        encoder = create(bundle.config)
        if not isinstance(encoder, ViT):
            raise WeightsError(f"{path}: pre-training weights for a model without patches")
        model: PretrainingModel
        if isinstance(wrapper.settings, MaskedConfig):
            model = MaskedPatches(encoder, wrapper.settings)
        else:
            model = MaskedAutoencoder(encoder, wrapper.settings)
    state = {f"{ENCODER_PREFIX}{name}": tensor for name, tensor in bundle.state.items()} | wrapper.state
    load_state(model, state, error=f"{path}: the pre-training weights do not fit the model")
    return model.eval()


# Decoders of other libraries


def infer_decoder_config(shapes: Shapes, config: Mapping[str, object], *, name: str) -> MAEConfig | None:
    """Infer the decoder of a file, if it has one. MAE's own files tell the target only by their `name`."""
    prefix = "decoder." if "decoder.decoder_embed.weight" in shapes else ""
    if f"{prefix}decoder_embed.weight" not in shapes:
        return None
    start = _find_layer_prefix(shapes)
    depth = len({key.removeprefix(start).partition(".")[0] for key in shapes if key.startswith(start)})
    heads, mask_ratio = config.get("decoder_num_attention_heads", DECODER_HEADS), config.get("mask_ratio", 0.75)
    # MAE's files for visualization predict unnormalized pixels.
    normalize = config.get("norm_pix_loss", False) if prefix else "visualize" not in name
    if not isinstance(heads, int) or not isinstance(mask_ratio, int | float):
        raise WeightsError("config.json has an invalid decoder", expected="numbers", got=f"{heads}, {mask_ratio}")
    return MAEConfig(
        width=shapes[f"{prefix}decoder_embed.weight"][0],
        depth=depth,
        heads=heads,
        mask_ratio=float(mask_ratio) or 0.75,  # 0 in files for encoding complete images
        normalize=bool(normalize),
    )


def make_decoder_rules(shapes: Shapes, *, depth: int) -> list[Rule]:
    """Make the rules of a decoder with the names of a file."""
    prefix, start = "decoder." if "decoder.decoder_embed.weight" in shapes else "", _find_layer_prefix(shapes)
    is_mae = start == LAYER_PREFIXES[0]
    qkv = ["attn.qkv"] if is_mae else [f"attention.attention.{part}" for part in ("query", "key", "value")]
    rules = [rename(name, f"{prefix}{name}") for name in ("mask_token", "decoder_pos_embed")]
    for name in ("decoder_embed", "decoder_norm", "decoder_pred"):
        rules += layer_rules(name, f"{prefix}{name}")
    for layer in range(depth):
        ours, theirs = f"decoder_blocks.{layer}", f"{start}{layer}"
        rules += layer_rules(f"{ours}.attn.qkv", *(f"{theirs}.{part}" for part in qkv))
        for part, name in LAYER_PARTS.items():
            rules += layer_rules(f"{ours}.{part}", f"{theirs}.{part if is_mae else name}")
    return rules


def _find_layer_prefix(shapes: Shapes) -> str:
    used = (prefix for prefix in LAYER_PREFIXES if any(name.startswith(prefix) for name in shapes))
    return next(used, LAYER_PREFIXES[0])
