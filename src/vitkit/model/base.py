"""Base class of ViT and BiT: labels, preprocessing, the classifier, and facts about the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitkit.core.errors import ConfigError, check_not_negative
from vitkit.core.shapes import Float, Tensor

if TYPE_CHECKING:
    from vitkit.data.preprocessing import Preprocessing


class ImageModel(nn.Module):
    """Base of all models. `create` and `load` set `name`, `labels` and `preprocess`."""

    config: Any
    head: nn.Module
    name: str
    labels: tuple[str, ...]
    preprocess: "Preprocessing"
    grad_checkpointing = False

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        """Return the logits of a batch."""
        return self.head(self.features(images))

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the features that the head reads."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block or stage in the backward pass, which saves memory and costs time."""
        self.grad_checkpointing = enable

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the model has no head and returns features."""
        return int(self.config.num_classes)

    @property
    def num_features(self) -> int:
        """Number of features that the head reads."""
        return int(self.config.num_features)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters, or of those that have gradients."""
        return sum(each.numel() for each in self.parameters() if each.requires_grad or not only_trainable)

    def transforms(self, train: bool = False) -> Callable[[Any], Tensor]:
        """Return the transform of a single image, C × H × W, for a torch Dataset.

        With `train`, it is the paper's random crop and flip instead of the crop for evaluation.
        """
        return self.preprocess.transforms(train=train)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, *, labels: Sequence[str] | None = None) -> None:
        """Replace the head by a zero-initialized one; 0 classes remove it.

        Call it before the optimizer, `torch.compile` or DistributedDataParallel see the model.
        """
        check_not_negative("num_classes", num_classes)
        names = tuple(map(str, range(num_classes))) if labels is None else tuple(labels)
        if len(names) != num_classes:
            raise ConfigError("wrong number of labels", expected=f"{num_classes} labels", got=len(names))
        device, dtype = self.device, self.dtype
        self.config = replace(self.config, num_classes=num_classes)
        self.head = self.create_head().to(device=device, dtype=dtype)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
        self.labels = names

    def create_head(self) -> nn.Module:
        """Create the head of the configuration, not initialized."""
        raise NotImplementedError
