"""Other people's libraries, imported for comparison; a test is skipped, with a reason, where one is absent.

A CUDA build of torchvision cannot load its operators next to a CPU build of torch, and then fails to import
because two schemas that it expects are missing; timm and parts of transformers fail with it. None of the
comparisons runs these operators, so declaring the schemas is enough.
"""

import importlib
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

_SCHEMAS = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}
_kept_alive: list[torch.library.Library] = []  # a library's schemas go when it goes


def _import(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@cache
def _mend_torchvision() -> None:
    """Make a torchvision that is there but cannot find its operators importable; leave any other as it is."""
    if find_spec("torchvision") is None:
        return
    try:
        _import("torchvision")
    except Exception:  # a broken wheel fails in many ways; whoever imports it next reports what remains
        for half_imported in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[half_imported]
        library = torch.library.Library("torchvision", "FRAGMENT")
        _kept_alive.append(library)
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)


def _import_or_skip(name: str) -> Any:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    _mend_torchvision()
    try:
        return _import(name)
    except Exception as error:
        pytest.skip(f"{name} is installed but cannot be imported: {error}")


def import_timm() -> Any:
    return _import_or_skip("timm")


def import_transformers() -> Any:
    return _import_or_skip("transformers")


def import_torchvision() -> Any:
    return _import_or_skip("torchvision")
