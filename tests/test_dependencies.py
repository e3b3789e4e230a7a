"""Declared dependencies and their versions."""

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


DEVELOPMENT = ("dev", "docs", "bench")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def list_requirements(*, extras: tuple[str, ...] = tuple(PROJECT["optional-dependencies"])) -> list[Requirement]:
    """Return the requirements of the core and of extras."""
    groups = [PROJECT["optional-dependencies"][extra] for extra in extras]
    return [Requirement(each) for group in (PROJECT["dependencies"], *groups) for each in group]


def read_bounds() -> dict[str, Version]:
    """Return the lower bound of each dependency in pyproject.toml."""
    bounds: dict[str, Version] = {}
    for requirement in list_requirements():
        if requirement.name != "vitkit":
            (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
            name = canonicalize_name(requirement.name)
            assert bounds.setdefault(name, Version(bound)) == Version(bound), f"{name} has two bounds"
    return bounds


def read_pins(name: str) -> dict[str, Version]:
    """Return the versions in a file of constraints."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==([^;\s]+).*", line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin[1]): Version(pin[2]) for pin in pins if pin}


def test_lowest_versions_are_the_bounds_of_pyproject():
    assert read_pins("constraints-lowest.txt") == read_bounds()


def test_tested_versions_satisfy_the_bounds():
    pins, bounds = read_pins("constraints.txt"), read_bounds()
    assert bounds.keys() <= pins.keys()
    assert not [name for name in bounds if pins[name] < bounds[name]]


def list_imports(folder: str) -> set[str]:
    """Return the distributions that the modules of a folder import, without the standard library and each other."""
    paths = list((ROOT / folder).rglob("*.py"))
    names = set[str]()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
    names -= {*sys.stdlib_module_names, "vitkit", *(path.stem for path in paths), *(path.parent.name for path in paths)}
    distributions = metadata.packages_distributions()
    return {canonicalize_name(distribution) for name in names for distribution in distributions.get(name, [name])[:1]}


@pytest.mark.parametrize(
    ("folder", "omitted"), [("src", DEVELOPMENT), ("bench", ("dev", "docs")), ("tests", ()), ("tools", ())]
)
def test_every_import_is_declared(folder, omitted):
    extras = tuple(name for name in PROJECT["optional-dependencies"] if name not in omitted)
    declared = {canonicalize_name(each.name) for each in list_requirements(extras=extras)}
    assert list_imports(folder) - declared <= {"torchvision"}  # an oracle, compared with where it is installed


def add_needed(requirement: Requirement, found: set[tuple[str, frozenset[str]]]) -> None:
    """Add a requirement and what it needs here, directly and indirectly, as names with extras."""
    key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
    if key not in found:
        found.add(key)
        for each in map(Requirement, metadata.requires(requirement.name) or ()):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *key[1])):
                add_needed(each, found)


def is_installed(name: str, version: Version) -> bool:
    try:
        return Version(metadata.version(name)).public == version.public
    except metadata.PackageNotFoundError:
        return False


def test_constraints_pin_everything_that_is_needed():
    pins, found = read_pins("constraints.txt"), set[tuple[str, frozenset[str]]]()
    if others := [name for name in read_bounds() if not is_installed(name, pins[name])]:
        pytest.skip(f"not the versions of constraints.txt: {', '.join(others)}")
    for requirement in list_requirements():
        if requirement.name != "vitkit":
            add_needed(requirement, found)
    assert {name for name, _ in found} <= pins.keys()


def test_pinned_versions_support_the_lowest_python():
    pins, lowest = read_pins("constraints.txt"), PROJECT["requires-python"].removeprefix(">=") + ".0"
    supported = {
        name: metadata.metadata(name)["Requires-Python"] or "" for name, pin in pins.items() if is_installed(name, pin)
    }
    assert not [name for name, pythons in supported.items() if lowest not in SpecifierSet(pythons)]
