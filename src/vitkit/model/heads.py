"""Encoded tokens go in, features and then logits come out: pooling by attention, pre-logits, and the heads."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import check_positive
from vitkit.core.shapes import Float, Tensor
from vitkit.model.encoder import Activation, mlp


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What stands between the encoder and the logits.

    `pre_logits` is the width of the pre-training head's hidden layer, None for the plain linear head of fine-tuning.
    `bias` is where the classifier's bias starts: -10 for the sigmoid losses of ImageNet-21k and JFT.
    `norm` says whether the last LayerNorm comes before pooling, as in the paper, or after it, as in MAE.
    """

    pre_logits: int | None = None
    bias: float = 0.0
    norm: Literal["before_pooling", "after_pooling"] = "before_pooling"

    def __post_init__(self) -> None:
        if self.pre_logits is not None:
            check_positive("head.pre_logits", self.pre_logits)


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head: dense, then tanh (section 3.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)

    def forward(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B F"]:
        return torch.tanh(self.fc(features))


class AttentionPool(nn.Module):
    """MAP: a learned probe looks at all tokens once; what it saw, and an MLP of that, are the features."""

    def __init__(self, *, width: int, heads: int, mlp_dim: int, activation: Activation, norm_eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp(width=width, mlp_dim=mlp_dim, activation=activation)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B D"]:
        keys, values = self.offered(tokens)
        seen = functional.scaled_dot_product_attention(self.query(tokens.shape[0]), keys, values)
        pooled = self.proj(seen.transpose(1, 2).flatten(2))
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]

    def offered(self, tokens: Float[Tensor, "B L D"]) -> tuple[Float[Tensor, "B A L K"], Float[Tensor, "B A L K"]]:
        """Keys and values of the tokens."""
        keys, values = self.kv(tokens).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def query(self, images: int) -> Float[Tensor, "B A 1 K"]:
        """What the probe asks of each image, the same of all."""
        return self.q(self.latent).unflatten(2, (self.heads, -1)).transpose(1, 2).expand(images, -1, -1, -1)

    def weights(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B A L"]:
        """How much the probe looks at each token, which the fused kernel does not show."""
        query, (keys, _) = self.query(tokens.shape[0]), self.offered(tokens)
        return torch.softmax(query @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5, dim=-1)[:, :, 0]


class DistilledHead(nn.Module):
    """Two classifiers, one for the class token and one for the distillation token; their mean predicts (DeiT)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.label = nn.Linear(width, classes)
        self.teacher = nn.Linear(width, classes)

    def both(self, features: Float[Tensor, "B F"]) -> tuple[Float[Tensor, "B Y"], Float[Tensor, "B Y"]]:
        """Logits learned from the label, and those learned from the teacher."""
        label, teacher = features.chunk(2, dim=-1)
        return self.label(label), self.teacher(teacher)

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B Y"]:
        label, teacher = self.both(features)
        return (label + teacher) / 2
