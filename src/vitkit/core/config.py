"""The one strict loader: mappings, TOML files and `section.key=value` go in, frozen dataclasses come out.

A config is a frozen, keyword-only dataclass. Its fields hold an integer, a number, a boolean, text, a choice
(`Literal`), a tuple of these, another config (a *section*), or None where the annotation ends in `| None`.

- Nothing is coerced but an integer to a float: a boolean is not an integer, 1.0 is not an integer.
- An unknown key is an error that names the nearest known one.
- TOML has no null, so `"none"` spells None: `clip = "none"` in a file, `clip=none` on the command line.
  A field that may be None can therefore not hold the text "none"; a field that may not be None can.
- Infinity and NaN are kept; TOML spells them `inf` and `nan`.
"""

import dataclasses
import json
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean
from vitkit.core.files import read_bytes

__all__ = ["apply_overrides", "from_mapping", "load_toml", "to_mapping", "to_toml"]

Config = TypeVar("Config")

_WORDS: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "none",
}

_MOST_BYTES = 1 << 16
"""A config of ours has a few thousand. tomllib's time grows with the square of the dots in a key."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Stands in a Python text for a byte that is not UTF-8; neither TOML nor JSON can hold it."""


def from_mapping(
    cls: type[Config], data: Mapping[str, object], *, base: Config | None = None, where: str = ""
) -> Config:
    """A `cls` made of `data`, which says only what differs from `base`, or from the defaults of `cls`.

    `where` is what messages put before a key: `"run.toml: "`, `"model."`.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     rate: float = 0.1
    ...     clip: float | None = 1.0
    >>> from_mapping(Optimizer, {"clip": None}, base=Optimizer(rate=0.3))
    Optimizer(rate=0.3, clip=None)
    >>> from_mapping(Optimizer, {"rat": 0.3})
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: rat is not a known key
    """
    fields = _fields(cls)
    annotations = get_type_hints(cls)
    for name in data:
        if name not in fields:
            raise ConfigError(f"{where}{name} is not a known key", hint=_nearest_key(cls, name))
    values: dict[str, object] = {}
    for name, field in fields.items():
        start = _default(field) if base is None else getattr(base, name)
        if name in data:
            values[name] = _read(annotations[name], data[name], start=start, key=where + name)
        elif start is dataclasses.MISSING:
            raise ConfigError(f"{where}{name} is missing", expected=_describe(annotations[name]))
        else:
            values[name] = start
    build: Callable[..., Config] = cls
    return build(**values)


def to_mapping(config: object) -> dict[str, object]:
    """Plain data, every field spelled out, that `from_mapping` turns into an equal config.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Patches:
    ...     size: int | tuple[int, int] = (16, 32)
    ...     stem: str | None = None
    >>> to_mapping(Patches())
    {'size': [16, 32], 'stem': None}
    """
    return _plain_section(config, where="")


def to_toml(config: object) -> str:
    """The config as a TOML text, every field spelled out, that `load_toml` reads back as an equal config.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     rate: float = 1e-5
    ...     clip: float | None = None
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     optimizer: Optimizer = Optimizer()
    ...     name: str = 'the "first" run'
    >>> print(to_toml(Run()), end="")
    name = "the \\"first\\" run"
    <BLANKLINE>
    [optimizer]
    rate = 1e-05
    clip = "none"
    """
    return "\n".join(_toml_lines(to_mapping(config), prefix="")).lstrip("\n") + "\n"


def load_toml(path: Path | str, cls: type[Config], *, recipes: Mapping[str, Callable[[], Config]]) -> Config:
    """The config in a TOML file, which may name a base and then says only what differs from it.

    The top-level key `base` is a recipe's name or, where it ends in `.toml`, a path from the file's folder.

    >>> import tempfile
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int = 100
    ...     seed: int = 0
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "run.toml")
    ...     _ = file.write_text('base = "short"\\nseed = 1\\n', encoding="utf-8")
    ...     load_toml(file, Run, recipes={"short": lambda: Run(steps=10)})
    Run(steps=10, seed=1)
    """
    return _load(Path(path), cls, recipes, ())


