"""Campaign over timm's wide architectures: equal logits, or refused."""

import tempfile
from pathlib import Path

from oracle.timm_architectures import MAX_WIDTH, TOLERANCE, compare, inspect_architecture, list_architectures
from soak.faults import Finding

from vitkit.weights.formats.timm.architectures import ARCHITECTURES


def compare_wide(folder: Path) -> Finding:
    """Compare every architecture that is wider than those of `make test`."""
    finding = Finding("files of timm give timm's logits, or are refused")
    folder.mkdir(parents=True, exist_ok=True)
    for name in list_architectures():
        inspected = inspect_architecture(name)
        if inspected is None or inspected.width <= MAX_WIDTH:
            continue
        finding.count("architectures")
        finding.expect((inspected.ours is not None) == (name in ARCHITECTURES), f"{name}: accepted or refused wrongly")
        if inspected.ours is None:
            finding.count("refused")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            difference = compare(inspected, Path(directory))
        finding.expect(difference < TOLERANCE, f"{name}: logits differ by {difference:.1e} of the largest")
    return finding
