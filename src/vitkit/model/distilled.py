"""A ViT with a distillation token goes in; a model around it that answers for both of its heads comes out (DeiT)."""

from dataclasses import replace

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.model.config import ViTConfig
from vitkit.model.heads import DistilledHead
from vitkit.model.masked import Pretraining
from vitkit.model.resnet import BiTConfig


class Distilled(Pretraining):
    """In training the logits learned from labels and those learned from a teacher, in evaluation their mean.

    One forward gives both, so that whatever is put around a model to spread it over ranks sees all that it learns.

    >>> import torch
    >>> from vitkit.model.vit import ViT
    >>> config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=5)
    >>> model = Distilled(ViT(as_student(config, token=True)))
    >>> [logits.shape for logits in model(torch.rand(2, 3, 8, 8))]
    [torch.Size([2, 5]), torch.Size([2, 5])]
    >>> model.eval()(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """

    def forward(
        self, images: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B Y"] | tuple[Float[Tensor, "B Y"], Float[Tensor, "B Y"]]:
        head = self.encoder.head
        if self.training and isinstance(head, DistilledHead):
            return head.both(self.encoder.features(images))
        return self.encoder(images)


def as_student(config: ViTConfig | BiTConfig, *, token: bool) -> ViTConfig | BiTConfig:
    """The configuration with a distillation token beside the class token, or as it is where it has to do without.

    >>> as_student(ViTConfig(), token=True).tokens.distillation
    True
    """
    if isinstance(config, ViTConfig):
        if config.tokens.distillation and not token:
            raise ConfigError(
                "the student has a distillation token, and a head for it",
                expected="objective.distillation.token=true",
                got="false",
            )
        return replace(config, tokens=replace(config.tokens, distillation=token))
    if token:
        raise ConfigError(
            "a distillation token needs a Vision Transformer",
            expected="a ViT",
            got="a ResNet",
            hint="set objective.distillation.token=false: both losses then act on the one head",
        )
    return config