def apply_overrides(config: Config, assignments: Sequence[str]) -> Config:
    """The config with `section.key=value` assignments, applied at once: their order has no meaning.

    The first reading of a value that fits its field is taken: as TOML (`3`, `1e-3`, `true`, `[224, 320]`,
    `{kind = "map"}`), as bare text, as sides (`224x320`). `none` is None where the field may be None.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Model:
    ...     name: str = "B/16"
    ...     image_size: int | tuple[int, int] = 224
    ...     dropout: float | None = 0.1
    >>> apply_overrides(Model(), ["name=123", "image_size=224x320", "dropout=none"])
    Model(name='123', image_size=(224, 320), dropout=None)
    """
    texts: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"cannot read the assignment {assignment!r}", expected="section.key=value")
        for earlier, value in texts.items():
            if f"{key}.".startswith(f"{earlier}.") or f"{earlier}.".startswith(f"{key}."):
                raise ConfigError(f"{key} is assigned twice", got=f"{earlier}={value} and {assignment}")
        texts[key] = text
    return from_mapping(type(config), _nested(texts), base=config)


# Fields and their annotations


def _fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _default(field: dataclasses.Field[Any]) -> object:
    """The field's default, or MISSING."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _members(annotation: object) -> tuple[object, ...]:
    """The alternatives of a union; the annotation itself where there is no choice."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _may_be_none(annotation: object) -> bool:
    return types.NoneType in _members(annotation)


def _section(annotation: object) -> type[Any] | None:
    """The dataclass in `Dataclass` or `Dataclass | None`."""
    for member in _members(annotation):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _describe(annotation: object) -> str:
    """The annotation in words: `an integer, or none`."""
    members = _members(annotation)
    if len(members) > 1:
        return ", or ".join(_describe(member) for member in members)
    if _section(annotation):
        return "a section"
    if get_origin(annotation) is Literal:
        return "one of: " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = ("…" if item is Ellipsis else _describe(item) for item in get_args(annotation))
        return f"[{', '.join(items)}]"
    return _WORDS.get(annotation, str(annotation))


def _choices(annotation: object) -> list[str]:
    """The words that the annotation takes, for a "did you mean"."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if annotation is bool:
        return ["true", "false"]
    if annotation is types.NoneType:
        return ["none"]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _nearest_key(cls: type[Any], name: str) -> str:
    """A hint for an unknown key: the same key in a section below, else the nearest here, else all of them."""
    below = [key for key in _keys_below(cls) if key.endswith(f".{name}")]
    if below:
        return f"did you mean {' or '.join(below)}?"
    known = _fields(cls)
    return did_you_mean(name, known) or f"known keys: {', '.join(known)}"


def _keys_below(cls: type[Any]) -> list[str]:
    """The dotted keys of everything in the sections of `cls`."""
    annotations = get_type_hints(cls)
    sections = {name: section for name in _fields(cls) if (section := _section(annotations[name]))}
    return [f"{name}.{key}" for name, section in sections.items() for key in [*_fields(section), *_keys_below(section)]]


# Reading


@dataclasses.dataclass(frozen=True)
class _Text:
    """A value from the command line, whose meaning waits for the type of its field."""

    text: str

    def readings(self) -> list[object]:
        """What the text may mean, the likeliest first."""
        readings: list[object] = []
        try:
            parsed = tomllib.loads(f"value = {self.text}")
        except ValueError:
            parsed = {}
        if list(parsed) == ["value"]:
            readings.append(parsed["value"])
        readings.append(self.text)
        if re.fullmatch(r"[0-9]+(x[0-9]+)+", self.text):
            readings.append([int(side) for side in self.text.split("x")])
        return readings


def _nested(texts: Mapping[str, str]) -> dict[str, object]:
    """`{"a.b": "1", "c": "2"}` as `{"a": {"b": …}, "c": …}`."""
    nested: dict[str, object] = {}
    sections: dict[str, dict[str, str]] = {}
    for key, text in texts.items():
        name, dot, rest = key.partition(".")
        if dot:
            sections.setdefault(name, {})[rest] = text
        else:
            nested[name] = _Text(text)
    return nested | {name: _nested(section) for name, section in sections.items()}


def _read(annotation: object, value: object, *, start: object, key: str) -> object:
    """The value of one field; a section says what differs from `start`."""
    readings = value.readings() if isinstance(value, _Text) else [value]
    if _may_be_none(annotation) and (None in readings or "none" in readings):
        return None
    section = _section(annotation)
    if section is None and isinstance(value, Mapping):
        inner = ", ".join(f"{key}.{name}" for name in value) or "an empty section"
        raise ConfigError(f"{key} is a value, not a section", expected=_describe(annotation), got=inner)
    for reading in readings:
        if section is None:
            try:
                return _validated(annotation, reading)
            except (TypeError, ValueError):
                continue
        if isinstance(reading, Mapping):
            base = start if isinstance(start, section) else None
            return from_mapping(section, reading, base=base, where=f"{key}.")
    raise ConfigError(
        f"{key} is not valid",
        expected=_describe(annotation),
        got=_toml_value(readings[0]),
        hint=did_you_mean(str(readings[0]), _choices(annotation)),
    )


def _validated(annotation: Any, value: object) -> object:
    """The value if it fits, else a TypeError (not JSON) or a ValueError (another type).

    Validating JSON rather than Python objects lets a list stand for a tuple while all else stays strict.
    """
    from pydantic import TypeAdapter  # noqa: PLC0415  a tenth of a second that `vitkit --help` need not spend

    adapter: TypeAdapter[object] = TypeAdapter(annotation)
    result = adapter.validate_json(json.dumps(value), strict=True)
    if not _same_integers(value, result):
        raise ValueError(f"{value} is not {result}")
    return result


def _same_integers(given: object, result: object) -> bool:
    """Whether each integer was given as one; pydantic's `Literal[1]` also takes true and 1.0."""
    if isinstance(given, list | tuple) and isinstance(result, tuple):
        return all(map(_same_integers, given, result))
    return not isinstance(result, int) or type(given) is type(result)


