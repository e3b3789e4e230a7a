"""A model and what a run did go in, what it cost comes out: operations, speed, and how much of the machine was used."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import torch

from vitkit.core.runlog import Record
from vitkit.zoo.cost import EXA, TRAINING_FACTOR
from vitkit.zoo.flops import forward_flops
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
) -> Ledger:
    """Settle what a run cost, from its log of speeds."""
    flops = TRAINING_FACTOR * sum(forward_flops(config).values())
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
