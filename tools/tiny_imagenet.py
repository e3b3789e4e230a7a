"""Divide Tiny-ImageNet into the classes that the embedded weights learn from and those that choose between candidates.

    python tools/tiny_imagenet.py tiny-imagenet-200 OUT

Every tenth class, in the order of their names, is left out of OUT/learn (train and val directories) and goes into
OUT/choose, where few-shot accuracy compares candidates. Files are hard links where possible.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    """Create both datasets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="publisher's directory with train, val and wnids.txt")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    classes = sorted(path.name for path in (arguments.source / "train").iterdir() if path.is_dir())
    left_out = set(classes[9::10])
    for split, label, path in list_images(arguments.source):
        target = arguments.out / ("choose" if label in left_out else "learn") / split / label / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        link(path, target)


def list_images(source: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield split, class and path of every labeled image."""
    for path in sorted((source / "train").glob("*/images/*.JPEG")):
        yield "train", path.parts[-3], path
    for line in (source / "val" / "val_annotations.txt").read_text().splitlines():
        name, label, *_ = line.split("\t")
        yield "val", label, source / "val" / "images" / name


def link(path: Path, target: Path) -> None:
    """Link a file, or copy it to another file system."""
    if target.exists():
        return
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


if __name__ == "__main__":
    main()
