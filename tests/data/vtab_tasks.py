"""Small VTAB-1k tasks in the layout of the release."""

from pathlib import Path

import numpy as np
from PIL import Image


def task_folder(
    place: Path, *, num_classes: int = 2, train: int = 4, val: int = 2, test: int = 3, seed: int = 0
) -> Path:
    """One task in the release's layout: images, and lists of paths and labels."""
    rng = np.random.default_rng(seed)
    lists: dict[str, list[str]] = {}
    for split, count in (("train800", train), ("val200", val), ("test", test)):
        (place / "images" / split).mkdir(parents=True)
        for number in range(count):
            name = f"images/{split}/{number:06}.jpg"
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place / name)
            lists.setdefault(split, []).append(f"{name} {number % num_classes}")
    lists["train800val200"] = lists["train800"] + lists["val200"]
    for name, lines in lists.items():
        (place / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place
