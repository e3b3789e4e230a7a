"""Adaptation of tensors to another model configuration.

Fine-tuning removes the pre-trained head, attaches a zero-initialized one, and interpolates position embeddings to the
new grid by their location in the original image (section 3.2). Patch size, channels and pooling can change too. Any
other difference is an error, or is reported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, replace

import torch

from vitkit.core.errors import WeightsError
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import format_size, pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.patches import resize_kernel
from vitkit.model.positions import adapt_positions, is_position_table, tokens_with_positions
from vitkit.weights.bundle import affects_logits, diff_settings
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig

HEAD = ("head.", "pre_logits.")
PATCHES, PATCH_BIAS = "patch_embed.proj.weight", "patch_embed.proj.bias"
FIRST_KERNELS = (PATCHES, "patch_embed.backbone.stem.conv.weight", "stem.conv.weight")
DESCRIBED_SETTINGS = (
    *("image_size", "patch_size", "channels", "num_classes", "pooling"),
    *("tokens.class_token", "positions.covers", "head.pre_logits"),
)
"""Settings whose change has a description of its own."""


# Patch embedding kernels


def spread_channels(kernel: Float[Tensor, "D C P Q"], channels: int) -> Float[Tensor, "D C2 P Q"]:
    """Return a kernel for another number of channels with the same response to images of equal channels.

    Three or more channels that are extended keep their weights, and the new ones start at zero: the response to colors
    does not change either. If channels are removed and three or more remain, the remaining ones share the weights of
    the removed ones equally, so that three channels become four and three again without loss. Otherwise the sum of all
    channels is distributed equally.
    """
    old = kernel.shape[1]
    if old == channels:
        return kernel
    if min(old, channels) < 3:
        return kernel.sum(dim=1, keepdim=True).expand(-1, channels, -1, -1).div(channels).contiguous()
    if old > channels:
        return kernel[:, :channels] + kernel[:, channels:].sum(dim=1, keepdim=True) / channels
    zeros = kernel.new_zeros(kernel.shape[0], channels - old, *kernel.shape[2:])
    return torch.cat([kernel, zeros], dim=1)


def renormalize_kernel(
    kernel: Float[Tensor, "D C P Q"], *, old: Preprocessing, new: Preprocessing
) -> tuple[Float[Tensor, "D C2 P Q"], Float[Tensor, "D"]]:
    """Return a kernel for the channels, mean and std of another preprocessing, and the change of the bias.

    The channels of a gray image are equal before normalization, but not after it if each channel has its own mean.
    Therefore the kernel for unnormalized pixels is spread, and the response to gray images does not change.
    """
    unnormalized = kernel.double() / _per_channel(old.std, old.channels)
    spread = spread_channels(unnormalized, new.channels)
    # Relative to one gray level, so that equal means change the bias by exactly zero.
    level = old.mean[0]
    bias_change = (spread * (_per_channel(new.mean, new.channels) - level)).sum(dim=(1, 2, 3))
    bias_change -= (unnormalized * (_per_channel(old.mean, old.channels) - level)).sum(dim=(1, 2, 3))
    return (spread * _per_channel(new.std, new.channels)).to(kernel.dtype), bias_change


def _per_channel(values: tuple[float, ...], channels: int) -> Float[Tensor, "C 1 1"]:
    return torch.tensor(values, dtype=torch.float64).expand(channels)[:, None, None]


# Tensors of a model


@dataclass(frozen=True)
class AdaptedState:
    """Adapted tensors, and a description of each change."""

    state: dict[str, Tensor]
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LabelChange:
    """Class names before and after: classes in both keep their row of the head."""

    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PreprocessingChange:
    """Preprocessing before and after."""

    old: Preprocessing
    new: Preprocessing


def adapt_state(
    state: Mapping[str, Tensor],
    *,
    old: ModelConfig,
    new: ModelConfig,
    new_head: bool = False,
    labels: LabelChange | None = None,
    preprocessing: PreprocessingChange | None = None,
    generator: torch.Generator | None = None,
) -> AdaptedState:
    """Return tensors for the model `new`, made from those of the model `old`.

    Args:
        state: Tensors of the model `old`, which are not changed.
        old: Configuration of the tensors.
        new: Configuration to adapt to.
        new_head: Replace the head even if it fits. A head that does not fit is always replaced.
        labels: Keep the head's rows of classes with the same name.
        preprocessing: Keep the logits of gray images when channels change; without it, those of images with equal
            normalized channels.
        generator: Source of newly initialized tensors.

    >>> from vitkit.zoo.registry import configure
    >>> old, new = (configure("Ti/16", image_size=side, num_classes=side) for side in (32, 48))
    >>> adapt_state(create(old).state_dict(), old=old, new=new).changes
    ('position embeddings: grid 2×2 → 3×3', 'head: new, for 48 classes instead of 32')
    """
    adapter = _StateAdapter(state, old, new, new_head, labels, preprocessing, generator)
    adapted = {name: adapter.adapt(name, shape) for name, shape in adapter.expected.items()}
    adapter.check_unused()
    return AdaptedState(adapted, tuple(adapter.describe_changes()))


@dataclass
class _StateAdapter:
    state: Mapping[str, Tensor]
    old: ModelConfig
    new: ModelConfig
    new_head: bool
    labels: LabelChange | None
    preprocessing: PreprocessingChange | None
    generator: InitVar[torch.Generator | None]

    def __post_init__(self, generator: torch.Generator | None) -> None:
        self.expected = {name: tensor.shape for name, tensor in create(self.new, device="meta").state_dict().items()}
        # One layer is enough: it has every tensor that may have to be initialized.
        one_layer = replace(self.new, depth=1) if isinstance(self.new, ViTConfig) else self.new
        self.initial = create(one_layer, generator=generator).state_dict()
        old_head = {name: tensor.shape for name, tensor in self.state.items() if name.startswith(HEAD)}
        head = {name: shape for name, shape in self.expected.items() if name.startswith(HEAD)}
        if self.new_head or not _rows_are_classes(old_head, head):
            self.labels = None
        self.head_is_new = self.new_head or (old_head != head and self.labels is None)
        classes = f"{self.old.num_classes} and {self.new.num_classes} labels"
        if self.labels and (got := f"{len(self.labels.old)} and {len(self.labels.new)} labels") != classes:
            raise WeightsError("the number of labels is not that of the models", expected=classes, got=got)

    def adapt(self, name: str, shape: torch.Size) -> Tensor:
        """Return the new model's tensor of this name."""
        if name.startswith(HEAD) and self.head_is_new:
            return self.initial[name]
        if name == "dist_token" and name not in self.state:
            return self.initial[name]  # learned from the teacher
        if name == "cls_token" and not _has_class_token(self.old):
            return self.initial[name]  # zeros
        if name.endswith(".prefix") and not tokens_with_positions(self.old):
            return torch.zeros(shape)
        if name not in self.state:
            raise WeightsError(f"the weights have no {name}", hint=_difference_hint(self.old, self.new))
        tensor = self._transform(name, self.state[name])
        if tensor.shape != shape:
            raise WeightsError(
                f"{name} does not fit the model",
                expected=" × ".join(map(str, shape)),
                got=" × ".join(map(str, tensor.shape)),
                hint=_difference_hint(self.old, self.new),
            )
        return tensor.clone() if tensor is self.state[name] else tensor

    def _transform(self, name: str, tensor: Tensor) -> Tensor:
        if name.startswith("head.") and self.labels:
            return _copy_class_rows(tensor, self.initial[name], self.labels)
        if name in (*FIRST_KERNELS, PATCH_BIAS):
            return self._adapt_first_layer(name, tensor)
        if isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig):
            if is_position_table(name):
                return adapt_positions(name, tensor, old=self.old, new=self.new)
            if name in tokens_with_positions(self.old) and name not in tokens_with_positions(self.new):
                return self._add_position(name, tensor, self.old)
        return tensor

    # First layer

    @property
    def _image_kernel(self) -> str:
        """Name of the kernel that is applied to the image itself."""
        return next(name for name in reversed(FIRST_KERNELS) if name in self.expected)

    def _adapt_first_layer(self, name: str, tensor: Tensor) -> Tensor:
        """Adapt a first kernel or the patch embedding's bias to the new patch size and channels."""
        kernel = self._resize(name, tensor)
        if self.old.channels == self.new.channels or self._image_kernel not in (name, PATCHES):
            return kernel
        if self.preprocessing is None or self._image_kernel != PATCHES:
            return kernel if name == PATCH_BIAS else spread_channels(kernel, self.new.channels)
        resized = self._resize(PATCHES, self.state[PATCHES])
        kernel, bias_change = renormalize_kernel(resized, old=self.preprocessing.old, new=self.preprocessing.new)
        return kernel if name == PATCHES else (tensor.double() + bias_change).to(tensor.dtype)

    def _resize(self, name: str, kernel: Tensor) -> Tensor:
        if name != PATCHES or not (isinstance(self.old, ViTConfig) and isinstance(self.new, ViTConfig)):
            return kernel
        return resize_kernel(kernel, pair(self.new.patch_size))

    # Positions

    def _add_position(self, name: str, token: Tensor, old: ViTConfig) -> Tensor:
        """Add the position embedding of a token, which has no row in the new model, to the token itself."""
        if old.positions.injection_point != "stem":
            message = f"{name} has a position at every layer, which the new model has no row for"
            raise WeightsError(message, hint="keep positions.covers=all")
        if old.positions.kind == "sincos_2d":
            return token  # its row is zero
        rows = self.state["pos_embed.prefix" if old.positions.kind == "learned_2d" else "pos_embed"]
        index = tokens_with_positions(old).index(name)
        return token + rows[:, index : index + 1]

    # Report

    def check_unused(self) -> None:
        """Raise an error if the new model has no use for a tensor."""
        removable = {"cls_token"} if isinstance(self.new, ViTConfig) else set()
        unused = [
            name
            for name in self.state
            if name not in self.expected
            and name not in removable
            and not (name.endswith("pos_embed.prefix") and not tokens_with_positions(self.new))
            and not (self.head_is_new and name.startswith(HEAD))
        ]
        if unused:
            message = f"the model has no tensor {shorten_list(unused, limit=1)}"
            raise WeightsError(message, hint=_difference_hint(self.old, self.new))

    def describe_changes(self) -> Iterator[str]:
        """Describe each change."""
        old, new = self.old, self.new
        sizes = [format_size(config.patch_size) for config in (old, new) if isinstance(config, ViTConfig)]
        if len(set(sizes)) == 2:
            yield f"patch embedding: patches of {sizes[0]} → {sizes[1]}"
        if old.channels != new.channels:
            standardized = ", standardized again: logits change" if self._image_kernel != PATCHES else ""
            yield f"first kernel: {old.channels} channels → {new.channels}{standardized}"
        if isinstance(old, ViTConfig) and isinstance(new, ViTConfig):
            yield from self._describe_positions(old, new)
            yield from self._describe_tokens(old, new)
        yield from self._describe_head()
        for key, (before, after) in diff_settings(old, new).items():
            if key not in DESCRIBED_SETTINGS and affects_logits(key):
                yield f"{key}: {before} → {after}, which can change logits"

    def _describe_positions(self, old: ViTConfig, new: ViTConfig) -> Iterator[str]:
        if old.grid != new.grid:
            subject = {"none": "patches", "rotary": "rotary positions"}.get(new.positions.kind, "position embeddings")
            computed = ", recomputed" if new.positions.kind in ("rotary", "sincos_2d") else ""
            yield f"{subject}: grid {format_size(old.grid)} → {format_size(new.grid)}{computed}"
        if old.positions.is_additive and old.positions.covers != new.positions.covers:
            effect = "no token has a row"
            if old.class_tokens and new.class_tokens:
                to_all = new.positions.covers == "all"
                effect = "zero rows for the tokens" if to_all else "their rows are added to the tokens"
            yield f"position embeddings: cover {old.positions.covers} → {new.positions.covers}; {effect}"

    def _describe_tokens(self, old: ViTConfig, new: ViTConfig) -> Iterator[str]:
        before, after = _has_class_token(old), _has_class_token(new)
        state = ("kept" if after else "removed") if before else ("new (zeros)" if after else "absent")
        if old.pooling != new.pooling:
            yield f"pooling: {old.pooling} → {new.pooling}; class token {state}"
        elif before != after:
            yield f"class token: {state}"

    def _describe_head(self) -> Iterator[str]:
        old, new = self.old.num_classes, self.new.num_classes
        if self.head_is_new and new:
            yield f"head: new, for {new} classes" + (f" instead of {old}" if old else "; there was none")
        elif self.head_is_new and old:
            yield f"head: removed, with its {old} classes; the model returns features"
        elif self.labels and self.labels.old != self.labels.new:
            kept_count = len(set(self.labels.old) & set(self.labels.new))
            others = [f"{new - kept_count} new (zeros)"] if new > kept_count else []
            others += [f"{old - kept_count} removed"] if old > kept_count else []
            yield ", ".join([f"head: {kept_count} of {new} classes kept by name", *(others or ["in another order"])])


