"""Wrapper of public functions: limits threads, and explains wrong arguments and a lack of memory."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar, get_args, get_origin

from vitkit.api.hints import find_hint, shorten
from vitkit.core.environment import limit_threads
from vitkit.core.errors import ArgumentError, ConfigError, VitkitError, did_you_mean

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def public(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Check the arguments of each call, raise an `ArgumentError` that names the right one, and limit torch's threads.

    >>> @public
    ... def create(name: str, *, num_classes: int = 1000) -> int:
    ...     return num_classes
    >>> create("B/16", classes=10)
    Traceback (most recent call last):
    vitkit.core.errors.ArgumentError: create() has no argument 'classes'
    hint: use num_classes=10
    """
    signature = inspect.signature(function)
    lists = set(find_lists(signature))

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        for name, value in kwargs.items():
            if name not in signature.parameters:
                hint = suggest_argument(function.__name__, name, value, signature)
                raise ArgumentError(f"{function.__name__}() has no argument {name!r}", hint=hint)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = f"the signature is {function.__name__}{_short(signature)}"
            raise ArgumentError(f"{function.__name__}(): {error}", hint=hint) from None
        for name in lists & bound.arguments.keys():
            check_list(name, bound.arguments[name])
        limit_threads()
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not re.search("can't allocate memory|out of memory", str(error)):
                raise
            amount = re.search(r"allocate ([\d.]+ \w+)", str(error))
            hint = "use a smaller model, image size or batch size, or a machine with more memory"
            raise VitkitError("out of memory", got=amount and f"a request for {amount[1]}", hint=hint) from error

    return wrapper


def suggest_argument(function: str, name: str, value: object, signature: inspect.Signature) -> str:
    """Return the hint for an unknown argument: what was meant, or all arguments."""
    arguments = signature.parameters
    nearest = did_you_mean(name, arguments)
    return find_hint(function, name, value, arguments) or nearest or f"the arguments are {', '.join(arguments)}"


def find_lists(signature: inspect.Signature) -> list[str]:
    """Return the names of arguments that are lists, and nothing else but true, false or None."""
    others = (bool, types.NoneType)
    names = []
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        members = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        kinds = [get_origin(member) for member in members if member not in others]
        if kinds == [Sequence]:
            names.append(name)
    return names


def check_list(name: str, value: object) -> None:
    """Raise ConfigError for a single value where a list is needed."""
    if value is None or isinstance(value, bool) or (isinstance(value, Iterable) and not isinstance(value, str | bytes)):
        return
    short = shorten(value)
    raise ConfigError(f"{name} is not a list", got=short, hint=f"use {name}=[{short}]")


def _short(signature: inspect.Signature) -> str:
    """Format a signature without types and defaults."""
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty, default=empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
