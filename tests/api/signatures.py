"""Signatures of all public names, as they are written in the source.

python tests/api/signatures.py > tests/api/public.txt
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module

MODULES = ("vitkit", "vitkit.results", "vitkit.errors", "vitkit.typing", "vitkit.inspection")
SPECIAL_METHODS = ("__call__", "__getitem__", "__init__")


def list_signatures() -> Iterator[str]:
    """Yield one line for each public name, and below a class those of its members; each class has them once."""
    listed = set()
    for module in MODULES:
        home = import_module(module)
        for name in home.__all__:
            value = getattr(home, name)
            if inspect.isfunction(value):
                yield f"{module}.{describe_function(find_definition(inspect.unwrap(value)))}"
            elif inspect.isclass(value) and value not in listed:
                listed.add(value)
                bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
                yield f"class {module}.{name}" + (f"({bases})" if bases else "")
                yield from (f"    {line}" for line in describe_members(value))
            else:
                yield f"{module}.{name}"


def describe_members(cls: type) -> Iterator[str]:
    """Yield the fields, properties and methods of a class and of its bases in vitkit, each once."""
    members: dict[str, str] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "vitkit":
            continue
        for node in find_definition(base).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name, line = node.target.id, ast.unparse(node)
            elif isinstance(node, ast.FunctionDef):
                name, line = node.name, describe_function(node)
            else:
                continue
            if not name.startswith("_") or name in SPECIAL_METHODS:
                members.setdefault(name, line)
    yield from members.values()


def describe_function(node: ast.FunctionDef) -> str:
    """Return a signature, with `property` in front of a property."""
    kinds = [decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)]
    kind = "property " if {"property", "cached_property"} & set(kinds) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind}{node.name}({ast.unparse(node.args)}){returns}"


@functools.cache
def parse_module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def find_definition(value: type | object) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition of a function or class in the source of its module."""
    body = parse_module(value.__module__).body
    return next(node for node in body if getattr(node, "name", None) == value.__qualname__)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in list_signatures())
