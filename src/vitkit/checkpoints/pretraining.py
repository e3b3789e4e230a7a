"""What was around an encoder to pre-train it goes in, two files beside the artefact come out; and the model from them.

`pretraining.safetensors` holds the mask token with the head or the decoder, `pretraining.json` what they are and the
checksum. The artefact is whole without them: they are there to see what the model makes of images; a
new run draws its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.checkpoints import foreign, native
from vitkit.checkpoints.files.guards import check_claims
from vitkit.checkpoints.files.guards import read_json as read_checked_json
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.files.writers import save_safetensors
from vitkit.checkpoints.formats.mae_decoder import decoder_rules, decoder_settings
from vitkit.checkpoints.hub import located
from vitkit.checkpoints.mapping import read
from vitkit.checkpoints.native import Artefact, check_header, read_tensors, write_json
from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.files import sha256
from vitkit.core.shapes import Tensor
from vitkit.model.masked import ENCODER, AutoencoderConfig, MaskedAutoencoder, MaskedConfig, MaskedPatches
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import create

WEIGHTS, DESCRIPTION = "pretraining.safetensors", "pretraining.json"
VERSION = 1

Settings = MaskedConfig | AutoencoderConfig
KINDS: dict[str, type[Settings]] = {"masked": MaskedConfig, "autoencoder": AutoencoderConfig}


@dataclass(frozen=True, kw_only=True)
class Around:
    """What stood around an encoder, by the names that it has in the whole."""

    settings: Settings
    state: dict[str, Tensor]


def save_pretraining(folder: Path | str, around: Around) -> None:
    """Write the files into the folder of an artefact; the description last, with the checksum of the weights."""
    folder = Path(folder)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in around.state.items()}
    save_safetensors(folder / WEIGHTS, state, {"format": "pt"})
    kind = next(kind for kind, cls in KINDS.items() if isinstance(around.settings, cls))
    said = {"version": VERSION, "objective": kind, "settings": to_mapping(around.settings)}
    write_json(folder / DESCRIPTION, said | {"sha256": sha256(folder / WEIGHTS)})


def has_pretraining(folder: Path | str) -> bool:
    """Whether a folder holds what was around its model."""
    return (Path(folder) / DESCRIPTION).is_file()


def load_around(folder: Path | str) -> Around:
    """Read the two files; one that is missing or changed is an error that names it."""
    folder = Path(folder)
    if not has_pretraining(folder):
        raise WeightsError(
            f"{folder}: nothing of a pre-training here",
            expected=f"{DESCRIPTION} beside the model",
            hint="name the folder of a run that learned without labels",
        )
    said = read_checked_json(folder / DESCRIPTION)
    try:
        version, kind, settings, recorded = (said[key] for key in ("version", "objective", "settings", "sha256"))
        if not isinstance(settings, Mapping) or int(version) > VERSION:
            raise ValueError(f"version {version}")
        check_claims(settings, where=folder / DESCRIPTION)
        read: Settings = from_mapping(KINDS[str(kind)], settings, where=f"{folder / DESCRIPTION}: settings.")
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder / DESCRIPTION}: not the description of a pre-training: {error}") from error
    if not (folder / WEIGHTS).is_file() or sha256(folder / WEIGHTS) != recorded:
        raise WeightsError(f"{folder / WEIGHTS}: missing or damaged", hint="copy it again, or train again")
    check_header(folder / WEIGHTS)
    return Around(settings=read, state=read_tensors(folder / WEIGHTS))


def load_pretraining(folder: Path | str) -> MaskedPatches | MaskedAutoencoder:
    """The whole model of pre-training in a folder: the artefact's encoder, and what was around it; ready to run."""
    return _whole(native.load(folder), load_around(folder), place=Path(folder))


def load_foreign_pretraining(path: Path | str) -> MaskedAutoencoder | None:
    """A masked autoencoder from a file of another origin, where its decoder is in it; None where it is not."""
    path = located(path)
    with open_tensors(path) as tensors:
        if foreign.identify(tensors).format.name not in ("mae", "huggingface-mae"):
            return None
        settings = decoder_settings(tensors.shapes, tensors.about.config, name=path.name)
        if settings is None:
            return None
        state = dict(read(decoder_rules(tensors.shapes, depth=settings.depth), tensors))
    whole = _whole(foreign.load(path), Around(settings=settings, state=state), place=path)
    assert isinstance(whole, MaskedAutoencoder)
    return whole


def _whole(artefact: Artefact, around: Around, *, place: Path) -> MaskedPatches | MaskedAutoencoder:
    """The encoder of an artefact with what was around it."""
    with torch.device("meta"):
        encoder = create(artefact.config)
        if not isinstance(encoder, ViT):
            raise WeightsError(f"{place}: a pre-training around a model that has no patches")
        model: MaskedPatches | MaskedAutoencoder
        if isinstance(around.settings, MaskedConfig):
            model = MaskedPatches(encoder, around.settings)
        else:
            model = MaskedAutoencoder(encoder, around.settings)
    state = {f"{ENCODER}{name}": tensor for name, tensor in artefact.state.items()} | around.state
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise WeightsError(f"{place}: what was around the encoder is of another model: {first[:300]}") from error
    return model.eval()


def pretraining_beside(model: Path | str) -> MaskedPatches | MaskedAutoencoder | None:
    """The whole model of pre-training at the place of a model, or None where only the model is there."""
    if has_pretraining(model):
        return load_pretraining(model)
    return None if native.is_ours(located(model)) else load_foreign_pretraining(model)
