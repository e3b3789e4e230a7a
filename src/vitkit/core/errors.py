"""Exceptions with a message, the expected and actual value, and a hint.

The command line prints them as two lines.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class VitkitError(Exception):
    """Base class of all errors that vitkit raises on purpose.

    Its text has two lines: what is wrong, and what to do.

    >>> print(VitkitError("no such file", expected="a run", got="photos", hint="see vitkit models"))
    no such file (expected a run, got photos)
    hint: see vitkit models
    """

    def __init__(self, message: str, *, expected: object = None, got: object = None, hint: str | None = None) -> None:
        self.message = message
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(str(self))

    @property
    def summary(self) -> str:
        """The message with the expected and the actual value, in one line without the hint."""
        values = (("expected", self.expected), ("got", self.got))
        details = [f"{label} {value}" for label, value in values if value is not None]
        return f"{self.message} ({', '.join(details)})" if details else self.message

    def __str__(self) -> str:
        return f"{self.summary}\nhint: {self.hint}" if self.hint else self.summary


class ConfigError(VitkitError, ValueError):
    """Invalid configuration: an unknown key, a wrong type, or values that do not fit together."""


class ArgumentError(ConfigError, TypeError):
    """Argument that a public function does not have."""


class InputError(VitkitError, ValueError):
    """Image or tensor that the model cannot take."""


class DataError(VitkitError, ValueError):
    """Dataset that cannot be read, or a damaged image file."""


class WeightsError(VitkitError, ValueError):
    """Weights or a checkpoint that are damaged or do not fit the model."""


class TrainingError(VitkitError):
    """Run that cannot continue; its last good state is saved."""


class UnknownNameError(VitkitError, LookupError):
    """Name of a model, recipe or format that does not exist; the hint suggests the nearest."""


class MissingDependencyError(VitkitError, ImportError):
    """Optional library that is not installed; the hint names the extra that installs it."""


class VitkitWarning(UserWarning):
    """Warning about something that needs action."""


def summarize(error: BaseException) -> str:
    """Return the text of an error in one line, without its hint.

    >>> summarize(DataError("no images", hint="check the path")), summarize(OSError("disk full"))
    ('no images', 'disk full')
    """
    return error.summary if isinstance(error, VitkitError) else str(error)


def check_fraction(name: str, fraction: int | float, *, allow_zero: bool = True, allow_one: bool = False) -> None:
    """Raise unless a number is between 0 and 1; of these two, by default only 0 is allowed."""
    is_allowed = {0.0: allow_zero, 1.0: allow_one}.get(fraction, 0.0 < fraction < 1.0)
    if not is_allowed:
        expected = f"0 {'≤' if allow_zero else '<'} fraction {'≤' if allow_one else '<'} 1"
        raise ConfigError(f"{name} is not a fraction", expected=expected, got=fraction)


def check_positive(name: str, number: int | float | None) -> None:
    """Raise unless a number is more than zero, or None: an optional setting that is not set."""
    if number is not None and not number > 0:
        raise ConfigError(f"{name} must be positive", expected="more than 0", got=number)


def check_not_negative(name: str, number: int | float) -> None:
    """Raise unless a number is finite and at least zero."""
    if not 0 <= number < math.inf:
        problem = "cannot be negative" if number < 0 else "must be finite"
        raise ConfigError(f"{name} {problem}", expected="0 or more", got=number)


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """Return a hint that suggests the nearest candidate, or None if none is similar.

    >>> did_you_mean("B/61", ["B/16", "L/16"])
    'did you mean B/16?'
    """
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    nearest = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return f"did you mean {by_lower_case[nearest[0]]}?" if nearest else None


def explain_arguments(
    hints: Mapping[str, str],
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Return a decorator of a method that raises an `ArgumentError` with a hint for some unknown arguments.

    >>> @explain_arguments({"img_size": "use image_size="})
    ... def resize(image_size: int) -> int:
    ...     return image_size
    >>> resize(img_size=32)
    Traceback (most recent call last):
    vitkit.core.errors.ArgumentError: resize() has no argument 'img_size'
    hint: use image_size=
    """

    def decorate(method: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @functools.wraps(method)
        def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            for name in kwargs:
                if name in hints:
                    raise ArgumentError(f"{method.__name__}() has no argument {name!r}", hint=hints[name])
            return method(*args, **kwargs)

        return wrapper

    return decorate
