"""Loaded models with their engines: outputs of batches, attention, and descriptions for the API."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.result import to_json
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import pair
from vitkit.data.dataset import Subset
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.agreement import Agreement, measure_agreement, sample_images
from vitkit.inference.engine import CPU, WARMUP_BATCHES, ThreadedEngine, resolve_device
from vitkit.inference.image_inputs import open_images
from vitkit.inference.predictor import Predictor
from vitkit.inspection.attention import head_maps, rollout
from vitkit.model.encoder import Capture
from vitkit.model.heads import DistilledHead
from vitkit.model.vit import ViT
from vitkit.server.config import EngineConfig, ModelConfig
from vitkit.zoo.registry import Model

CALIBRATION_IMAGES = 64


class ServedModel:
    """A model and its engine."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device = CPU, merge: int = 0, loaded: Model | None = None
    ) -> None:
        self.name, self.precision = config.name, config.precision
        self.predictor = Predictor(loaded or config.source, device=device, precision=config.precision, merge=merge)
        self.model, self.labels = self.predictor.model, self.predictor.labels
        self.preprocessing = self.predictor.preprocessing
        self.image_size = pair(self.preprocessing.image_size)
        engine, threads = self.predictor.engine, torch.get_num_threads()
        self.multi_threaded = engine.with_threads(threads) if isinstance(engine, ThreadedEngine) else engine
        self.single_threaded = engine.with_threads(1) if isinstance(engine, ThreadedEngine) else None
        """The engine on the caller's thread only, if it supports that."""
        self.agreement: Agreement | None = None
        self.batch_seconds = 0.0
        """Longest expected duration of a batch."""
        self.seconds_per_image = 0.0
        """Duration of a batch on all threads, divided by its size."""

    @torch.inference_mode()
    def run(
        self, images: Float[Tensor, "B C H W"], *, single_threaded: bool = False
    ) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits of a batch; a model without classes returns the features twice."""
        engine = self.single_threaded if single_threaded and self.single_threaded is not None else self.multi_threaded
        return engine.forward(images)

    @cached_property
    def class_directions(self) -> Float[Tensor, "Y F"]:
        """Normalized rows of the head's weight matrix."""
        head = self.model.head
        if isinstance(head, DistilledHead):
            rows = torch.cat([head.label.weight, head.teacher.weight], dim=1)
        else:
            assert isinstance(head, nn.Linear)
            rows = head.weight
        return functional.normalize(rows.detach().float().cpu(), dim=1)

    def class_similarity(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B Y"]:
        """Return the cosine similarity between features and the head's weights of each class."""
        return functional.normalize(features, dim=1) @ self.class_directions.T

    @torch.inference_mode()
    def compute_attention(
        self, image: Float[Tensor, "1 C H W"]
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "layers A rows columns"], Float[Tensor, "Y"]]:
        """Compute the attention rollout of one image, the map of each head of each layer, and the logits."""
        vit, pixels = self.model, image.to(self.predictor.device)
        assert isinstance(vit, ViT)
        maps = head_maps(vit, pixels, layers=range(len(vit.blocks)))
        return rollout(vit, pixels)[0].cpu(), maps[0].cpu(), self.run(image)[1][0]

    @torch.inference_mode()
    def compute_patch_attention(
        self, image: Float[Tensor, "1 C H W"], *, layer: int, head: int | None
    ) -> Float[Tensor, "N N"]:
        """Compute the attention from patch to patch in one layer, of one head or the mean of all heads."""
        vit = self.model
        assert isinstance(vit, ViT)
        tokens = vit.embed(image.to(self.predictor.device))
        attention = vit.encode(tokens, capture=Capture(attention=[layer])).attention[layer][0].cpu()
        weights = attention.mean(dim=0) if head is None else attention[head]
        return weights[vit.config.prefix :, vit.config.prefix :]

    def describe(self) -> dict[str, Any]:
        """Return the response of /v1/models/NAME."""
        model, preprocessing, agreement = self.model, self.preprocessing, self.agreement
        vit = model if isinstance(model, ViT) else None
        sizes = (len(vit.blocks), vit.config.heads, list(vit.config.grid)) if vit else (0, 0, [0, 0])
        facts: dict[str, Any] = {"name": self.name, "model": model.name, "precision": self.precision}
        facts |= {"engine": self.predictor.engine.name, "remark": self.predictor.fallback_reason}
        facts |= {"classes": len(self.labels), "image_size": list(self.image_size), "channels": preprocessing.channels}
        facts |= {"features": model.config.num_features, "attention": vit is not None}
        facts |= zip(("layers", "heads", "grid"), sizes, strict=True)
        facts |= {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        facts |= {"agreement": to_json(agreement), "agreed": agreement and str(agreement)}
        return facts | {"labels": list(self.labels), "preprocessing": preprocessing.to_hub()}


def load_models(
    configs: Sequence[ModelConfig], *, engine: EngineConfig, calibration: str | None, batch: int
) -> dict[str, ServedModel]:
    """Load all models by name. A source is read once, in however many precisions it is served."""
    device = resolve_device(engine.device)
    loaded: dict[str, Model] = {}
    models = {}
    for config in configs:
        model = ServedModel(config, device=device, merge=engine.merge, loaded=loaded.get(config.source))
        models[config.name], loaded[config.source] = model, model.model
        warm_up(model, batch=batch)
        if calibration is not None and (config.precision != "fp32" or engine.merge):
            batches = load_calibration(calibration, model.preprocessing, batch=batch)
            model.agreement = measure_agreement(model.predictor.engine, model.model, batches)
    return models


def load_calibration(source: str, preprocessing: Preprocessing, *, batch: int) -> list[Float[Tensor, "_ C H W"]]:
    """Load up to 64 images, evenly spaced over a dataset, in batches."""
    dataset = open_images([source])
    indices = range(0, len(dataset), max(1, len(dataset) // CALIBRATION_IMAGES))[:CALIBRATION_IMAGES]
    batches = list(sample_images(Subset(dataset, indices), preprocessing, batch_size=batch))
    if not batches:
        raise DataError(f"{source}: no readable image for calibration")
    return batches


def warm_up(model: ServedModel, *, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Run a few batches, because the first ones are slow, and measure the last one.

    On a GPU the model runs until it is compiled, for a single image and for batches: clients would wait for that.
    """
    image = torch.zeros(1, model.preprocessing.channels, *model.image_size)
    first = (1,) if model.predictor.device.type == "cpu" else (*[1] * (WARMUP_BATCHES + 1), 2)
    for size in (*first, batch, batch):
        start = clock()
        model.run(image.expand(size, -1, -1, -1).contiguous())
        model.batch_seconds = clock() - start
    model.seconds_per_image = model.batch_seconds / batch
    if model.single_threaded is not None:
        start = clock()
        model.run(image, single_threaded=True)
        model.batch_seconds = max(model.batch_seconds, batch * (clock() - start))
