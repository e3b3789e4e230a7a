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
        homes: Names in each of these modules, separated by spaces.
        hints: Names that people try, with what to use instead.
        modules: Modules of the package that need no import of their own, such as `vitkit.errors`.
    """
    module = str(namespace["__name__"])
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get_attribute(name: str) -> object:
        if name in modules:
            return import_module(f"{module}.{name}")
        if name not in home_of:
            hint = (hints or {}).get(name) or did_you_mean(name, home_of)
            raise AttributeError(f"module {module!r} has no attribute {name!r}" + (f"\nhint: {hint}" if hint else ""))
        value = namespace[name] = getattr(import_module(home_of[name]), name)
        return value

    return get_attribute, lambda: sorted([*home_of, *modules])
