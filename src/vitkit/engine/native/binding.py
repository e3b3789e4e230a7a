"""A compiled library goes in, its functions with their types come out: the Python side of engine.cpp and model.h."""

import ctypes
from functools import cache
from pathlib import Path

FLOATS = ctypes.POINTER(ctypes.c_float)


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Sizes(ctypes.Structure):
    """`VitkitSizes` of model.h."""

    _fields_ = (
        *_fields("channels image_height image_width patch_height patch_width", ctypes.c_int32),
        *_fields("width depth heads mlp_dim prefix class_tokens", ctypes.c_int32),
        *_fields("pooling activation norm_first pre_logits classes", ctypes.c_int32),
        ("norm_epsilon", ctypes.c_float),
    )


class LayerWeights(ctypes.Structure):
    """`VitkitLayer` of model.h."""

    _fields_ = (
        *_fields("positions norm1_weight norm1_bias qkv_weight qkv_bias", FLOATS),
        *_fields("q_norm_weight q_norm_bias k_norm_weight k_norm_bias", FLOATS),
        *_fields("proj_weight proj_bias scale1 norm2_weight norm2_bias", FLOATS),
        *_fields("fc1_weight fc1_bias fc2_weight fc2_bias scale2", FLOATS),
    )


class ModelWeights(ctypes.Structure):
    """`VitkitWeights` of model.h."""

    _fields_ = (
        *_fields("cosine sine start patch_weight norm_weight norm_bias", FLOATS),
        *_fields("pre_logits_weight pre_logits_bias head_weight head_bias", FLOATS),
    )


@cache
def bind(path: Path) -> ctypes.CDLL:
    """The library at a path, with the types of its functions; other threads run while it works."""
    library = ctypes.CDLL(str(path))
    library.vitkit_create.restype = ctypes.c_void_p
    library.vitkit_create.argtypes = (
        ctypes.POINTER(Sizes),
        ctypes.POINTER(ModelWeights),
        ctypes.POINTER(LayerWeights),
        ctypes.c_int,
    )
    library.vitkit_run.restype = ctypes.c_int
    library.vitkit_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    )
    library.vitkit_bytes.restype = ctypes.c_size_t
    library.vitkit_bytes.argtypes = (ctypes.c_void_p,)
    library.vitkit_destroy.restype = None
    library.vitkit_destroy.argtypes = (ctypes.c_void_p,)
    library.vitkit_instructions.restype = ctypes.c_char_p
    library.vitkit_instructions.argtypes = ()
    return library
