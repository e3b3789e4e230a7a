"""Errors that say what was expected, what came, and what to do; the command line prints them as two lines."""

import math
from collections.abc import Iterable
from difflib import get_close_matches


class VitkitError(Exception):
    """A failure the user can act on. Every error vitkit raises on purpose is one of these.

    >>> raise VitkitError("the width must be divisible by the heads", expected="a multiple of 12", got=770)
    Traceback (most recent call last):
    vitkit.core.errors.VitkitError: the width must be divisible by the heads (expected a multiple of 12, got 770)
    """

    def __init__(self, message: str, *, expected: object = None, got: object = None, hint: str | None = None) -> None:
        self.message = message
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        comparison = [
            f"{word} {value}" for word, value in (("expected", self.expected), ("got", self.got)) if value is not None
        ]
        return f"{self.message} ({', '.join(comparison)})" if comparison else self.message


class ConfigError(VitkitError):
    """A configuration that cannot be: an unknown key, a wrong type, sizes that do not fit together."""


class InputError(VitkitError):
    """An image or tensor that the model cannot take."""


class DataError(VitkitError):
    """A data set that cannot be read, or an image file that is not what it says it is."""


class WeightsError(VitkitError):
    """Weights or a checkpoint that are damaged, or do not fit the model."""


class TrainingError(VitkitError):
    """A run that cannot go on, with its last good state saved."""


class UnknownNameError(VitkitError):
    """A model, recipe or format that does not exist, with the nearest that does."""


def check_share(name: str, share: int | float) -> None:
    """Refuse a share that leaves nothing, or is less than nothing.

    >>> check_share("dropout.dense", 1.5)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: dropout.dense is not a share (expected 0 ≤ share < 1, got 1.5)
    """
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"{name} is not a share", expected="0 ≤ share < 1", got=share)


def check_positive(name: str, number: int | float) -> None:
    """Refuse a number that must be more than zero.

    >>> check_positive("block.norm_eps", 0.0)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: block.norm_eps must be positive (expected more than 0, got 0.0)
    """
    if not number > 0:
        raise ConfigError(f"{name} must be positive", expected="more than 0", got=number)


def check_not_negative(name: str, number: int | float) -> None:
    """Refuse a number that must be zero or more, and finite.

    >>> check_not_negative("engine.merge", -1)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: engine.merge cannot be negative (expected 0 or more, got -1)
    """
    if not 0 <= number < math.inf:
        raise ConfigError(f"{name} cannot be negative", expected="0 or more", got=number)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The nearest known name as a hint, or None where nothing is near.

    >>> did_you_mean("B/61", ["B/16", "L/16"])
    'did you mean B/16?'
    """
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    nearest = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return f"did you mean {by_lower_case[nearest[0]]}?" if nearest else None
