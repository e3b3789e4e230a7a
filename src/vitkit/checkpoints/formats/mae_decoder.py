"""The decoder in a file of a masked autoencoder goes in, the rules to read it by and its sizes come out.

Files of MAE's own code have our names. Hugging Face's have theirs, of its layers' parts too.
"""

from collections.abc import Mapping

from vitkit.checkpoints.mapping import SAME, Rule, Shapes, joined, same
from vitkit.core.errors import WeightsError
from vitkit.model.masked import AutoencoderConfig

HEADS = 16
"""Of MAE's decoders, where no config.json says how many there are."""
_LAYERS = ("decoder_blocks.", "decoder.decoder_layers.", "decoder.decoder_encoder.layer.")
"""What names of a decoder's layers begin with: MAE's, Hugging Face's published ones, and those that its v5 writes."""
_LAYER = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def decoder_settings(shapes: Shapes, config: Mapping[str, object], *, name: str) -> AutoencoderConfig | None:
    """What decoder is in a file, if one is; a file's `name` says where nothing else does what it was asked for.

    >>> decoder_settings({"decoder_embed.weight": (64, 32), "decoder_blocks.0.norm1.bias": (64,)}, {}, name="").depth
    1
    """
    prefix = "decoder." if "decoder.decoder_embed.weight" in shapes else ""
    if f"{prefix}decoder_embed.weight" not in shapes:
        return None
    start = _start(shapes)
    depth = len({key.removeprefix(start).partition(".")[0] for key in shapes if key.startswith(start)})
    heads, hidden = config.get("decoder_num_attention_heads", HEADS), config.get("mask_ratio", 0.75)
    # Those that MAE's authors drew pictures with were asked for pixels as they are.
    normalise = config.get("norm_pix_loss", False) if prefix else "visualize" not in name
    if not isinstance(heads, int) or not isinstance(hidden, int | float):
        raise WeightsError("config.json does not say what decoder it is", expected="numbers", got=f"{heads}, {hidden}")
    return AutoencoderConfig(
        width=shapes[f"{prefix}decoder_embed.weight"][0],
        depth=depth,
        heads=heads,
        hidden=float(hidden) or 0.75,  # files made to encode whole images say 0
        normalise=bool(normalise),
    )


def decoder_rules(shapes: Shapes, *, depth: int) -> list[Rule]:
    """How the tensors of a decoder are named and put together in a file."""
    hub = "decoder.decoder_embed.weight" in shapes
    prefix = "decoder." if hub else ""
    ends = ("weight", "bias")
    rules = [same(name, f"{prefix}{name}") for name in ("mask_token", "decoder_pos_embed")]
    dense = ("decoder_embed", "decoder_norm", "decoder_pred")
    rules += [same(f"{name}.{end}", f"{prefix}{name}.{end}") for name in dense for end in ends]
    for layer in range(depth):
        rules += _layer_rules(f"decoder_blocks.{layer}", f"{_start(shapes)}{layer}", ends=ends)
    return rules


def _start(shapes: Shapes) -> str:
    """What the names of a decoder's layers begin with in a file."""
    return next((start for start in _LAYERS if any(name.startswith(start) for name in shapes)), _LAYERS[0])


def _layer_rules(ours: str, theirs: str, *, ends: tuple[str, str]) -> list[Rule]:
    if theirs == ours:
        return [same(f"{ours}.{part}.{end}", f"{ours}.{part}.{end}") for part in ("attn.qkv", *_LAYER) for end in ends]
    parts = [f"{theirs}.attention.attention.{part}" for part in ("query", "key", "value")]
    rules = [
        Rule((f"{ours}.attn.qkv.{end}",), tuple(f"{part}.{end}" for part in parts), joined(SAME, 3)) for end in ends
    ]
    return rules + [
        same(f"{ours}.{part}.{end}", f"{theirs}.{name}.{end}") for part, name in _LAYER.items() for end in ends
    ]
