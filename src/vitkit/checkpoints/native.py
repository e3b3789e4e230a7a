"""A model with its preprocessing and labels goes in, a folder with all of it and its checksums comes out, and back.

An artefact is `model.safetensors`, `config.json`, `preprocessor_config.json`, `labels.json`, `reference.json` (what the
model answers to a drawn image), a model card `README.md` and `checksums.json`. Nothing in it is pickled, and nothing is
loaded whose checksum is not right. Where timm can compute the model, the weights have timm's names and `config.json` is
timm's, so that timm and transformers load the folder too; ours is under its key "vitkit".
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch

from vitkit.checkpoints.card import model_card
from vitkit.checkpoints.files.guards import check_claims, open_file, read_value
from vitkit.checkpoints.files.guards import read_json as read_checked_json
from vitkit.checkpoints.files.safetensors import read_header
from vitkit.checkpoints.files.writers import save_safetensors
from vitkit.checkpoints.formats.timm import TIMM
from vitkit.checkpoints.formats.timm_config import timm_config
from vitkit.checkpoints.mapping import SAME, Rule, read, write
from vitkit.checkpoints.reference import answers
from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.files import as_text, sha256, write_text
from vitkit.core.shapes import Tensor
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import Model, create
from vitkit.zoo.variants import ModelConfig

WEIGHTS, CONFIG, PREPROCESSING = "model.safetensors", "config.json", "preprocessor_config.json"
LABELS, REFERENCE, CARD, CHECKSUMS = "labels.json", "reference.json", "README.md", "checksums.json"
FILES = (WEIGHTS, CONFIG, PREPROCESSING, LABELS, REFERENCE)
"""What is not loaded when it has changed. The card is the user's to write on."""
FIRST_FILES = (WEIGHTS, CONFIG, PREPROCESSING, LABELS)
"""What an artefact of version 1 had."""
VERSION = 2
KINDS: dict[str, type[ModelConfig]] = {"vit": ViTConfig, "bit": BiTConfig}


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A trained model, what it must be fed, and what its answers mean."""

    name: str
    config: ModelConfig
    state: dict[str, Tensor]
    preprocessing: Preprocessing
    labels: tuple[str, ...]

    def model(self) -> Model:
        """The model, ready to run."""
        made = create(self.config, device="meta")
        made.load_state_dict(self.state, strict=True, assign=True)
        return made.eval()


# Saving


def save(folder: Path | str, artefact: Artefact) -> None:
    """Write the files of an artefact into a folder, the checksums last: without them the rest is not one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHECKSUMS).unlink(missing_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in artefact.state.items()}
    artefact = replace(artefact, state=state)
    timms, refused = timm_description(artefact)
    renames = [] if refused else differing(TIMM.rules(artefact.config, None))
    _save_weights(folder / WEIGHTS, dict(write(renames, state)) | _untouched(renames, state))
    write_json(folder / CONFIG, timms | {"vitkit": _description(artefact, names="timm" if renames else "vitkit")})
    write_json(folder / PREPROCESSING, artefact.preprocessing.to_hub())
    write_json(folder / LABELS, list(artefact.labels))
    write_json(folder / REFERENCE, reference(artefact))
    card = model_card(
        name=artefact.name,
        config=artefact.config,
        preprocessing=artefact.preprocessing,
        labels=artefact.labels,
        timm_refuses=refused,
    )
    write_text(folder / CARD, card)
    write_checksums(folder, (*FILES, CARD))


def timm_description(artefact: Artefact) -> tuple[dict[str, object], str | None]:
    """The part of config.json that timm and transformers read, and why timm cannot compute the model, or None.

    Without an architecture neither of the two takes the folder for one of theirs.
    """
    config = artefact.config
    labels: dict[str, object] = {"label_names": list(artefact.labels)}
    try:
        refused = TIMM.refuses(config)
        timms: dict[str, object] = {} if refused else timm_config(config)
    except WeightsError as error:
        refused, timms = error.message, {}
    if refused:
        return {"num_classes": config.classes} | labels, refused
    args, pretrained = timms["model_args"], timms["pretrained_cfg"]
    assert isinstance(args, dict)
    assert isinstance(pretrained, dict)
    # transformers gives timm the classes itself, and may not give them twice; nor does it pass on what is null.
    args = {key: 0.0 if value is None else value for key, value in args.items() if key != "num_classes"}
    return timms | {"model_args": args, "pretrained_cfg": pretrained | timm_preprocessing(artefact)} | labels, None


