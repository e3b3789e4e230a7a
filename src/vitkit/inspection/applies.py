"""A model goes in, the Vision Transformer that a part needs comes out, or a plain word why there is none."""

from vitkit.core.errors import ConfigError, InputError
from vitkit.model.config import patches_may_be_left_out
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model


class DoesNotApplyError(InputError):
    """What was asked for does not exist in this kind of model."""


def needs_attention(model: Model) -> ViT:
    """The model, if it has attention to look at."""
    if isinstance(model, ViT):
        return model
    raise DoesNotApplyError(
        "a ResNet has no attention", expected="a Vision Transformer or a hybrid", got="a BiT ResNet"
    )


def needs_classes(model: Model) -> ViT:
    """The model, if it has attention and a head whose answer can be explained."""
    vit = needs_attention(model)
    if vit.config.classes == 0:
        raise DoesNotApplyError("the model has no classes", expected="a model with a head", got="features only")
    return vit


def needs_removable_patches(model: Model) -> ViT:
    """The model, if it can answer to an image without some of its patches."""
    vit = needs_classes(model)
    try:
        patches_may_be_left_out(vit.config)
    except ConfigError as error:
        raise DoesNotApplyError(str(error)) from error
    return vit
