"""Checks of shapes and types by beartype, compiled when a function is first called with checks."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that beartype decorates at its first call.

    jaxtyping asks for two checks of every function of vitkit, and a process calls few functions with checks.
    """
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **options: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = beartype(function)
        return checked(*arguments, **options)

    return check