def _load(
    path: Path, cls: type[Config], recipes: Mapping[str, Callable[[], Config]], above: tuple[Path, ...]
) -> Config:
    """`load_toml`, knowing the files that led here."""
    here = path.resolve()
    if here in above:
        raise ConfigError(f"{path}: a file cannot be its own base", got=" → ".join(map(str, [*above, here])))
    data = _parse(path)
    base: Config | None = None
    match data.pop("base", None):
        case None:
            pass
        case str(name) if name.endswith(".toml"):
            base = _load(path.parent / name, cls, recipes, (*above, here))
        case str(name) if name in recipes:
            base = recipes[name]()
        case str(name):
            hint = did_you_mean(name, recipes) or f"known recipes: {', '.join(recipes)}"
            raise UnknownNameError(f"{path}: there is no recipe {_toml_value(name)}", hint=hint)
        case other:
            expected = "the name of a recipe, or a path that ends in .toml"
            raise ConfigError(f"{path}: base is not valid", expected=expected, got=_toml_value(other))
    return from_mapping(cls, data, base=base, where=f"{path}: ")


def _parse(path: Path) -> dict[str, object]:
    """The data in a TOML file."""
    try:
        return tomllib.loads(read_bytes(path, most=_MOST_BYTES).decode())
    except FileNotFoundError as error:
        neighbours = [neighbour.name for neighbour in path.parent.glob("*.toml")]
        raise ConfigError(f"{path}: no such file", hint=did_you_mean(path.name, neighbours)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not a TOML file: it is nested too deep") from error
    except ValueError as error:  # tomllib names the line, the UTF-8 decoder the byte
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


# Writing


def _plain_section(config: object, *, where: str) -> dict[str, object]:
    annotations = get_type_hints(type(config))
    plain: dict[str, object] = {}
    for name in _fields(type(config)):
        value = getattr(config, name)
        if _section(annotations[name]) and value is not None:
            plain[name] = _plain_section(value, where=f"{where}{name}.")
        elif value == "none" and _may_be_none(annotations[name]):
            raise ConfigError(f'{where}{name} may be None, which "none" spells: it cannot be the text "none"')
        else:
            plain[name] = None if value is None else _plain_value(value, key=where + name)
    return plain


def _plain_value(value: object, *, key: str) -> object:
    if type(value) is tuple:
        return [_plain_value(item, key=key) for item in value]
    if type(value) in (bool, int, float, str) and not _LONE_SURROGATE.search(str(value)):
        return value
    expected = "a number, a boolean, Unicode text, or a tuple of these"
    raise ConfigError(f"{key} cannot be written", expected=expected, got=ascii(value))


def _toml_lines(data: Mapping[str, object], *, prefix: str) -> list[str]:
    """Values first, then sections: in TOML whatever follows a section's head belongs to the section."""
    lines = [f"{name} = {_toml_value(value)}" for name, value in data.items() if not isinstance(value, dict)]
    for name, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{name}]", *_toml_lines(value, prefix=f"{prefix}{name}.")]
    return lines


def _toml_value(value: object) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case str():  # the escapes of JSON are those of TOML, which also wants DEL escaped
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case _:  # the shortest digits that read back as the same number
            return str(value)
