"""Students of a distillation: with a distillation token (DeiT), or with a projection to a teacher's features."""

import torch
from torch import nn

from vitkit.core.shapes import Float, Tensor
from vitkit.model.heads import DistilledHead
from vitkit.model.init import xavier_uniform
from vitkit.model.masked import PretrainingModel
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT


class DistilledViT(PretrainingModel):
    """ViT that returns the logits of both heads in training and their mean in evaluation.

    Both come from one forward call, as DistributedDataParallel requires.

    >>> import torch
    >>> from vitkit.model.config import ViTConfig
    >>> from vitkit.model.pretraining_config import make_student_config
    >>> from vitkit.model.vit import ViT
    >>> config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, num_classes=5)
    >>> model = DistilledViT(ViT(make_student_config(config, token=True)))
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
            return head.forward_both(self.encoder.features(images))
        return self.encoder(images)


class FeatureStudent(PretrainingModel):
    """Model that also projects its features to those of a teacher: a tuple in training, logits in evaluation.

    >>> from vitkit.model.config import BiTConfig
    >>> model = FeatureStudent(BiT(BiTConfig(units=(1,), num_classes=5)), features=7)
    >>> [output.shape for output in model(torch.rand(2, 3, 32, 32))]
    [torch.Size([2, 5]), torch.Size([2, 7])]
    """

    def __init__(self, encoder: ViT | BiT, *, features: int, generator: torch.Generator | None = None) -> None:
        super().__init__(encoder)
        self.projection = nn.Linear(encoder.num_features, features)
        with torch.no_grad():
            if not self.projection.weight.is_meta:
                xavier_uniform(self.projection.weight, generator)
                self.projection.bias.zero_()

    def forward(
        self, images: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B Y"] | tuple[Float[Tensor, "B Y"], Float[Tensor, "B F"]]:
        features = self.encoder.features(images)
        logits = self.encoder.head(features)
        return (logits, self.projection(features)) if self.training else logits
