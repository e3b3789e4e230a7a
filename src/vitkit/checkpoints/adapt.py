"""Weights of one model and the configuration of another go in, weights that fit the other come out, with what changed.

Fine-tuning removes the whole pre-trained head, attaches a zero-initialised one, and interpolates position embeddings
to the new grid by their place in the original image (section 3.2). Patches of another size, other channels and another
pooling are possible too; what else differs is an error.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vitkit.checkpoints.patch_kernels import resize_kernel, spread_channels
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor, pair
from vitkit.model.config import ViTConfig
from vitkit.model.resample import Origin, resample_grid, resample_positions
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig

HEAD = ("head.", "pre_logits.")
FIRST_KERNELS = ("patch_embed.proj.weight", "patch_embed.backbone.stem.conv.weight", "stem.conv.weight")


@dataclass(frozen=True)
class Adapted:
    """Weights that fit, and in words what was done to them."""

    state: dict[str, Tensor]
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The names of the old classes and of the new: what both know is carried over."""

    old: tuple[str, ...]
    new: tuple[str, ...]


def adapt(
    state: Mapping[str, Tensor],
    *,
    old: ModelConfig,
    new: ModelConfig,
    new_head: bool = False,
    labels: Labels | None = None,
    origin: Origin | None = None,
    generator: torch.Generator | None = None,
) -> Adapted:
    """Weights for the model `new`, made of those of the model `old`; what cannot be made to fit is an error.

    The head is kept where it fits, and else new; with `labels`, classes of the same name keep their weights.
    `origin` names the kernel that resamples positions; None is the one that the old model names.

    >>> from vitkit.zoo.lookup import configure
    >>> old, new = (configure("Ti/16", image_size=side, classes=side) for side in (32, 48))
    >>> adapt(create(old).state_dict(), old=old, new=new).changes
    ('position embeddings: grid 2×2 → 3×3', 'head: new, for 48 classes instead of 32')
    """
    work = _Work(state, old, new, new_head=new_head, labels=labels, origin=origin, generator=generator)
    adapted = {name: work.tensor(name, shape) for name, shape in work.wanted.items()}
    work.refuse_left_over()
    return Adapted(adapted, tuple(work.changes()))


