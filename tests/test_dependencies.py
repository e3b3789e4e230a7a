"""Declared versions of dependencies."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def read_bounds() -> dict[str, Version]:
    """Return the lower bound of each dependency in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    bounds: dict[str, Version] = {}
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
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
