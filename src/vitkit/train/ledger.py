"""A model and what a run did go in, what it cost comes out: operations, speed, and how much of the machine was used."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median

import torch

from vitkit.core.runlog import Record
from vitkit.core.shapes import pair
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.masked import answers
from vitkit.model.positions import PositionConfig
from vitkit.train.config import ObjectiveConfig
from vitkit.zoo.cost import EXA, TRAINING_FACTOR
from vitkit.zoo.flops import dense, forward_flops
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The compute ledger of a run. FLOPs are 2 × multiply-adds; `utilisation` is the share of the measured peak.

    `seconds` is the time its steps took, without what went into evaluation, saving and pauses.
    """

    parameters: int
    images_seen: int
    flops_an_image: int
    exaflops: float
    seconds: float | None
    images_per_second: float | None
    waiting: float | None
    flops_a_second: float | None
    peak_flops_a_second: float
    utilisation: float | None
    device: str
    ranks: int
    threads: int

    def to_json(self) -> dict[str, object]:
        """The ledger as plain data."""
        return asdict(self)


def keep_ledger(
    config: ModelConfig,
    *,
    parameters: int,
    images_seen: int,
    speed: Sequence[Record],
    device: torch.device,
    ranks: int,
    flops_an_image: int | None = None,
) -> Ledger:
    """Settle what a run cost, from its log of speeds; `flops_an_image` are of the forward pass, if not the model's."""
    flops = TRAINING_FACTOR * (sum(forward_flops(config).values()) if flops_an_image is None else flops_an_image)
    rates = [value for record in speed if isinstance(value := record.get("images_per_second"), float)]
    waits = [value for record in speed if isinstance(value := record.get("waiting"), float)]
    rate = median(rates) if rates else None
    peak = peak_flops(device) * ranks
    return Ledger(
        parameters=parameters,
        images_seen=images_seen,
        flops_an_image=flops,
        exaflops=flops * images_seen / EXA,
        seconds=images_seen * mean(1 / rate for rate in rates) if rates else None,
        images_per_second=rate,
        waiting=sum(waits) / len(waits) if waits else None,
        flops_a_second=rate * flops if rate else None,
        peak_flops_a_second=peak,
        utilisation=rate * flops / peak if rate else None,
        device=str(device),
        ranks=ranks,
        threads=torch.get_num_threads(),
    )


def operations(objective: ObjectiveConfig, config: ModelConfig) -> int:
    """The operations of one forward pass in training: those of the model, or of what is around it to pre-train it.

    An autoencoder's encoder sees a part of the patches, its decoder all of them; its head reads the hidden ones.

    >>> b16 = ViTConfig(classes=0)
    >>> whole, seen = (operations(ObjectiveConfig(name=name), b16) for name in ("supervised", "autoencoder"))
    >>> round(seen / whole, 2)
    0.56
    """
    if objective.labelled or not isinstance(config, ViTConfig):
        return sum(forward_flops(config).values())
    pixels = config.channels * math.prod(pair(config.patch_size))
    if objective.name == "masked":
        asked = round(objective.masked.corrupted * config.patches)
        questions, answered = answers(objective.masked.target, config)
        return sum(forward_flops(config).values()) + dense(asked, config.width, questions * answered)
    decoder = objective.autoencoder
    visible = int(config.patches * (1 - decoder.hidden))
    height, width = pair(config.patch_size)
    part = replace(config, image_size=(height, width * visible))  # any grid of as many patches
    whole = replace(
        config,
        width=decoder.width,
        depth=decoder.depth,
        heads=decoder.heads,
        mlp_dim=4 * decoder.width,
        positions=PositionConfig(kind="none"),
        pooling="mean",
        tokens=TokenConfig(registers=config.prefix),
        head=HeadConfig(),
    )
    embedding = dense(config.patches - visible, pixels, config.width)
    decoding = forward_flops(whole) | {"patch embedding": dense(config.prefix + visible, config.width, decoder.width)}
    predicted = dense(config.patches - visible, decoder.width, pixels)
    return sum(forward_flops(part).values()) + embedding + sum(decoding.values()) + predicted


@torch.no_grad()
def peak_flops(device: torch.device, *, side: int = 1024, repeats: int = 5) -> float:
    """The best rate at which this device multiplies float32 matrices, measured in a moment."""
    left, right = (torch.ones(side, side, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        (left @ right)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best
