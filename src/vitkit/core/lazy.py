"""Lazy attributes of modules: a name is imported from its home when it is first used."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module

from vitkit.core.errors import did_you_mean


def lazy_attributes(
    namespace: dict[str, object],
    homes: Mapping[str, str],
    *,
    hints: Mapping[str, str] | None = None,
    modules: Collection[str] = (),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names live in other modules.

    Args:
        namespace: `globals()` of the module, in which values are kept.
        homes: Module of each name.
        hints: Names that people try, with what to use instead.
        modules: Modules of the package that need no import of their own, such as `vitkit.errors`.
    """
    module = str(namespace["__name__"])

    def get_attribute(name: str) -> object:
        if name in modules:
            return import_module(f"{module}.{name}")
        if name not in homes:
            hint = (hints or {}).get(name) or did_you_mean(name, homes)
            raise AttributeError(f"module {module!r} has no attribute {name!r}" + (f"\nhint: {hint}" if hint else ""))
        value = namespace[name] = getattr(import_module(homes[name]), name)
        return value

    return get_attribute, lambda: sorted([*homes, *modules])