def timm_preprocessing(artefact: Artefact) -> dict[str, object]:
    """What timm's `pretrained_cfg` can say of the preprocessing, and of the layers that another task replaces.

    timm always resizes with antialias: of the paper's own resizing it can say the size and the filter alone.
    """
    config, how = artefact.config, artefact.preprocessing
    said: dict[str, object] = {
        "mean": np.broadcast_to(how.mean, how.channels).tolist(),
        "std": np.broadcast_to(how.deviation, how.channels).tolist(),
        "interpolation": how.filter,
        "crop_pct": 1.0 if how.resize == "squash" else how.crop_share,
        "crop_mode": "center" if how.resize == "crop" else "squash",
    }
    if isinstance(config, ViTConfig):
        said["fixed_input_size"] = config.positions.is_additive
    if config.classes:
        classifier = ["head", "head_dist"] if isinstance(config, ViTConfig) and config.tokens.distillation else "head"
        said["classifier"] = classifier if isinstance(config, ViTConfig) else "head.fc"
    if config.channels == 3 and isinstance(config, ViTConfig) and config.backbone is None:
        said["first_conv"] = "patch_embed.proj"  # for others timm would take the weights for those of three channels
    return said


def differing(rules: Sequence[Rule]) -> list[Rule]:
    """The rules that do more than keep a name: most models have none, and their file is ours as it is."""
    return [rule for rule in rules if rule.layout is not SAME or rule.ours != rule.theirs]


def reference(artefact: Artefact) -> dict[str, object]:
    """What the model answers to the drawn image, to compare with wherever it is loaded; null if it is not finite."""
    logits = answers(artefact.model().float())[0].tolist()
    return {"image": "drawn, 1", "logits": logits if all(map(math.isfinite, logits)) else None}


def _description(artefact: Artefact, *, names: str) -> dict[str, object]:
    kind = next(kind for kind, cls in KINDS.items() if isinstance(artefact.config, cls))
    about = {"version": VERSION, "name": artefact.name, "kind": kind, "names": names}
    return about | {"model": to_mapping(artefact.config)}


def _save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_safetensors(path, tensors, {"format": "pt"})
    except WeightsError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # a full disk is named by whoever chose the folder
        raise


