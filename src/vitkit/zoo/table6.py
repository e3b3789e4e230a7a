"""Table 6 of the paper goes in row by row, our own counts of the same runs come out beside it.

The paper's ResNet rows are matched only when products with a convolution's zero padding are left out: that is how
its accelerator compiler counts, and why both counts are given. docs/table6.md has the whole comparison.
"""

from dataclasses import dataclass

from vitkit.zoo.cost import EXA, TRAINING_FACTOR
from vitkit.zoo.flops import forward_flops
from vitkit.zoo.lookup import configure

JFT_IMAGES = 303_000_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pre-training run on JFT-300M: what the paper says it cost, and what we count, in exaFLOPs."""

    model: str
    epochs: int
    paper: float

    @property
    def counted(self) -> float:
        """All products, as every count in vitkit."""
        return self._exaflops(padding=True)

    @property
    def counted_without_padding(self) -> float:
        """Products with zero padding left out, as the paper's own count seems to be."""
        return self._exaflops(padding=False)

    def _exaflops(self, *, padding: bool) -> float:
        flops = sum(forward_flops(configure(self.model), padding=padding).values())
        return TRAINING_FACTOR * flops * JFT_IMAGES * self.epochs / EXA


TABLE_6 = tuple(
    Row(model=model, epochs=epochs, paper=float(paper))
    for model, epochs, paper in (
        ("B/32", 7, 55),
        ("B/16", 7, 224),
        ("L/32", 7, 196),
        ("L/16", 7, 783),
        ("L/16", 14, 1567),
        ("H/14", 14, 4262),
        ("BiT-R50x1", 7, 50),
        ("BiT-R50x2", 7, 199),
        ("BiT-R101x1", 7, 96),
        ("BiT-R152x1", 7, 141),
        ("BiT-R152x2", 7, 563),
        ("BiT-R152x2", 14, 1126),
        ("BiT-R200x3", 14, 3306),
        ("R50+B/32", 7, 106),
        ("R50+B/16", 7, 274),
        ("R50+L/32", 7, 246),
        ("R50+L/16", 7, 859),
        ("R50+L/16", 14, 1668),
    )
)
