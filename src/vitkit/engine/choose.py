"""A model, a precision and a device go in, the fastest engine that can be had comes out, and why it is no faster one.

On the CPU that is the native engine, compiled once for this machine; where it cannot be, torch with prepacked layers;
and where torch cannot pack, the model as written. On a GPU it is torch.compile.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch

from vitkit.core.errors import VitkitError
from vitkit.engine.cache import reason_against_keeping
from vitkit.engine.compiled import compiled
from vitkit.engine.engine import CPU, Engine, Precision
from vitkit.engine.merging import Merging, check_merging
from vitkit.engine.native.build import find_compiler, is_built, library
from vitkit.engine.native.encoder import native, reason_against
from vitkit.engine.prepacked import prepacked, reason_against_packing
from vitkit.engine.written import ModuleEngine, written
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model

Kind = Literal["native", "prepacked", "compiled", "written"]
FAILURES = (VitkitError, OSError)
"""What making the native engine may end in."""


class Chosen(NamedTuple):
    """An engine, and in words for people why nothing faster was taken, if something was wanted."""

    engine: Engine
    remark: str | None


def engine_for(
    model: Model, *, precision: Precision = "fp32", device: torch.device | str = CPU, merge: int = 0
) -> Engine:
    """The fastest engine for a model here. In fp32 its logits are those of the model as written, within 1e-4.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, classes=10, settings=["depth=1"]).eval()
    >>> engine_for(model, precision="int8").answer(torch.rand(2, 3, 32, 32))[1].shape
    torch.Size([2, 10])
    """
    return chosen(model, precision=precision, device=device, merge=merge).engine


def chosen(model: Model, *, precision: Precision = "fp32", device: torch.device | str = CPU, merge: int = 0) -> Chosen:
    """The fastest engine, and what stood in the way of a faster one.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, classes=10, settings=["depth=1"]).eval()
    >>> chosen(model, merge=4).remark
    'tokens are merged by torch: the native engine does not merge'
    """
    check_merging(model, merge)
    place = torch.device(device)
    if place.type != "cpu":
        return Chosen(with_merging(compiled(model, precision=precision, device=place), merge), None)
    remark = reason_against_native(model, precision=precision, merge=merge)
    if remark is None:
        try:
            if (failure := build_failure()) is None:
                return Chosen(native(model, precision=precision), None)
        except FAILURES as error:  # it is compiled, and cannot be loaded or has no room
            failure = sentence(error)
        remark = f"the native engine could not be made: {failure}"
    engine = with_merging(prepacked(model, precision=precision), merge)
    packing = reason_against_packing()
    return Chosen(engine, remark if packing is None else f"{remark}; {packing}")


def reason_against_native(model: Model, *, precision: Precision, merge: int = 0) -> str | None:
    """Why the native engine does not take this model; None where it does, if it can be compiled."""
    if merge:
        return "tokens are merged by torch: the native engine does not merge"
    return reason_against(model, precision)


def needs_building(model: Model, *, precision: Precision, merge: int = 0) -> bool:
    """Whether the engine for a model will be compiled first, which takes a while once on a machine."""
    wanted = reason_against_native(model, precision=precision, merge=merge) is None
    return wanted and not is_ready() and reason_against_building() is None


def is_ready() -> bool:
    """Whether the native engine is compiled already."""
    try:
        return is_built()
    except FAILURES:
        return False


def reason_against_building() -> str | None:
    """Why the native engine cannot be compiled, as far as it can be told without trying; None where it can be."""
    try:
        compiler = find_compiler()
    except FAILURES as error:
        return sentence(error)
    return "no C++ compiler" if compiler is None else reason_against_keeping()


@cache
def build_failure() -> str | None:
    """Compile the native engine, if it is not; why it cannot be, where it cannot. A failure is not tried again."""
    try:
        library()
    except FAILURES as error:
        return sentence(error)
    return None


def sentence(error: Exception) -> str:
    """What went wrong and what to do about it, in one line.

    >>> sentence(VitkitError("no room", hint="make some"))
    'no room; make some'
    """
    hint = error.hint if isinstance(error, VitkitError) else None
    return f"{error}; {hint}" if hint else str(error)


def describe_native() -> str:
    """Whether the native engine is there or can be made, in words for people."""
    if is_ready():
        return "built for this machine"
    if reason := reason_against_building():
        return f"cannot be built: {reason}; torch runs models instead, and slower"
    return "not built yet; the first prediction builds it, once"


def with_merging(engine: ModuleEngine, merge: int) -> ModuleEngine:
    """The same engine, merging so many tokens in every layer."""
    if merge and isinstance(engine.module, ViT):
        engine.module = Merging(engine.module, merge=merge)
        engine.name = f"{engine.name}, {merge} token{'s' if merge > 1 else ''} merged a layer"
    return engine


def kinds(model: Model, *, precision: Precision, device: torch.device = CPU) -> tuple[Kind, ...]:
    """The engines that can run a model on a device in a precision, the model as written first.

    >>> import vitkit
    >>> kinds(vitkit.create("BiT-R50x1", device="meta"), precision="fp32")
    ('written', 'prepacked')
    """
    as_written: tuple[Kind, ...] = () if precision == "int8" else ("written",)
    if device.type != "cpu":
        return as_written and (*as_written, "compiled")
    packs = precision == "int8" or reason_against_packing() is None
    compiles = reason_against_native(model, precision=precision) is None and build_failure() is None
    return (*as_written, *(("prepacked",) if packs else ()), *(("native",) if compiles else ()))


def made(kind: Kind, model: Model, *, precision: Precision, device: torch.device = CPU) -> Engine:
    """The engine of a kind, whether or not it is the fastest.

    >>> import vitkit
    >>> made("written", vitkit.create("Ti/16", settings=["depth=1"]), precision="fp32").name
    'torch, as written'
    """
    if kind == "native":
        return native(model, precision=precision)
    if kind == "prepacked":
        return prepacked(model, precision=precision)
    if kind == "compiled":
        return compiled(model, precision=precision, device=device, patience=0)
    return written(model, precision=precision, device=device)
