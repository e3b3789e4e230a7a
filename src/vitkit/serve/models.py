"""The place of a model goes in; what the server says about it, and what it says of prepared images, come out.

This is the only module of the server that runs models: one model with its engine is one `Served`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vitkit.checkpoints.ready import Loaded
from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.data.decode import decode
from vitkit.data.transforms import Preprocessing
from vitkit.data.verify import read_image
from vitkit.engine.agreement import Agreement, agreement
from vitkit.engine.compiled import PATIENCE
from vitkit.engine.engine import CPU, Divisible
from vitkit.inspection.attention import head_maps, rollout
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import Keep
from vitkit.model.heads import DistilledHead
from vitkit.model.vit import ViT
from vitkit.predict.places import images_at
from vitkit.predict.predictor import Predictor
from vitkit.serve.config import EngineConfig, ModelConfig

CALIBRATION_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a model looked at in one image: rollout, and what each head of each layer draws on."""

    rollout: Float[Tensor, "rows columns"]
    maps: Float[Tensor, "layers A rows columns"]
    logits: Float[Tensor, "Y"]


class Served:
    """A model that answers for batches of prepared images."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device = CPU, merge: int = 0, loaded: Loaded | None = None
    ) -> None:
        self.name, self.precision = config.name, config.precision
        self.predictor = Predictor(loaded or config.place, device=device, precision=config.precision, merge=merge)
        self.model = self.predictor.model
        engine, threads = self.predictor.engine, torch.get_num_threads()
        self.together = engine.on_threads(threads) if isinstance(engine, Divisible) else engine
        self.apart = engine.on_threads(1) if isinstance(engine, Divisible) else None
        """The engine on its caller's thread alone, where it can be."""
        self.agreement: Agreement | None = None
        self.seconds = 0.0
        """That a batch takes, at most."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.predictor.labels

    @property
    def preprocessing(self) -> Preprocessing:
        """What is done to an image."""
        return self.predictor.preprocessing

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of its pixels."""
        return pair(self.preprocessing.image_size)

    @property
    def width(self) -> int:
        """How many features an image has."""
        config = self.model.config
        return config.features if isinstance(config, ViTConfig) else config.width

    @property
    def engine(self) -> str:
        """What runs it, for people."""
        return self.predictor.engine.name

    @torch.inference_mode()
    def answer(
        self, images: Float[Tensor, "B C H W"], *, apart: bool = False
    ) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits of a batch, on all threads or the caller's alone; without classes, the features twice."""
        engine = self.apart if apart and self.apart is not None else self.together
        return engine.answer(images)

    def agree(self, batches: Sequence[Float[Tensor, "B C H W"]]) -> None:
        """Measure on some images how far the engine agrees with the model as written."""
        self.agreement = agreement(self.predictor.engine, self.model, batches)

    @cached_property
    def class_rows(self) -> Float[Tensor, "Y F"]:
        """The direction that the head looks for in the features, for each class."""
        head = self.model.head
        rows = torch.cat([head.label.weight, head.teacher.weight], dim=1) if isinstance(head, DistilledHead) else None
        if rows is None:
            assert isinstance(head, nn.Linear)
            rows = head.weight
        return functional.normalize(rows.detach().float().cpu(), dim=1)

    def nearness(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B Y"]:
        """The cosine between an image's features and the direction of each class."""
        return functional.normalize(features, dim=1) @ self.class_rows.T

    def look(self, image: Float[Tensor, "1 C H W"]) -> Looked:
        """Where the model looks in one image."""
        vit = self.model
        assert isinstance(vit, ViT)
        with torch.inference_mode():
            logits = self.answer(image)[1][0]
            there = image.to(self.predictor.device)
            return Looked(
                rollout=rollout(vit, there)[0].cpu(),
                maps=head_maps(vit, there, layers=range(len(vit.blocks)))[0].cpu(),
                logits=logits,
            )

    def patches(self, image: Float[Tensor, "1 C H W"], *, layer: int, head: int | None) -> Float[Tensor, "N N"]:
        """What each patch looks at in a layer: by one head, or by all on average."""
        vit = self.model
        assert isinstance(vit, ViT)
        with torch.inference_mode():
            tokens = vit.embed(image.to(self.predictor.device))
            attention = vit.encode(tokens, keep=Keep(attention=[layer])).attention[layer][0].cpu()
            seen = attention.mean(dim=0) if head is None else attention[head]
            return seen[vit.config.prefix :, vit.config.prefix :]

    def description(self) -> dict[str, Any]:
        """What /v1/models/NAME says."""
        how = self.preprocessing
        vit = self.model if isinstance(self.model, ViT) else None
        return {
            "name": self.name,
            "model": self.model.name,
            "precision": self.precision,
            "engine": self.engine,
            "classes": len(self.labels),
            "image_size": list(pair(how.image_size)),
            "channels": how.channels,
            "features": self.width,
            "layers": len(vit.blocks) if vit else 0,
            "heads": vit.config.heads if vit else 0,
            "grid": list(vit.config.grid) if vit else [0, 0],
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "attention": vit is not None,
            "agreement": None if self.agreement is None else self.agreement.to_json(),
            "agreed": None if self.agreement is None else str(self.agreement),
            "remark": self.predictor.remark,
            "labels": list(self.labels),
            "preprocessing": how.to_hub(),
        }


def load_models(
    configs: Sequence[ModelConfig], *, engine: EngineConfig, calibration: str | None, batch: int
) -> dict[str, Served]:
    """All models by name. One place is read once, however many precisions it is served in."""
    device = device_named(engine.device)
    loaded: dict[str, Loaded] = {}
    models = {}
    for config in configs:
        known = loaded.get(config.place)
        models[config.name] = served = Served(config, device=device, merge=engine.merge, loaded=known)
        loaded[config.place] = served.model
        warm_up(served, batch=batch)
        if calibration is not None and (config.precision != "fp32" or engine.merge):
            served.agree(calibration_batches(calibration, served.preprocessing, batch=batch))
    return models


def device_named(name: str) -> torch.device:
    """The device, found without importing what finds GPUs where there is none: a worker must be there soon."""
    if name == "cpu" or (name == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available())):
        return CPU
    from vitkit.engine.devices import choose_device  # noqa: PLC0415

    return choose_device(name)