def _has_class_token(config: ModelConfig) -> bool:
    return isinstance(config, ViTConfig) and config.class_tokens > config.tokens.distillation


def _rows_are_classes(old: Mapping[str, torch.Size], new: Mapping[str, torch.Size]) -> bool:
    """Return whether both heads are linear layers on features of the same width."""
    return (
        bool(old)
        and old.keys() == new.keys()
        and not any(name.startswith("pre_logits.") for name in old)
        and all(old[name][1:] == new[name][1:] for name in old)
    )


def _copy_class_rows(old: Tensor, initial: Tensor, labels: LabelChange) -> Tensor:
    """Return the rows of the new labels: those of old labels of the same name, and initial ones for the others."""
    row = {label: index for index, label in enumerate(labels.old)}
    return torch.stack([old[row[label]] if label in row else initial[index] for index, label in enumerate(labels.new)])


def _difference_hint(old: ModelConfig, new: ModelConfig) -> str:
    differences = [
        f"{field} {getattr(old, field)} against {getattr(new, field, 'none')}"
        for field in vars(old)
        if field not in ("num_classes", "image_size") and getattr(old, field) != getattr(new, field, None)
    ]
    if not differences:
        return "the file is incomplete"
    return f"the weights are of another model: {', '.join(differences)[:200]}"