def _untouched(renames: Sequence[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    claimed = {name for rule in renames for name in rule.ours}
    return {name: tensor for name, tensor in state.items() if name not in claimed}


# Loading


def is_ours(path: Path | str) -> bool:
    """Whether a folder holds an artefact of ours, or the remains of one: then no other format may read it.

    Without checksums its weights may be of another model than its config.json, and timm's names would not show it.
    """
    path = Path(path)
    if (path / CHECKSUMS).is_file():
        return True
    if not (path / CONFIG).is_file():
        return False
    try:
        found = read_checked_json(path / CONFIG)
    except WeightsError:  # whoever reads it next says what is wrong with it
        return False
    return "vitkit" in found or found.get("format") == "vitkit"


def load(folder: Path | str) -> Artefact:
    """Read the artefact in a folder; a missing or changed file is an error that names it."""
    folder = Path(folder)
    if not (folder / CHECKSUMS).is_file():
        raise WeightsError(
            f"{folder}: no trained model here",
            expected=f"a folder with {CHECKSUMS} and {WEIGHTS}",
            got=_what_is_there(folder),
            hint="name the folder that was --out of a finished run",
        )
    recorded = read_value(folder / CHECKSUMS)
    is_first = isinstance(recorded, Mapping) and REFERENCE not in recorded
    check_checksums(folder, FIRST_FILES if is_first else FILES)
    check_header(folder / WEIGHTS)
    try:
        whole = read_checked_json(folder / CONFIG)
        description = whole.get("vitkit", whole)  # version 1 had it at the top
        version, names = int(description.get("version", 1)), str(description.get("names", "vitkit"))
        kind, name, fields = str(description["kind"]), str(description["name"]), description["model"]
        if version > VERSION:
            raise WeightsError(f"{folder}: written by a later vitkit", expected=VERSION, got=version, hint="update it")
        check_claims(fields, where=folder / CONFIG)
        config: ModelConfig = from_mapping(KINDS[kind], fields, where=f"{folder / CONFIG}: model.")
        labels = read_labels(folder / LABELS, classes=config.classes)
        fed = read_checked_json(folder / PREPROCESSING)
        check_claims(fed, where=folder / PREPROCESSING)
        preprocessing = Preprocessing.from_hub(fed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{folder / CONFIG}: not the description of a vitkit model: {error}") from error
    return Artefact(
        name=name,
        config=config,
        state=_read_weights(folder / WEIGHTS, config, names=names),
        preprocessing=preprocessing,
        labels=labels,
    )


def check_header(path: Path) -> None:
    """Refuse a file of weights that lies of itself: whoever wrote it could write its checksum too."""
    with open_file(path) as file:
        read_header(file, path=path)


def read_labels(path: Path, *, classes: int) -> tuple[str, ...]:
    """The names of the classes."""
    labels = read_value(path)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels) or len(labels) != classes:
        got = f"{len(labels):,}" if isinstance(labels, list) else type(labels).__name__
        raise WeightsError(f"{path}: not the names of the model's classes", expected=f"{classes:,} names", got=got)
    return tuple(map(as_text, labels))


def stored_reference(folder: Path | str) -> list[float] | None:
    """What the model in a folder answered to the drawn image when it was saved; None if that is not known."""
    path = Path(folder) / REFERENCE
    if not path.is_file():
        return None
    content = read_json(path)
    logits = content.get("logits") if isinstance(content, Mapping) else None
    if logits is None:
        return None
    if not isinstance(logits, list) or not all(type(number) in (int, float) for number in logits):
        raise WeightsError(f"{path}: not the answers of a model", expected="a list of numbers under logits")
    return [float(number) for number in logits]


def _read_weights(path: Path, config: ModelConfig, *, names: str) -> dict[str, Tensor]:
    tensors = read_tensors(path)
    if names != "timm":
        return tensors
    renames = differing(TIMM.rules(config, None))
    try:
        found = dict(read(renames, tensors))
    except KeyError as error:
        raise WeightsError(f"{path}: has no {error.args[0]}", hint="it is of another model") from error
    claimed = {name for rule in renames for name in rule.theirs}
    return {name: tensor for name, tensor in tensors.items() if name not in claimed} | found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error


def write_json(path: Path, value: object) -> None:
    """Write a file of JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """What a file of JSON holds."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not a JSON file: {error}") from error


def write_checksums(folder: Path, names: tuple[str, ...]) -> None:
    """Write down what the files are, after all of them: their presence says that they are whole."""
    write_json(folder / CHECKSUMS, {name: sha256(folder / name) for name in names})


def check_checksums(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse a folder of which a file is missing, or is not what was written."""
    recorded = read_json(folder / CHECKSUMS)
    if not isinstance(recorded, Mapping):
        raise WeightsError(f"{folder / CHECKSUMS}: not a list of checksums")
    for name in names:
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            raise WeightsError(f"{path}: missing or unreadable", hint="the folder is not complete") from error
        if found != recorded.get(name):
            raise WeightsError(
                f"{path}: damaged",
                expected=f"SHA-256 {str(recorded.get(name))[:12]}…",
                got=f"{found[:12]}…",
                hint="copy it again, or train again",
            )


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "no such folder"
    if not folder.is_dir():
        return "a file"
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "an empty folder"
