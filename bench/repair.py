"""Repair of an installed torchvision, which timm and transformers import."""

import importlib
import sys
from functools import cache
from importlib.util import find_spec

import torch


@cache
def repair_torchvision() -> torch.library.Library | None:
    """Make an installed torchvision importable that was built for another torch; timm and transformers import it.

    Such a torchvision misses two of its operators. Nothing here runs them, so it is enough that they are declared;
    the declaration lasts as long as the library that is returned, and the cache keeps that.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except Exception:  # a mismatch shows in many ways; what is still wrong after this shows at the next import
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None
