"""Imports of timm, transformers and torchvision for comparisons; a test is skipped if one is not available.

A CUDA build of torchvision cannot load its operators next to a CPU build of torch, and fails to import because two
schemas are missing; timm and parts of transformers fail with it. The comparisons do not run these operators, so
declaring the schemas is enough.
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
_libraries: list[torch.library.Library] = []  # schemas are removed with their library object


def _import(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@cache
def fix_torchvision() -> None:
    """Declare the missing schemas if torchvision is installed but cannot be imported."""
    if find_spec("torchvision") is None:
        return
    try:
        _import("torchvision")
    except Exception:  # a broken wheel fails in many ways; the next import reports what remains
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)


def _import_or_skip(name: str) -> Any:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    fix_torchvision()
    try:
        return _import(name)
    except Exception as error:
        pytest.skip(f"{name} is installed but cannot be imported: {error}", allow_module_level=True)


def import_timm() -> Any:
    return _import_or_skip("timm")


def import_transformers() -> Any:
    return _import_or_skip("transformers")


def import_torchvision() -> Any:
    return _import_or_skip("torchvision")


def import_lightning() -> Any:
    return _import_or_skip("lightning")
