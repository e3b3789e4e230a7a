"""Choice of the fastest engine for a model, a precision and a device.

On the CPU this is the native engine. Where it cannot be built or does not support the model, torch with packed layers;
where torch cannot pack, the eager model. On a GPU it is torch.compile.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch

from vitkit.core.cache_dir import HINT, cache_unwritable_reason
from vitkit.core.environment import limit_threads
from vitkit.core.errors import VitkitError, summarize
from vitkit.inference.engine import CPU, Engine, ModuleEngine, Precision, compiled_engine, eager_engine
from vitkit.inference.native.encoder import NativeEngine, unsupported_reason
from vitkit.inference.native.library import STORAGE_HINT, build_library, find_compiler, is_built, storage_obstacle
from vitkit.inference.packed import packed_engine, packing_unavailable_reason
from vitkit.inference.token_merging import TokenMergingViT, check_merging
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model

EngineKind = Literal["native", "packed", "compiled", "eager"]
BUILD_ERRORS = (VitkitError, OSError)
Report = Callable[[str], None]
"""Receives one-line status messages."""


class SelectedEngine(NamedTuple):
    """The fastest engine, and why it is not a faster one, or None if it is the fastest kind for the device."""

    engine: Engine
    fallback_reason: str | None


def select_engine(
    model: Model, *, precision: Precision = "fp32", device: torch.device | str = CPU, merge: int = 0
) -> SelectedEngine:
    """Create the fastest engine for a model. In fp32 its logits are within 1e-4 of the eager model's.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, num_classes=10, settings={"depth": 1}).eval()
    >>> select_engine(model, merge=4).fallback_reason
    'the native engine does not support token merging'
    """
    check_merging(model, merge)
    limit_threads()
    device = torch.device(device)
    if device.type != "cpu":
        return SelectedEngine(apply_merging(compiled_engine(model, precision=precision, device=device), merge), None)
    reason = native_unsupported_reason(model, precision=precision, merge=merge)
    if reason is None:
        try:
            if (failure := try_build_native()) is None:
                return SelectedEngine(NativeEngine(model, precision=precision), None)
        except BUILD_ERRORS as error:  # built, but it cannot be loaded or there is not enough memory
            failure = format_error(error)
        reason = f"the native engine is not available: {failure}"
    engine = apply_merging(packed_engine(model, precision=precision), merge)
    packing = packing_unavailable_reason()
    return SelectedEngine(engine, reason if packing is None else f"{reason}; {packing}")


def native_unsupported_reason(model: Model, *, precision: Precision, merge: int = 0) -> str | None:
    """Return why the native engine does not support a model, or None if it does."""
    return "the native engine does not support token merging" if merge else unsupported_reason(model, precision)


def needs_native_build(model: Model, *, precision: Precision, merge: int = 0) -> bool:
    """Return whether selecting an engine will first compile the native one, which takes a while once per machine."""
    is_supported = native_unsupported_reason(model, precision=precision, merge=merge) is None
    return is_supported and not is_built() and native_build_obstacle() is None


def build_native_if_needed(
    model: Model, *, precision: Precision, device: torch.device, merge: int = 0, report: Report
) -> None:
    """Compile the native engine if `select_engine` would, and report it with its duration."""
    if device.type != "cpu" or not needs_native_build(model, precision=precision, merge=merge):
        return
    report("building the native engine for this machine (once) …")
    start = time.monotonic()
    failure = try_build_native()
    report(f"built in {time.monotonic() - start:.0f} s" if failure is None else f"build failed: {failure}")


def native_build_obstacle() -> str | None:
    """Return why the native engine cannot be compiled, as far as is known without trying; None if it can."""
    try:
        compiler = find_compiler()
    except BUILD_ERRORS as error:
        return format_error(error)
    if compiler is None:
        return "no C++ compiler"
    if reason := cache_unwritable_reason() or storage_obstacle():
        return reason if HINT in reason else f"{reason}; {STORAGE_HINT}"
    return None


@cache
def try_build_native() -> str | None:
    """Compile the native engine if needed. Return the reason of a failure, which is not tried again."""
    try:
        build_library()
    except BUILD_ERRORS as error:
        return format_error(error)
    return None


def format_error(error: Exception) -> str:
    """Return message and hint of an error in one line."""
    hint = error.hint if isinstance(error, VitkitError) else None
    return f"{summarize(error)}; {hint}" if hint else summarize(error)


def describe_native_engine() -> str:
    """Return whether the native engine is built or can be, for display."""
    if is_built():
        failure = try_build_native()
        return (
            "built for this machine" if failure is None else f"cannot be used: {failure}; models run on torch, slower"
        )
    if reason := native_build_obstacle():
        return f"cannot be built: {reason}; models run on torch, slower"
    return "not built yet; the first prediction builds it"


def apply_merging(engine: ModuleEngine, merge: int) -> ModuleEngine:
    """Make an engine merge `merge` tokens per layer, in place."""
    if merge and isinstance(engine.module, ViT):
        engine.module = TokenMergingViT(engine.module, merge=merge)
        engine.name = f"{engine.name}, merging {merge} token{'s' if merge > 1 else ''} per layer"
    return engine


def available_engines(model: Model, *, precision: Precision, device: torch.device = CPU) -> tuple[EngineKind, ...]:
    """Return the kinds of engine that can run a model on a device in a precision, the eager one first."""
    eager: tuple[EngineKind, ...] = () if precision == "int8" else ("eager",)
    if device.type != "cpu":
        return eager and (*eager, "compiled")
    packs = precision == "int8" or packing_unavailable_reason() is None
    builds = native_unsupported_reason(model, precision=precision) is None and try_build_native() is None
    return (*eager, *(("packed",) if packs else ()), *(("native",) if builds else ()))


def create_engine(kind: EngineKind, model: Model, *, precision: Precision, device: torch.device = CPU) -> Engine:
    """Create an engine of a given kind, whether or not it is the fastest."""
    if kind == "native":
        return NativeEngine(model, precision=precision)
    if kind == "packed":
        return packed_engine(model, precision=precision)
    if kind == "compiled":
        return compiled_engine(model, precision=precision, device=device, warmup_batches=0)
    return eager_engine(model, precision=precision, device=device)
