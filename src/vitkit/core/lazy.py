"""Lazy attributes of modules: a name is imported from its home when it is first used."""

from collections.abc import Callable, Mapping
from importlib import import_module

from vitkit.core.errors import did_you_mean


def lazy_attributes(
    namespace: dict[str, object], homes: Mapping[str, str], *, hints: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names live in other modules.

    Args:
        namespace: `globals()` of the module, in which values are kept.
        homes: Module of each name.
        hints: Names that people try, with what to use instead.
    """
    module = str(namespace["__name__"])

    def get_attribute(name: str) -> object:
        if name not in homes:
            hint = (hints or {}).get(name) or did_you_mean(name, homes)
            raise AttributeError(f"module {module!r} has no attribute {name!r}" + (f"\nhint: {hint}" if hint else ""))
        value = namespace[name] = getattr(import_module(homes[name]), name)
        return value

    return get_attribute, lambda: sorted(homes)
