"""vitkit: the Vision Transformer of "An Image is Worth 16x16 Words", whole and exact.

>>> import vitkit
>>> model = vitkit.create("B/16", classes=10, device="meta")
>>> vitkit.models("L/*")
['L/16', 'L/32']
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.checkpoints.ready import load, save
    from vitkit.predict.predictor import Predictor
    from vitkit.zoo.lookup import create, models

__all__ = ["Predictor", "create", "load", "models", "save"]

# Importing vitkit imports no torch: a name is fetched when it is first used.
_HOMES = {
    "Predictor": "vitkit.predict.predictor",
    "create": "vitkit.zoo.lookup",
    "load": "vitkit.checkpoints.ready",
    "models": "vitkit.zoo.lookup",
    "save": "vitkit.checkpoints.ready",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module vitkit has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
