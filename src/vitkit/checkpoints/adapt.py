"""Weights of one model and the configuration of another go in, weights that fit the other come out, with what changed.

Fine-tuning removes the whole pre-trained head, attaches a zero-initialised one, and interpolates position embeddings
to the new grid by their place in the original image (section 3.2). Patches of another size, other channels and another
pooling are possible too; what else differs is an error, or told.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from vitkit.checkpoints.compare import differing, flat
from vitkit.checkpoints.native import Artefact
from vitkit.checkpoints.patch_kernels import refeed, resize_kernel, spread_channels
from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Size, Tensor, pair
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.resample import Origin, resample_grid
from vitkit.zoo.lookup import configure, create
from vitkit.zoo.variants import ModelConfig

HEAD = ("head.", "pre_logits.")
PATCHES, PATCH_BIAS = "patch_embed.proj.weight", "patch_embed.proj.bias"
FIRST_KERNELS = (PATCHES, "patch_embed.backbone.stem.conv.weight", "stem.conv.weight")
TOLD_APART = (
    *("image_size", "patch_size", "channels", "classes", "pooling"),
    *("tokens.class_token", "positions.covers", "head.pre_logits"),
)
"""Settings that have words of their own where they change."""
SILENT = ("dropout.", "head.bias", "positions.origin")
"""Settings that matter in training, at the start of it or at another image size, and not to the answers of now."""


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


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How images were prepared for the old model and are for the new: grey pictures keep their answers through it."""

    old: Preprocessing
    new: Preprocessing


def adapt(
    state: Mapping[str, Tensor],
    *,
    old: ModelConfig,
    new: ModelConfig,
    new_head: bool = False,
    labels: Labels | None = None,
    feeding: Feeding | None = None,
    origin: Origin | None = None,
    generator: torch.Generator | None = None,
) -> Adapted:
    """Weights for the model `new`, made of those of the model `old`; what cannot be made to fit is an error.

    The head is kept where it fits, and else new; with `labels`, classes of the same name keep their weights.
    With `feeding`, other channels keep the answer to grey pictures; without it, that to images of equal channels.
    `origin` names the kernel that resamples positions; None is the one that the old model names.

    >>> from vitkit.zoo.lookup import configure
    >>> old, new = (configure("Ti/16", image_size=side, classes=side) for side in (32, 48))
    >>> adapt(create(old).state_dict(), old=old, new=new).changes
    ('position embeddings: grid 2×2 → 3×3', 'head: new, for 48 classes instead of 32')
    """
    work = _Work(state, old, new, new_head=new_head, labels=labels, feeding=feeding, origin=origin, generator=generator)
    adapted = {name: work.tensor(name, shape) for name, shape in work.wanted.items()}
    work.refuse_left_over()
    return Adapted(adapted, tuple(work.changes()))


# What the model is fed


def fed(old: Preprocessing, config: ModelConfig) -> Preprocessing:
    """The preprocessing at the size and for the channels of a model, all else as it was.

    Of three channels and more those that stay keep their mean and deviation, and new ones have the mean of these. One
    number stands for all where channels are summed or spread.

    >>> colours = Preprocessing(mean=(0.4, 0.5, 0.6))
    >>> [fed(colours, configure("Ti/16", channels=channels)).mean for channels in (1, 4)]
    [(0.5,), (0.4, 0.5, 0.6, 0.5)]
    """
    found = old if pair(old.image_size) == pair(config.image_size) else replace(old, image_size=config.image_size)
    if config.channels == found.channels:
        return found
    mean, deviation = (
        _for_channels(numbers, found.channels, config.channels) for numbers in (found.mean, found.deviation)
    )
    return replace(found, channels=config.channels, mean=mean, deviation=deviation)


def _for_channels(numbers: tuple[float, ...], old: int, new: int) -> tuple[float, ...]:
    usual = (sum(numbers) / len(numbers),)
    if len(numbers) == 1 or min(old, new) < 3:
        return usual
    return (*numbers[:new], *usual * (new - old))


def fed_changes(feeding: Feeding) -> list[str]:
    """What became of the preprocessing, in words."""
    old, new = feeding.old, feeding.new
    changes = []
    if pair(old.image_size) != pair(new.image_size):
        changes.append("preprocessing: images of {}×{} → {}×{}".format(*pair(old.image_size), *pair(new.image_size)))
    if old.channels != new.channels:
        how = "of one mean and deviation" if len(new.mean) == 1 else "each of its own mean and deviation"
        changes.append(f"preprocessing: {old.channels} channels → {new.channels}, {how}")
    return changes


def with_channels(artefact: Artefact, channels: int) -> tuple[Artefact, tuple[str, ...]]:
    """The model for images of other channels, with its preprocessing, and in words what was done.

    >>> config = configure("Ti/16", image_size=32, classes=2)
    >>> feeding, state = Preprocessing(image_size=32), create(config).state_dict()
    >>> colours = Artefact(name="Ti/16", config=config, state=state, preprocessing=feeding, labels=("cat", "dog"))
    >>> grey, changes = with_channels(colours, 1)
    >>> grey.config.channels, grey.preprocessing.channels, changes[0]
    (1, 1, 'first kernel: 3 channels → 1')
    """
    return _changed(artefact, configure(artefact.config, channels=channels))


def with_image_size(artefact: Artefact, image_size: Size) -> tuple[Artefact, tuple[str, ...]]:
    """The model for images of another size, with its preprocessing, and in words what was done.

    >>> config = configure("Ti/16", image_size=32, classes=2)
    >>> feeding, state = Preprocessing(image_size=32), create(config).state_dict()
    >>> small = Artefact(name="Ti/16", config=config, state=state, preprocessing=feeding, labels=("cat", "dog"))
    >>> large, changes = with_image_size(small, 64)
    >>> large.config.grid, large.preprocessing.image_size
    ((4, 4), 64)
    """
    return _changed(artefact, configure(artefact.config, image_size=image_size))


def _changed(artefact: Artefact, config: ModelConfig) -> tuple[Artefact, tuple[str, ...]]:
    feeding = Feeding(old=artefact.preprocessing, new=fed(artefact.preprocessing, config))
    # Nothing is drawn: every tensor comes from one that is there.
    fitted = adapt(artefact.state, old=artefact.config, new=config, feeding=feeding, generator=torch.Generator())
    made = replace(artefact, config=config, state=fitted.state, preprocessing=feeding.new)
    return made, (*fitted.changes, *fed_changes(feeding))


