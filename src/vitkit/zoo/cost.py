"""Compute and memory cost of models and of training runs, and the comparison with Table 6 of the paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitkit.core.config import format_settings
from vitkit.core.result import Result, draw, select
from vitkit.core.sizes import Size, pair
from vitkit.model.config import BiTConfig
from vitkit.zoo.flops import FlopsByPart, count_forward_flops
from vitkit.zoo.registry import configure, create, get_model_name
from vitkit.zoo.variants import ModelConfig, Variant

if TYPE_CHECKING:
    import matplotlib.figure
    from torch import Tensor

TRAINING_FACTOR = 3
"""A training step costs three forward passes: forward, gradients of inputs, gradients of weights."""
EXA = 10**18
JFT_IMAGES = 303_000_000
TABLE6 = (
    *(("B/32", 7, 55), ("B/16", 7, 224), ("L/32", 7, 196), ("L/16", 7, 783), ("L/16", 14, 1567), ("H/14", 14, 4262)),
    *(("BiT-R50x1", 7, 50), ("BiT-R50x2", 7, 199), ("BiT-R101x1", 7, 96), ("BiT-R152x1", 7, 141)),
    *(("BiT-R152x2", 7, 563), ("BiT-R152x2", 14, 1126), ("BiT-R200x3", 14, 3306)),
    *(("R50+B/32", 7, 106), ("R50+B/16", 7, 274), ("R50+L/32", 7, 246), ("R50+L/16", 7, 859), ("R50+L/16", 14, 1668)),
)
"""Model, epochs on JFT-300M and the paper's exaFLOPs in Table 6."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Cost(Result):
    """Operations and memory of a model, and of a training run if `images` is given.

    Memory is for float32 weights and Adam. `activation_bytes` is what autograd saves per image in training.
    """

    model: str
    settings: tuple[str, ...] = ()
    image_size: Size
    num_classes: int
    parameters: int
    parts: FlopsByPart
    activation_bytes: int
    images: int | None = None
    epochs: float = 1.0
    batch_size: int = 1

    @property
    def forward_flops(self) -> int:
        """Operations to classify one image."""
        return sum(self.parts.values())

    @property
    def train_flops(self) -> int:
        """Operations to train on one image once."""
        return TRAINING_FACTOR * self.forward_flops

    @property
    def exaflops(self) -> float | None:
        """Operations of the whole run in units of 10^18, or None without `images`."""
        return self.train_flops * self.images * self.epochs / EXA if self.images else None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return 4 * self.parameters

    @property
    def training_bytes(self) -> int:
        """Memory of weights, gradients, Adam's two moments and the activations of a batch."""
        return 4 * self.weight_bytes + self.batch_size * self.activation_bytes

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit cost --json` prints."""
        return {
            **select(self, "model", "settings", "image_size", "num_classes", "parameters"),
            "forward_gflops": self.forward_flops / 1e9,
            "train_gflops": self.train_flops / 1e9,
            "parts_gflops": {part: flops / 1e9 for part, flops in self.parts.items()},
            "images": self.images,
            "epochs": self.epochs if self.images else None,
            **select(self, "exaflops", "weight_bytes"),
            "activation_bytes_per_image": self.activation_bytes,
            **select(self, "batch_size", "training_bytes"),
        }

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw the FLOPs of each part of the model."""
        return draw("plot_cost", self)


def count_cost(
    model: str | ModelConfig,
    *,
    image_size: Size | None = None,
    num_classes: int | None = None,
    images: int | None = None,
    epochs: int | float = 1,
    batch_size: int = 1,
    settings: Mapping[str, object] | None = None,
) -> Cost:
    """Count the parameters, operations and memory of a model without allocating it.

    >>> round(count_cost("B/16", images=303_000_000, epochs=7).exaflops)
    224
    """
    config = configure(model, image_size=image_size, num_classes=num_classes, settings=settings)
    return Cost(
        model=model if isinstance(model, str) else get_model_name(model),
        settings=tuple(format_settings(settings or {})),
        image_size=config.image_size,
        num_classes=config.num_classes,
        parameters=count_parameters(config),
        parts=count_forward_flops(config),
        activation_bytes=count_activation_bytes(config),
        images=images,
        epochs=float(epochs),
        batch_size=batch_size,
    )


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model without allocating it."""
    return sum(parameter.numel() for parameter in create(config, device="meta").parameters())


def count_activation_bytes(config: ModelConfig, *, is_half: bool = False) -> int:
    """Count what autograd saves for the backward pass of one image, with tensors that have no data.

    With `is_half`, autocast runs the forward pass in 16 bits; the casts of the weights, which all images share, do not
    count.
    """
    if not is_half:
        return _count_saved_bytes(config, images=1, is_half=False)
    return _count_saved_bytes(config, images=2, is_half=True) - _count_saved_bytes(config, images=1, is_half=True)


def _count_saved_bytes(config: ModelConfig, *, images: int, is_half: bool) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks
    from torch.func import functional_call

    model = create(config, device="meta").train()
    saved: dict[int, Tensor] = {}

    def record(tensor: "Tensor") -> "Tensor":
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode():
        originals = model.named_parameters()
        parameters = {name: torch.empty(each.shape, requires_grad=each.requires_grad) for name, each in originals}
        batch = torch.empty(images, config.channels, *pair(config.image_size))
        with (
            saved_tensors_hooks(record, lambda tensor: tensor),
            # In bfloat16 attention would be that of a CPU, which saves the attention weights.
            torch.autocast("cpu", dtype=torch.float16, enabled=is_half),
        ):
            functional_call(model, parameters, (batch,))
    for parameter in parameters.values():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Dimensions and cost of a variant.

    `patch` is in image pixels, for hybrids too. A ResNet has no heads, patches or tokens.
    """

    name: str
    kind: str
    layers: int
    width: int
    heads: int | None
    patch: int | None
    image_size: Size
    tokens: int | None
    parameters: int
    gflops: float
    aliases: tuple[str, ...]


def summarize(variant: Variant) -> ModelSummary:
    """Summarize the dimensions and the forward cost of a variant.

    >>> from vitkit.zoo.registry import find_variant
    >>> summary = summarize(find_variant("R50+B/16"))
    >>> summary.patch, summary.tokens, round(summary.gflops, 1)
    (16, 197, 43.1)
    """
    config = variant.config
    heads = patch = tokens = None
    if isinstance(config, BiTConfig):
        layers = 3 * sum(config.units) + 2  # three convolutions per unit, the root and the head
    else:
        layers, heads, tokens = config.depth, config.heads, config.prefix + config.patches
        patch = pair(config.image_size)[0] // config.grid[0]
    return ModelSummary(
        name=variant.name,
        kind=variant.kind,
        layers=layers,
        width=config.width,
        heads=heads,
        patch=patch,
        image_size=config.image_size,
        tokens=tokens,
        parameters=variant.parameters,
        gflops=sum(count_forward_flops(config).values()) / 1e9,
        aliases=variant.aliases,
    )


@dataclass(frozen=True, kw_only=True)
class Table6Row:
    """A pre-training run on JFT-300M; costs are in exaFLOPs."""

    model: str
    epochs: int
    paper: float
    counted: float
    counted_without_padding: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Table6(Result):
    """Table 6 of the paper: exaFLOPs of pre-training, compared with our counts.

    The paper's ResNet rows match only if products with a convolution's zero padding are not counted, as its accelerator
    compiler does; so both counts are given. docs/table6.md discusses the comparison.
    """

    rows: tuple[Table6Row, ...]


def count_table6() -> Table6:
    """Count the operations of every run of Table 6.

    >>> row = count_table6().rows[1]
    >>> row.model, row.paper, round(row.counted)
    ('B/16', 224.0, 224)
    """

    def count_exaflops(model: str, epochs: int, *, padding: bool) -> float:
        flops = sum(count_forward_flops(configure(model), padding=padding).values())
        return TRAINING_FACTOR * flops * JFT_IMAGES * epochs / EXA

    return Table6(
        rows=tuple(
            Table6Row(
                model=model,
                epochs=epochs,
                paper=float(paper),
                counted=count_exaflops(model, epochs, padding=True),
                counted_without_padding=count_exaflops(model, epochs, padding=False),
            )
            for model, epochs, paper in TABLE6
        )
    )
