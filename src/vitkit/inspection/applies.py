"""A model goes in, the Vision Transformer that a part needs comes out, or a plain word why there is none."""

from vitkit.core.errors import InputError
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
