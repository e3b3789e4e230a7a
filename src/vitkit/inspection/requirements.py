"""Checks that a method applies to a model."""

from vitkit.core.errors import ConfigError, InputError, summarize
from vitkit.model.config import check_patches_removable
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model


class NotApplicableError(InputError):
    """A method that does not apply to this kind of model."""


def require_vit(model: Model) -> ViT:
    """Return the model if it is a Vision Transformer or a hybrid."""
    if isinstance(model, ViT):
        return model
    raise NotApplicableError(
        "a ResNet has no attention", expected="a Vision Transformer or a hybrid", got="a BiT ResNet"
    )


def require_classes(model: Model) -> ViT:
    """Return the model if it has attention and a classification head."""
    vit = require_vit(model)
    if vit.config.num_classes == 0:
        raise NotApplicableError("the model has no classes", expected="a model with a head", got="features only")
    return vit


def require_patch_removal(model: Model) -> ViT:
    """Return the model if patches can be removed from its input."""
    vit = require_classes(model)
    try:
        check_patches_removable(vit.config)
    except ConfigError as error:
        raise NotApplicableError(summarize(error)) from error
    return vit
