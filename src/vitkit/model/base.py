"""Base class of ViT and BiT: labels, preprocessing, the classifier, and facts about the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from vitkit.core.errors import ConfigError, check_not_negative, explain_arguments
from vitkit.core.shapes import Float, Tensor

if TYPE_CHECKING:
    from vitkit.data.preprocessing import Preprocessing


Config = TypeVar("Config")

OTHER_NAMES = {
    "classifier": "model.head",
    "default_cfg": "model.preprocess, model.config and model.labels",
    "embed_dim": "model.num_features",
    "encoder": "model.blocks, or model.encode(tokens)",
    "evaluate": "vitkit.evaluate(model, data)",
    "export": "vitkit.export(model, path)",
    "fit": "vitkit.finetune(model, data)",
    "freeze": "model.requires_grad_(False)",
    "from_pretrained": "vitkit.load(source)",
    "get_attention_maps": "model.attention(images)",
    "get_intermediate_layers": "model.forward_intermediates(images, indices)",
    "get_last_selfattention": "model.attention(images)[model.config.depth - 1]",
    "id2label": "model.labels",
    "num_labels": "model.num_classes",
    "predict": "vitkit.predict(model, images)",
    "pretrained_cfg": "model.preprocess, model.config and model.labels",
    "push_to_hub": "vitkit.save(model, path), then upload the directory",
    "save": "vitkit.save(model, path)",
    "save_pretrained": "vitkit.save(model, path)",
}
"""What to use for attributes of models of other libraries."""
NO_OUTPUT_OBJECT = {
    "labels": "compute the loss of the logits, torch.nn.functional.cross_entropy(model(images), targets)",
    "output_attentions": "use model.attention(images)",
    "output_hidden_states": "use model.forward_intermediates(images)",
    "pixel_values": "use model(images)",
    "return_dict": "the output is a tensor, the logits",
}
"""What to use for arguments of the models of Hugging Face."""


class ImageModel(nn.Module):
    """Base of all models. `create` and `load` set `name`, `labels` and `preprocess`."""

    config: Any
    head: nn.Module
    name: str
    labels: tuple[str, ...]
    preprocess: "Preprocessing"
    grad_checkpointing = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in OTHER_NAMES:
                raise
            raise AttributeError(f"{error}\nhint: {OTHER_NAMES[name]}") from None

    @explain_arguments(NO_OUTPUT_OBJECT)
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

    @explain_arguments({"is_training": "use train="})
    def transforms(self, train: bool = False) -> Callable[[Any], Tensor]:
        """Return the transform of a single image, C × H × W, for a torch Dataset.

        With `train`, it is the paper's random crop and flip instead of the crop for evaluation.
        """
        return self.preprocess.transforms(train=train)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    @explain_arguments({"global_pool": "use vitkit.adapt(model, pooling=…).model"})
    def reset_classifier(self, num_classes: int, *, labels: Sequence[str] | None = None) -> None:
        """Replace the head by a zero-initialized one; 0 classes remove it.

        Call it before the optimizer, `torch.compile` or DistributedDataParallel see the model.
        """
        check_not_negative("num_classes", num_classes)
        names = tuple(map(str, range(num_classes))) if labels is None else tuple(labels)
        if len(names) != num_classes or isinstance(labels, str):
            raise ConfigError("wrong number of labels", expected=f"{num_classes} labels", got=labels)
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


def check_config(config: Config, kind: type[Config]) -> Config:
    """Return a configuration, or raise ConfigError for another object, such as the name of a model."""
    if not isinstance(config, kind):
        hint = f"vitkit.create({config!r})" if isinstance(config, str) else "vitkit.create(name)"
        raise ConfigError(f"a model takes a {kind.__name__}", got=type(config).__name__, hint=hint)
    return config
