"""A model with its preprocessing and labels goes in, a folder with all of it and its checksums comes out, and back.

An artefact is `model.safetensors`, `config.json`, `preprocessor_config.json`, `labels.json` and `checksums.json`.
Nothing in it is pickled, and nothing is loaded whose checksum is not right.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.files import sha256, write_bytes, write_text
from vitkit.core.shapes import Tensor
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import Model, create
from vitkit.zoo.variants import ModelConfig

WEIGHTS, CONFIG, PREPROCESSING = "model.safetensors", "config.json", "preprocessor_config.json"
LABELS, CHECKSUMS = "labels.json", "checksums.json"
FILES = (WEIGHTS, CONFIG, PREPROCESSING, LABELS)
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


def save(folder: Path | str, artefact: Artefact) -> None:
    """Write the files of an artefact into a folder, the checksums last: without them the rest is not one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHECKSUMS).unlink(missing_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in artefact.state.items()}
    kind = next(kind for kind, cls in KINDS.items() if isinstance(artefact.config, cls))
    description = {"format": "vitkit", "version": 1, "name": artefact.name, "kind": kind}
    write_bytes(folder / WEIGHTS, safetensors.torch.save(state, metadata={"format": "pt"}))
    write_json(folder / CONFIG, description | {"model": to_mapping(artefact.config)})
    write_json(folder / PREPROCESSING, artefact.preprocessing.to_hub())
    write_json(folder / LABELS, list(artefact.labels))
    write_checksums(folder, FILES)


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
    check_checksums(folder, FILES)
    description = read_json(folder / CONFIG)
    try:
        kind, name, fields = str(description["kind"]), str(description["name"]), description["model"]
        config: ModelConfig = from_mapping(KINDS[kind], fields, where=f"{folder / CONFIG}: model.")
        labels = tuple(map(str, read_json(folder / LABELS)))
        preprocessing = Preprocessing.from_hub(read_json(folder / PREPROCESSING))
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / CONFIG}: not the description of a vitkit model: {error}") from error
    return Artefact(
        name=name,
        config=config,
        state=read_tensors(folder / WEIGHTS),
        preprocessing=preprocessing,
        labels=labels,
    )


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
