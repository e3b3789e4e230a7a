"""Made photos, the smallest of runs, and vitkit's command line as a user meets it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from vitkit.cli.main import main

SHAPE: Mapping[str, object] = {
    "model.name": "Ti/16",
    "image_size": 16,
    "model.patch_size": 8,
    "model.settings": '["width=16","heads=2","depth=1","mlp_dim=16"]',
}
LENGTH: Mapping[str, object] = {
    "steps": 4,
    "batch_size": 8,
    "workers": 0,
    "keep.evaluate_every": 2,
    "keep.log_every": 1,
}
TINY = SHAPE | LENGTH
"""A run that takes a fraction of a second; a later assignment of the same key takes the earlier one's place."""


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    talk: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.talk.splitlines() if line.startswith("error:")]

    @property
    def hints(self) -> list[str]:
        return [line for line in self.talk.splitlines() if line.startswith("hint:")]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process, and hands back what they say."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> Said:
        self.capture.readouterr()
        code = main([str(argument) for argument in arguments])
        out, talk = self.capture.readouterr()
        return Said(code, out, talk)

    def train(self, recipe: object, out: object, *options: str, **settings: object) -> Said:
        return self("train", recipe, "--out", out, *options, *assigned(TINY, settings))

    def finetune(self, weights: object, data: object, out: object, *options: str, **settings: object) -> Said:
        return self("finetune", weights, data, "--out", out, *options, *assigned(LENGTH, settings))


def assigned(usual: Mapping[str, object], settings: Mapping[str, object]) -> list[str]:
    """Assignments; `section__key` stands for section.key, and None leaves a usual one out."""
    chosen = dict(usual) | {key.replace("__", "."): value for key, value in settings.items()}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def photos(folder: Path, classes: Sequence[str] = ("cat", "dog"), *, each: int = 20, side: int = 20) -> Path:
    """A folder of photos a class, each class of a colour of its own."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = np.random.default_rng([number, index]).integers(0, 120, (side, side, 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{index:02}.png")
    return folder


def tree(folder: Path) -> dict[str, str]:
    """What is in a folder: the checksum of every file, and all folders."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }
