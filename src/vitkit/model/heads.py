"""Layers between the encoder and the logits: attention pooling, pre-logits, and the distilled head."""

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import create_mlp


class PreLogits(nn.Module):
    """Hidden layer of the pre-training head: dense, then tanh (section 3.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)

    def forward(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B F"]:
        return torch.tanh(self.fc(features))


class AttentionPool(nn.Module):
    """Multi-head attention pooling (MAP): a learned query attends to all tokens, followed by a residual MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.block.norm_eps)
        self.mlp = create_mlp(width=width, mlp_dim=config.mlp_dim, activation=config.block.activation)

    def forward(
        self, tokens: Float[Tensor, "B L D"], *, bias: Float[Tensor, "B 1 1 L"] | None = None
    ) -> Float[Tensor, "B D"]:
        """Return the pooled features; `bias` is added to the attention logits."""
        query = self.query(tokens.shape[0])
        mixed = functional.scaled_dot_product_attention(query, *self.keys_and_values(tokens), attn_mask=bias)
        pooled = self.proj(mixed.transpose(1, 2).flatten(2))
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]

    def keys_and_values(
        self, tokens: Float[Tensor, "B L D"]
    ) -> tuple[Float[Tensor, "B A L K"], Float[Tensor, "B A L K"]]:
        """Return the keys and values of the tokens."""
        keys, values = self.kv(tokens).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def query(self, batch: int) -> Float[Tensor, "B A 1 K"]:
        """Return the learned query, repeated for each image."""
        return self.q(self.latent).unflatten(2, (self.heads, -1)).transpose(1, 2).expand(batch, -1, -1, -1)

    def attention_weights(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B A L"]:
        """Return the weight of each token in the pooled features; the fused kernel does not return it."""
        query, (keys, _) = self.query(tokens.shape[0]), self.keys_and_values(tokens)
        return torch.softmax(query @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5, dim=-1)[:, :, 0]


class DistilledHead(nn.Module):
    """Two classifiers, of the class token and of the distillation token; the logits are their mean (DeiT)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.label, self.teacher = nn.Linear(width, num_classes), nn.Linear(width, num_classes)

    def forward_both(self, features: Float[Tensor, "B F"]) -> tuple[Float[Tensor, "B Y"], Float[Tensor, "B Y"]]:
        """Return the logits trained on labels and the logits trained on the teacher."""
        label, teacher = features.chunk(2, dim=-1)
        return self.label(label), self.teacher(teacher)

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B Y"]:
        label, teacher = self.forward_both(features)
        return (label + teacher) / 2
