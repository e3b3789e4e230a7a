"""A model goes in, a file or folder of any format comes out, which that format's own library loads.

Tensors are made one at a time while the file is written, so that memory holds one copy of the weights and one tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vitkit.checkpoints import native
from vitkit.checkpoints.files.readers import save_npz, save_safetensors, save_torch
from vitkit.checkpoints.formats.format import Format
from vitkit.checkpoints.formats.huggingface import FAMILIES, hub_config
from vitkit.checkpoints.mapping import Rule
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.model.config import ViTConfig

CONTAINERS = {"deit": "model", "mae": "model"}
"""The key under which Facebook's files hold their tensors."""
WEIGHTS = "model.safetensors"


class Rewritten(Mapping[str, Tensor]):
    """The tensors of a model under a format's names, each made when it is asked for."""

    def __init__(self, rules: Sequence[Rule], state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.places = {name: (rule, number) for rule in rules for number, name in enumerate(rule.theirs)}

    def __getitem__(self, name: str) -> Tensor:
        rule, number = self.places[name]
        return rule.layout.write([self.state[ours] for ours in rule.ours])[number].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def write_as(to: Format, out: Path | str, artefact: Artefact) -> None:
    """Write a model in a format: to a file, or for timm and Hugging Face to a folder with its configuration."""
    out = Path(out)
    if reason := to.refuses(artefact.config):
        raise WeightsError(f"{to.title} cannot hold this model: {reason}", hint="vitkit weights adapt may change it")
    tensors = Rewritten(to.rules(artefact.config, None), artefact.state)
    if to.writes == "npz":
        save_npz(out, tensors)
    elif to.writes == "torch":
        save_torch(out, tensors, CONTAINERS.get(to.name))
    else:
        write_folder(to, out, artefact, tensors)


def write_folder(to: Format, out: Path, artefact: Artefact, tensors: Mapping[str, Tensor]) -> None:
    """A folder that the library itself loads: weights, configuration, preprocessing."""
    if out.suffix == ".safetensors":
        raise WeightsError(
            f"{out}: {to.title} says in config.json what its tensors do not", hint="name a folder instead"
        )
    if to.name in FAMILIES and isinstance(artefact.config, ViTConfig):
        config = hub_config(artefact.config, artefact.labels, to=to)
    else:
        config, _ = native.timm_description(artefact)
    out.mkdir(parents=True, exist_ok=True)
    save_safetensors(out / WEIGHTS, tensors, {"format": "pt"})
    native.write_json(out / native.CONFIG, config)
    native.write_json(out / native.PREPROCESSING, artefact.preprocessing.to_hub())
