"""Rows of the benchmark: one per model, pass, precision, batch size and form of GELU."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from peers import Activation

from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import configure

Pass = Literal["forward", "forward+backward"]
Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

MODELS = ("Ti/16", "S/16", "B/16")
FORWARD_BATCHES = (1, 8)
TRAINING_BATCH = {"Ti/16": 8, "S/16": 8, "B/16": 4}
"""B/16 trains on fewer images, so that a whole run takes a quarter of an hour on two cores."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, in which all candidates compute the same function on the same images."""

    model: str
    run: Pass
    precision: Precision
    batch: int
    activation: Activation = "gelu_erf"

    def __str__(self) -> str:
        return f"{self.title} · {self.run} · {self.precision} · batch {self.batch}"

    @property
    def title(self) -> str:
        """Return the model, with its GELU if it is not that of the peers."""
        return self.model if self.activation == "gelu_erf" else f"{self.model}, tanh GELU"

    @property
    def trains(self) -> bool:
        """Return whether gradients are computed."""
        return self.run == "forward+backward"

    @property
    def gflops(self) -> float:
        """Return the operations of one run in units of 10^9."""
        forward = sum(count_forward_flops(configure(self.model)).values()) * self.batch / 1e9
        return 3 * forward if self.trains else forward

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self)


def all_rows(models: Sequence[str]) -> list[Row]:
    """Yield all rows model by model; the paper's tanh GELU follows the erf GELU of the peers."""
    rows = []
    for model in models:
        erf = [row for precision in PRECISIONS for row in model_rows(model, precision)]
        rows += erf + [replace(row, activation="gelu_tanh") for row in model_rows(model, "fp32") if row.batch > 1]
    return rows


def model_rows(model: str, precision: Precision) -> list[Row]:
    """Return the rows of one model in one precision."""
    forward = [Row(model=model, run="forward", precision=precision, batch=batch) for batch in FORWARD_BATCHES]
    return [*forward, Row(model=model, run="forward+backward", precision=precision, batch=TRAINING_BATCH[model])]