class _Work:
    """What is needed to fit one tensor after the other."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        old: ModelConfig,
        new: ModelConfig,
        *,
        new_head: bool,
        labels: Labels | None,
        origin: Origin | None,
        generator: torch.Generator | None,
    ) -> None:
        self.state, self.old, self.new, self.origin = state, old, new, origin
        self.wanted = {name: tensor.shape for name, tensor in create(new, device="meta").state_dict().items()}
        # A model of one layer has every tensor that may have to be made anew, and takes no time to draw.
        self.fresh = create(_one_layer(new), generator=generator).state_dict()
        heads = [{name: shape for name, shape in shapes.items() if name.startswith(HEAD)} for shapes in self._shapes()]
        self.labels = labels if labels and _is_linear(heads) and not new_head else None
        self.head_is_new = new_head or (heads[0] != heads[1] and self.labels is None)

    def _shapes(self) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
        return {name: tensor.shape for name, tensor in self.state.items()}, dict(self.wanted)

    @property
    def grids(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The old and the new grid, where there are grids and they differ."""
        if isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig) and self.old.grid != self.new.grid:
            return self.old.grid, self.new.grid
        return None

    @property
    def pooling(self) -> tuple[str, str] | None:
        """The old and the new pooling, where one reads the class token and the other the mean over patches."""
        if not (isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig)):
            return None
        kinds = (self.old.pooling, self.new.pooling)
        return kinds if set(kinds) == {"class", "mean"} else None

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """The new model's tensor of this name."""
        if name.startswith(HEAD) and self.head_is_new:
            return self.fresh[name]
        if name == "cls_token" and name not in self.state and self.pooling:
            return self.fresh[name]
        if name not in self.state:
            raise WeightsError(f"the weights have no {name}", hint=_family(self.old, self.new))
        tensor = self._moved(name, self.state[name])
        if tensor.shape != shape:
            raise WeightsError(
                f"{name} does not fit the model",
                expected=" × ".join(map(str, shape)),
                got=" × ".join(map(str, tensor.shape)),
                hint=_family(self.old, self.new),
            )
        return tensor.clone() if tensor is self.state[name] else tensor

    def _moved(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor after everything that is to be done to it."""
        if name.startswith("head.") and self.labels:
            return _by_name(tensor, self.fresh[name], self.labels)
        if name in FIRST_KERNELS:
            tensor = spread_channels(tensor, self.new.channels) if name == self._reads_the_image() else tensor
            return self._resized(name, tensor)
        if "pos_embed" in name and isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig):
            return self._positions(name, tensor, self.old, self.new)
        return tensor

    def _reads_the_image(self) -> str:
        """The kernel that is laid over the image itself."""
        return next(name for name in reversed(FIRST_KERNELS) if name in self.wanted)

    def _resized(self, name: str, kernel: Tensor) -> Tensor:
        old, new = self.old, self.new
        if name != "patch_embed.proj.weight" or not (isinstance(old, ViTConfig) and isinstance(new, ViTConfig)):
            return kernel
        return resize_kernel(kernel, pair(new.patch_size))

    def _positions(self, name: str, table: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
        """One position table on the new grid, with a row for the class token or without."""
        if old.positions.kind == "sincos_2d":
            # A formula, evaluated on the new grid; the same in all layers.
            return self.fresh[re.sub(r"^layer_pos_embed\.\d+", "layer_pos_embed.0", name)]
        origin = self.origin or old.positions.origin
        if axis := re.search(r"\.(x|y)$", name):
            side = 1 if axis[1] == "x" else 0
            return resample_grid(table, old=(1, old.grid[side]), new=(1, new.grid[side]), origin=origin)
        if name.endswith(".prefix"):
            return table
        if old.grid != new.grid:
            table = resample_positions(table, prefix=old.placed_prefix, old=old.grid, new=new.grid, origin=origin)
        if old.placed_prefix > new.placed_prefix:
            return table[:, old.placed_prefix - new.placed_prefix :]
        rows = new.placed_prefix - old.placed_prefix
        return torch.cat([table.new_zeros(1, rows, table.shape[2]), table], dim=1) if rows else table

    def refuse_left_over(self) -> None:
        """Refuse weights that the new model has no place for."""
        gone = {"cls_token"} if self.pooling else set()
        extra = [
            name
            for name in self.state
            if name not in self.wanted and name not in gone and not (self.head_is_new and name.startswith(HEAD))
        ]
        if extra:
            message = f"the model has no place for {extra[0]} and {len(extra) - 1} more"
            raise WeightsError(message, hint=_family(self.old, self.new))

    def changes(self) -> Iterator[str]:
        """What was done, in words."""
        old, new = self.old, self.new
        sizes = [pair(config.patch_size) for config in (old, new) if isinstance(config, ViTConfig)]
        if len(set(sizes)) == 2:
            yield "patch embedding: patches of {}×{} → {}×{}".format(*sizes[0], *sizes[1])
        if old.channels != new.channels:
            anew = ", and standardised anew: answers change" if self._reads_the_image() != FIRST_KERNELS[0] else ""
            yield f"first kernel: {old.channels} channels → {new.channels}{anew}"
        if self.grids:
            yield "position embeddings: grid {}×{} → {}×{}".format(*self.grids[0], *self.grids[1])
        if self.pooling:
            token = "its token is left out" if self.pooling[0] == "class" else "its token is new, and zero"
            yield f"pooling: {self.pooling[0]} → {self.pooling[1]}; {token}"
        if self.head_is_new:
            yield f"head: new, for {new.classes} classes instead of {old.classes}"
        elif self.labels and self.labels.old != self.labels.new:
            kept = len(set(self.labels.old) & set(self.labels.new))
            yield f"head: {kept} of {new.classes} classes kept by name, the others new, and zero"


def _one_layer(config: ModelConfig) -> ModelConfig:
    return replace(config, depth=1) if isinstance(config, ViTConfig) else config


def _is_linear(heads: Sequence[Mapping[str, torch.Size]]) -> bool:
    """Whether both heads are a plain linear layer on features of one width."""
    return all(head.keys() == {"head.weight", "head.bias"} for head in heads) and (
        heads[0]["head.weight"][1:] == heads[1]["head.weight"][1:]
    )


def _by_name(old: Tensor, fresh: Tensor, labels: Labels) -> Tensor:
    """The rows of classes that both know, and fresh ones for the others."""
    row = {name: number for number, name in enumerate(labels.old)}
    return torch.stack([old[row[name]] if name in row else fresh[number] for number, name in enumerate(labels.new)])


def _family(old: ModelConfig, new: ModelConfig) -> str:
    """A hint: in what the two models differ."""
    differing = [
        f"{field} {getattr(old, field)} against {getattr(new, field, 'none')}"
        for field in vars(old)
        if field not in ("classes", "image_size") and getattr(old, field) != getattr(new, field, None)
    ]
    return f"the weights are of another model: {', '.join(differing)[:200]}" if differing else "the file is incomplete"