# One tensor after the other


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
        feeding: Feeding | None,
        origin: Origin | None,
        generator: torch.Generator | None,
    ) -> None:
        self.state, self.old, self.new, self.feeding, self.origin = state, old, new, feeding, origin
        self.wanted = {name: tensor.shape for name, tensor in create(new, device="meta").state_dict().items()}
        # A model of one layer has every tensor that may have to be made anew, and takes no time to draw.
        self.fresh = create(_one_layer(new), generator=generator).state_dict()
        heads = [{name: shape for name, shape in shapes.items() if name.startswith(HEAD)} for shapes in self._shapes()]
        self.labels = labels if labels and _rows_are_classes(*heads) and not new_head else None
        self.head_is_new = new_head or (heads[0] != heads[1] and self.labels is None)
        if self.labels and (len(self.labels.old), len(self.labels.new)) != (old.classes, new.classes):
            expected = f"{old.classes} and {new.classes} labels"
            got = f"{len(self.labels.old)} and {len(self.labels.new)}"
            raise WeightsError("the labels are not those of the models", expected=expected, got=got)

    def _shapes(self) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
        return {name: tensor.shape for name, tensor in self.state.items()}, dict(self.wanted)

    @property
    def grids(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The old and the new grid, where there are grids and they differ."""
        if isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig) and self.old.grid != self.new.grid:
            return self.old.grid, self.new.grid
        return None

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """The new model's tensor of this name."""
        if name.startswith(HEAD) and self.head_is_new:
            return self.fresh[name]
        if name == "dist_token" and name not in self.state:
            return self.fresh[name]  # a student's second token learns from its teacher
        if name == "cls_token" and not _has_class_token(self.old):
            return self.fresh[name]  # zeros
        if name.endswith(".prefix") and not _placed(self.old):
            return torch.zeros(shape)
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
        if name in (*FIRST_KERNELS, PATCH_BIAS):
            return self._over_the_image(name, tensor)
        if isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig):
            if "pos_embed" in name:
                return self._positions(name, tensor, self.old, self.new)
            if name.startswith("relative."):
                return self._relative(name, tensor, self.old, self.new)
            if name in _placed(self.old) and name not in _placed(self.new):
                return self._with_its_place(name, tensor, self.old)
        return tensor

    # The kernel

    def _reads_the_image(self) -> str:
        """The kernel that is laid over the image itself."""
        return next(name for name in reversed(FIRST_KERNELS) if name in self.wanted)

    def _over_the_image(self, name: str, tensor: Tensor) -> Tensor:
        """A first kernel, or the bias under it, for patches of the new size and for the new channels."""
        kernel = self._resized(name, tensor)
        if self.old.channels == self.new.channels or self._reads_the_image() not in (name, PATCHES):
            return kernel
        if self.feeding is None or self._reads_the_image() != PATCHES:
            return kernel if name == PATCH_BIAS else spread_channels(kernel, self.new.channels)
        whole = self._resized(PATCHES, self.state[PATCHES])
        kernel, gain = refeed(whole, old=self.feeding.old, new=self.feeding.new)
        return kernel if name == PATCHES else (tensor.double() + gain).to(tensor.dtype)

    def _resized(self, name: str, kernel: Tensor) -> Tensor:
        old, new = self.old, self.new
        if name != PATCHES or not (isinstance(old, ViTConfig) and isinstance(new, ViTConfig)):
            return kernel
        return resize_kernel(kernel, pair(new.patch_size))

    # Positions

    def _positions(self, name: str, table: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
        """One position table on the new grid, with a row for each token that has one in the new model."""
        before, after = _placed(old), _placed(new)
        if (before, old.grid, old.positions.kind) == (after, new.grid, new.positions.kind):
            return table
        if new.positions.kind == "sincos_2d":
            # A formula, evaluated on the new grid; the same in all layers.
            return self.fresh[re.sub(r"^layer_pos_embed\.\d+", "layer_pos_embed.0", name)]
        origin = self.origin or old.positions.origin
        if axis := re.search(r"\.(x|y)$", name):
            side = 1 if axis[1] == "x" else 0
            return resample_grid(table, old=(1, old.grid[side]), new=(1, new.grid[side]), origin=origin)
        known = dict(zip(before, table.split(1, dim=1), strict=False))
        nothing = table.new_zeros(1, 1, table.shape[2])
        rows = [known.get(token, nothing) for token in after]
        if name.endswith(".prefix"):
            return torch.cat(rows, dim=1)
        grid = resample_grid(table[:, len(before) :], old=old.grid, new=new.grid, origin=origin)
        return torch.cat([*rows, grid], dim=1)

    def _relative(self, name: str, table: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
        """One table of relative positions: it stays, but for the three rows of tokens that have no place."""
        if self.grids:
            raise WeightsError(
                f"relative positions cannot be resampled: {name} counts along rows of {old.grid[1]} patches",
                expected="a grid of {}×{}".format(*old.grid),
                got="{}×{}".format(*new.grid),
                hint="an offset of 14 is one row down only where rows have 14 patches; keep image and patch size",
            )
        if not new.prefix:
            return table[: 2 * new.patches - 1] if old.prefix else table
        return table if old.prefix else torch.cat([table, table.new_zeros(3, table.shape[1])])

    def _with_its_place(self, name: str, token: Tensor, old: ViTConfig) -> Tensor:
        """A token that has no row of its own any more, and had one: what the row added is added now."""
        if old.positions.place != "stem":
            message = f"{name} has a position at every layer, which the model would leave out"
            raise WeightsError(message, hint="keep positions.covers=all")
        if old.positions.kind == "sincos_2d":
            return token  # its row is zero
        rows = self.state["pos_embed.prefix" if old.positions.kind == "learned_2d" else "pos_embed"]
        number = _placed(old).index(name)
        return token + rows[:, number : number + 1]

    # What was done

    def refuse_left_over(self) -> None:
        """Refuse weights that the new model has no place for."""
        gone = {"cls_token"} if isinstance(self.new, ViTConfig) else set()
        extra = [
            name
            for name in self.state
            if name not in self.wanted
            and name not in gone
            and not (name.endswith("pos_embed.prefix") and not _placed(self.new))
            and not (self.head_is_new and name.startswith(HEAD))
        ]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise WeightsError(f"the model has no place for {extra[0]}{more}", hint=_family(self.old, self.new))

    def changes(self) -> Iterator[str]:
        """What was done, in words."""
        old, new = self.old, self.new
        sizes = [pair(config.patch_size) for config in (old, new) if isinstance(config, ViTConfig)]
        if len(set(sizes)) == 2:
            yield "patch embedding: patches of {}×{} → {}×{}".format(*sizes[0], *sizes[1])
        if old.channels != new.channels:
            anew = ", and standardised anew: answers change" if self._reads_the_image() != PATCHES else ""
            yield f"first kernel: {old.channels} channels → {new.channels}{anew}"
        if isinstance(old, ViTConfig) and isinstance(new, ViTConfig):
            yield from self._changed_positions(old, new)
            yield from self._changed_tokens(old, new)
        yield from self._changed_head()
        for key, (was, becomes) in differing(flat(to_mapping(old)), flat(to_mapping(new))).items():
            if key not in TOLD_APART and not key.startswith(SILENT):
                yield f"{key}: {was} → {becomes}, which can change answers"

    def _changed_positions(self, old: ViTConfig, new: ViTConfig) -> Iterator[str]:
        if self.grids:
            what = {"none": "patches", "rotary": "rotary positions"}.get(new.positions.kind, "position embeddings")
            anew = ", computed anew" if new.positions.kind in ("rotary", "sincos_2d") else ""
            yield f"{what}: grid {{}}×{{}} → {{}}×{{}}{anew}".format(*self.grids[0], *self.grids[1])
        if old.positions.is_additive and old.positions.covers != new.positions.covers:
            into = ("their rows are added to the tokens", "zero rows for the tokens")
            way = into[new.positions.covers == "all"] if old.class_tokens and new.class_tokens else "no token has a row"
            yield f"position embeddings: cover {old.positions.covers} → {new.positions.covers}; {way}"

    def _changed_tokens(self, old: ViTConfig, new: ViTConfig) -> Iterator[str]:
        was, becomes = _has_class_token(old), _has_class_token(new)
        token = {
            (True, False): "left out",
            (False, True): "new, and zero",
            (True, True): "kept",
            (False, False): "not there",
        }[was, becomes]
        if old.pooling != new.pooling:
            yield f"pooling: {old.pooling} → {new.pooling}; the class token is {token}"
        elif was != becomes:
            yield f"class token: {token}"

    def _changed_head(self) -> Iterator[str]:
        old, new = self.old.classes, self.new.classes
        if self.head_is_new and new:
            yield f"head: new, for {new} classes" + (f" instead of {old}" if old else "; there was none")
        elif self.head_is_new and old:
            yield f"head: left out, with its {old} classes; the model gives features"
        elif self.labels and self.labels.old != self.labels.new:
            kept = len(set(self.labels.old) & set(self.labels.new))
            others = [f"{new - kept} new and zero"] if new > kept else []
            others += [f"{old - kept} left out"] if old > kept else []
            yield ", ".join([f"head: {kept} of {new} classes kept by name", *(others or ["in another order"])])


def _one_layer(config: ModelConfig) -> ModelConfig:
    return replace(config, depth=1) if isinstance(config, ViTConfig) else config


def _has_class_token(config: ModelConfig) -> bool:
    return isinstance(config, ViTConfig) and config.class_tokens > config.tokens.distillation


def _placed(config: ModelConfig) -> list[str]:
    """The tokens that have a row in the position table, in the order of the rows."""
    if not isinstance(config, ViTConfig) or config.positions.covers != "all":
        return []
    return ["cls_token"] * _has_class_token(config) + ["dist_token"] * config.tokens.distillation


def _rows_are_classes(old: Mapping[str, torch.Size], new: Mapping[str, torch.Size]) -> bool:
    """Whether both heads are linear layers on features of one width, of which each row is a class."""
    return (
        bool(old)
        and old.keys() == new.keys()
        and not any(name.startswith("pre_logits.") for name in old)
        and all(old[name][1:] == new[name][1:] for name in old)
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
