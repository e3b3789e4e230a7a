"""Generated photos, tiny runs, and the command line run in this process."""

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
    "evaluation.every": 2,
    "logging.log_every": 1,
}
TINY = SHAPE | LENGTH
"""Settings of a run that takes a fraction of a second; later assignments of a key override earlier ones."""


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]

    @property
    def hints(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("hint:")]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process and returns their results."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> CommandResult:
        self.capture.readouterr()
        code = main([str(argument) for argument in arguments])
        out, stderr = self.capture.readouterr()
        return CommandResult(code, out, stderr)

    def train(self, recipe: object, out: object, *options: str, **settings: object) -> CommandResult:
        return self("train", recipe, "--out", out, *options, *assigned(TINY, settings))

    def finetune(self, weights: object, data: object, out: object, *options: str, **settings: object) -> CommandResult:
        return self("finetune", weights, data, "--out", out, *options, *assigned(LENGTH, settings))


def assigned(defaults: Mapping[str, object], settings: Mapping[str, object]) -> list[str]:
    """Return assignments; `section__key` stands for section.key, and None removes a default."""
    chosen = dict(defaults) | {key.replace("__", "."): value for key, value in settings.items()}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def photos(folder: Path, classes: Sequence[str] = ("cat", "dog"), *, each: int = 20, side: int = 20) -> Path:
    """Write a directory of photos per class, each class with its own color."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = np.random.default_rng([number, index]).integers(0, 120, (side, side, 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{index:02}.png")
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Return the checksum of every file of a directory, and all subdirectories."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }
