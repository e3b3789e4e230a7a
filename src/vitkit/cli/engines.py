"""How commands choose an engine: options go in; a choice, and what is to be said of the engine, come out."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click

from vitkit.cli.describing import counted
from vitkit.cli.output import safe_text

if TYPE_CHECKING:
    import torch

    from vitkit.checkpoints.ready import Loaded
    from vitkit.engine.agreement import Agreement
    from vitkit.engine.engine import Precision
    from vitkit.predict.predictor import Predictor
    from vitkit.zoo.lookup import Model

Command = TypeVar("Command", bound=Callable[..., object])
META = "vitkit.cli.engines"


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """What a user asks of an engine; the default is the paper's arithmetic, with all tokens."""

    precision: "Precision" = "fp32"
    merge: int = 0
    calibration: str | None = None

    @property
    def changes_answers(self) -> bool:
        """Whether answers can differ from those of the model as written."""
        return self.precision != "fp32" or self.merge > 0

    def identity(self) -> dict[str, object]:
        """What tells one question from another: nothing by default, so that older files of answers stay valid.

        >>> EngineChoice(precision="int8").identity(), EngineChoice().identity()
        ({'precision': 'int8', 'merge': 0}, {})
        """
        return {"precision": self.precision, "merge": self.merge} if self.changes_answers else {}


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    context.meta.setdefault(META, {})[parameter.name] = value


def engine_options(command: Command) -> Command:
    """Give a command `--precision` and `--merge`; `asked()` has them."""
    for option in (
        click.option(
            "--precision",
            type=click.Choice(["fp32", "bf16", "int8"]),
            default="fp32",
            show_default=True,
            expose_value=False,
            callback=_remember,
            help="What to multiply in; all but fp32 trade exactness for speed.",
        ),
        click.option(
            "--merge",
            type=click.IntRange(min=0),
            metavar="R",
            default=0,
            show_default=True,
            expose_value=False,
            callback=_remember,
            help="Tokens to merge in every layer (ToMe): fewer, so faster.",
        ),
    )[::-1]:
        command = option(command)
    return command


calibration_option = click.option(
    "--calibration",
    metavar="PLACE",
    expose_value=False,
    callback=_remember,
    help="Images to measure agreement with fp32 on; without, the first 64 that are asked about.",
)


def asked() -> EngineChoice:
    """What the options of the running command say."""
    return EngineChoice(**click.get_current_context().meta.get(META, {}))


def ready_predictor(model: str, choice: EngineChoice, *, device: "torch.device", batch_size: int) -> "Predictor":
    """The predictor of a model; if its engine has to be built first, that is said, as is why it is no faster one."""
    from vitkit.checkpoints.ready import load
    from vitkit.predict.predictor import Predictor

    loaded: Loaded = load(model)
    build_if_needed(loaded, choice, device=device)
    predictor = Predictor(loaded, device=device, batch_size=batch_size, precision=choice.precision, merge=choice.merge)
    if predictor.remark is not None:
        tell(f"engine: {predictor.engine.name}; {predictor.remark}")
    return predictor


def build_if_needed(model: "Model", choice: EngineChoice, *, device: "torch.device") -> None:
    """Compile the native engine where it will be used and is not there yet, and say so and how long it took."""
    from vitkit.engine.choose import build_failure, needs_building

    if device.type != "cpu" or not needs_building(model, precision=choice.precision, merge=choice.merge):
        return
    tell("building the fast engine for this machine, once …")
    start = time.monotonic()
    failure = build_failure()
    tell(f"built in {time.monotonic() - start:.0f} s" if failure is None else "it could not be built")


def tell(sentence: str) -> None:
    """A remark on stderr; rich is not needed for it, and would be slow to import for a single image."""
    click.echo(safe_text(sentence), err=True)


def tell_agreement(found: "Agreement", choice: EngineChoice) -> None:
    """Say how far the answers are those of fp32."""
    merging = f", {counted(choice.merge, 'token')} merged a layer" if choice.merge else ""
    tell(f"{choice.precision}{merging} beside fp32 as written: {found}")
