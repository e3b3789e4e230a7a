"""Errors for arguments that users of other libraries give to methods."""

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from vitkit.core.errors import ArgumentError

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


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
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            for name in kwargs:
                if name in hints:
                    raise ArgumentError(f"{method.__name__}() has no argument {name!r}", hint=hints[name])
            return method(*args, **kwargs)

        return checked

    return decorate
