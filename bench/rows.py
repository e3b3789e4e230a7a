"""What is measured: one row for each model, pass, precision, batch size and form of GELU."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from peers import Activation

from vitkit.zoo.flops import forward_flops
from vitkit.zoo.lookup import configure

Pass = Literal["forward", "forward+backward"]
Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

MODELS = ("Ti/16", "S/16", "B/16")
FORWARD_BATCHES = (1, 8)
TRAINING_BATCH = {"Ti/16": 8, "S/16": 8, "B/16": 4}
"""B/16 trains on fewer images, so that a whole run takes a quarter of an hour on two cores."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: every contender computes the same function on the same images."""

    model: str
    run: Pass
    precision: Precision
    batch: int
    activation: Activation = "gelu_erf"

    def __str__(self) -> str:
        return f"{self.title} · {self.run} · {self.precision} · batch {self.batch}"

    @property
    def title(self) -> str:
        """The model, and its GELU where that is not the peers' usual one."""
        return self.model if self.activation == "gelu_erf" else f"{self.model}, tanh GELU"

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.run == "forward+backward"

    @property
    def gflops(self) -> float:
        """Multiplications and additions of one run, in units of 10^9."""
        forward = sum(forward_flops(configure(self.model)).values()) * self.batch / 1e9
        return 3 * forward if self.trains else forward

    def as_dict(self) -> dict[str, Any]:
        """The row's fields, for a JSON file."""
        return asdict(self)


def rows_of(models: Sequence[str]) -> list[Row]:
    """Every row, model by model; the paper's tanh form of GELU comes after the peers' erf form."""
    rows = []
    for model in models:
        erf = [row for precision in PRECISIONS for row in rows_in(model, precision)]
        rows += erf + [replace(row, activation="gelu_tanh") for row in rows_in(model, "fp32") if row.batch > 1]
    return rows


def rows_in(model: str, precision: Precision) -> list[Row]:
    """The rows of one model in one precision."""
    forward = [Row(model=model, run="forward", precision=precision, batch=batch) for batch in FORWARD_BATCHES]
    return [*forward, Row(model=model, run="forward+backward", precision=precision, batch=TRAINING_BATCH[model])]