def calibration_batches(place: str, how: Preprocessing, *, batch: int) -> list[Float[Tensor, "B C H W"]]:
    """Some of the images at a place, evenly spread over it, prepared."""
    source = images_at([place])
    prepared = []
    for index in range(0, len(source), max(1, len(source) // CALIBRATION_IMAGES))[:CALIBRATION_IMAGES]:
        try:
            picture = decode(read_image(source, index), channels=how.channels)
        except DataError:
            continue
        prepared.append(how.normalise(torch.from_numpy(how.pixels(picture))[None]))
    if not prepared:
        raise DataError(f"{place}: not one image to measure on can be read")
    return list(torch.cat(prepared).split(batch))


def warm_up(served: Served, *, batch: int) -> None:
    """Let the model answer once alone and twice in a batch: the first time takes longest, the last is measured.

    What a thread alone would take for a batch is reckoned from one image.

    On a GPU it is asked until it compiles, which clients would wait for, and for two sizes of batches, for all.
    """
    image = torch.zeros(1, served.preprocessing.channels, *served.sides)
    counts = (1, batch, batch) if served.predictor.device.type == "cpu" else (*[1] * (PATIENCE + 1), 2, batch, batch)
    for count in counts:
        began = time.monotonic()
        served.answer(image.expand(count, -1, -1, -1).contiguous())
        served.seconds = time.monotonic() - began
    if served.apart is not None:
        began = time.monotonic()
        served.answer(image, apart=True)
        served.seconds = max(served.seconds, batch * (time.monotonic() - began))
