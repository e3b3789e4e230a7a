"""Strict loader of configurations from mappings, TOML files and `section.key=value` assignments.

A configuration is a frozen, keyword-only dataclass. A field is an integer, a number, a boolean, text, a choice
(`Literal`), a tuple of these, another configuration (a *section*), or None if its annotation ends in `| None`.

- Only an integer is converted, to a float: a boolean is not an integer, and neither is 1.0.
- An unknown key is an error that suggests the nearest known one.
- TOML has no null, so `"none"` means None: `clip = "none"` in a file, `clip=none` on the command line. A field that
  may be None can therefore not hold the text "none"; any other text field can.
- Infinity and NaN are preserved; TOML spells them `inf` and `nan`.
"""

import dataclasses
import functools
import itertools
import json
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean
from vitkit.core.files import read_bytes
from vitkit.core.formatting import format_value

Config = TypeVar("Config")

_TYPE_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "none",
}

_MAX_BYTES = 1 << 16
"""Largest accepted file."""
_MAX_KEY_PARTS = 64
"""Longest dotted key. The time and memory of tomllib grow with the square of its parts."""
_TOML_STRING_OR_COMMENT = re.compile(
    r"""
    "{3} (?: \\.? | [^"\\] | "(?!"") )*+ (?: "{3,5} | \Z )  # it may end with two quotes of its own
    | '{3} (?: [^'] | '(?!'') )*+ (?: '{3,5} | \Z )
    | " (?: \\[^\n] | [^"\\\n] )*+ "?
    | ' [^'\n]*+ '?
    | \# [^\n]*+
    """,
    re.DOTALL | re.VERBOSE,
)
"""Nothing is tried twice, so the time is linear; what is not closed is skipped, and refused by tomllib."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Character that stands for a byte that is not UTF-8; TOML and JSON cannot hold it."""


def from_mapping(
    cls: type[Config], data: Mapping[str, object], *, base: Config | None = None, where: str = ""
) -> Config:
    """Build a `cls` from `base`, or from the defaults of `cls`, with the values of `data`.

    `where` is the prefix of keys in messages, such as `"run.toml: "` or `"model."`.
    """
    fields = _fields(cls)
    annotations = get_type_hints(cls)
    for name in data:
        if name not in fields:
            raise ConfigError(f"{where}{name} is not a known key", hint=_nearest_key(cls, name))
    values: dict[str, object] = {}
    for name, field in fields.items():
        if base is not None:
            start = getattr(base, name)
        else:
            start = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if name in data:
            values[name] = _read(annotations[name], data[name], start=start, key=where + name)
        elif start is dataclasses.MISSING:
            raise ConfigError(f"{where}{name} is missing", expected=_describe(annotations[name]))
        else:
            values[name] = start
    build: Callable[..., Config] = cls
    return build(**values)


def to_mapping(config: object, *, where: str = "") -> dict[str, object]:
    """Return all fields as plain data, from which `from_mapping` builds an equal configuration."""
    annotations = get_type_hints(type(config))
    plain: dict[str, object] = {}
    for name in _fields(type(config)):
        value = getattr(config, name)
        if _section(annotations[name]) and value is not None:
            plain[name] = to_mapping(value, where=f"{where}{name}.")
        elif value == "none" and _may_be_none(annotations[name]):
            raise ConfigError(f'{where}{name} cannot be the text "none", which means None here')
        else:
            plain[name] = None if value is None else _plain_value(value, key=where + name)
    return plain


def to_toml(config: object) -> str:
    """Return all fields as TOML, from which `load_toml` builds an equal configuration."""
    return "\n".join(_toml_lines(to_mapping(config))).lstrip("\n") + "\n"


def load_toml(
    path: Path | str, cls: type[Config], *, recipes: Mapping[str, Callable[[], Config]], above: tuple[Path, ...] = ()
) -> Config:
    """Load a TOML file, which may name a base and list only the differences from it.

    The top-level key `base` is the name of a recipe, or a path relative to the file if it ends in `.toml`. `above` are
    the files that have this one as their base.
    """
    path = Path(path)
    here = path.resolve()
    if here in above:
        raise ConfigError(f"{path}: a file cannot be its own base", got=" → ".join(map(str, [*above, here])))
    data = read_toml(path)
    base: Config | None = None
    match data.pop("base", None):
        case None:
            pass
        case str(name) if name.endswith(".toml"):
            base = load_toml(path.parent / name, cls, recipes=recipes, above=(*above, here))
        case str(name) if name in recipes:
            base = recipes[name]()
        case str(name):
            hint = did_you_mean(name, recipes) or f"known recipes: {', '.join(recipes)}"
            raise UnknownNameError(f"{path}: there is no recipe {_toml_value(name)}", hint=hint)
        case other:
            expected = "the name of a recipe, or a path that ends in .toml"
            raise ConfigError(f"{path}: base is not valid", expected=expected, got=_toml_value(other))
    return from_mapping(cls, data, base=base, where=f"{path}: ")


def apply_overrides(config: Config, assignments: Sequence[str]) -> Config:
    """Apply `section.key=value` assignments to a configuration, all at once, so their order does not matter.

    A value is interpreted in the first way that fits its field: as TOML (`3`, `1e-3`, `true`, `[224, 320]`,
    `{kind = "map"}`), as text, or as a size (`224x320`). `none` is None if the field may be None.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Model:
    ...     name: str = "B/16"
    ...     image_size: int | tuple[int, int] = 224
    ...     dropout: float | None = 0.1
    >>> apply_overrides(Model(), ["name=123", "image_size=224x320", "dropout=none"])
    Model(name='123', image_size=(224, 320), dropout=None)
    """
    return apply_settings(config, parse_assignments(assignments))


def parse_assignments(assignments: Sequence[str]) -> dict[str, object]:
    """Return `section.key=value` assignments as settings whose values `apply_settings` interprets by their field."""
    texts: dict[str, object] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"cannot read the assignment {assignment!r}", expected="section.key=value")
        if key in texts:
            raise ConfigError(f"{key} is assigned twice", got=f"{key}={texts[key]} and {assignment}")
        texts[key] = _Text(text)
    return texts


def apply_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Apply settings by dotted or nested keys to a configuration, all at once, so their order does not matter.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     name: str = "adam"
    ...     weight_decay: float = 0.0
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     seed: int = 0
    ...     optimizer: Optimizer = Optimizer()
    >>> apply_settings(Run(), {"optimizer.weight_decay": 0.1, "seed": 3})
    Run(seed=3, optimizer=Optimizer(name='adam', weight_decay=0.1))
    """
    flat = flatten_settings(settings)
    for (earlier, other), (key, value) in itertools.combinations(flat.items(), 2):
        if f"{key}.".startswith(f"{earlier}.") or f"{earlier}.".startswith(f"{key}."):
            raise ConfigError(f"{key} is assigned twice", got=f"{earlier}={other} and {key}={value}")
    return from_mapping(type(config), _nest(flat), base=config)


def flatten_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted keys.

    >>> flatten_settings({"schedule": {"lr": 0.1}, "model.name": "B/16"})
    {'schedule.lr': 0.1, 'model.name': 'B/16'}
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "the settings are not a mapping", got=type(settings).__name__, hint='settings={"section.key": value}'
        )
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if not all(key.split(".")):
            raise ConfigError(f"{key!r} is not a key", expected="section.key")
        values = flatten_settings(value) if isinstance(value, Mapping) else {"": value}
        for name, inner in values.items():
            dotted = f"{key}.{name}" if name else key
            if dotted in flat:
                raise ConfigError(f"{dotted} is assigned twice", got=f"{flat[dotted]} and {inner}")
            flat[dotted] = inner
    return flat


def find_keys(cls: type[Any], name: str) -> list[str]:
    """Return the dotted keys of values, at most one section deep, that are or end in a name.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     weight_decay: float = 0.0
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     seed: int = 0
    ...     optimizer: Optimizer = Optimizer()
    >>> find_keys(Run, "weight_decay"), find_keys(Run, "optimizer")
    (['optimizer.weight_decay'], [])
    """
    keys = [*_fields(cls), *_keys_below(cls)]
    sections = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if f".{key}".endswith(f".{name}") and key.count(".") <= 1 and key not in sections]


def format_settings(settings: Mapping[str, object]) -> list[str]:
    """Format settings as they are typed on the command line.

    >>> format_settings({"block": {"axial": True}, "pooling": "mean"})
    ['block.axial=true', 'pooling=mean']
    """
    return [f"{key}={format_value(value)}" for key, value in flatten_settings(settings).items()]


# Fields and their annotations


def _fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _members(annotation: object) -> tuple[object, ...]:
    """Return the alternatives of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _may_be_none(annotation: object) -> bool:
    return types.NoneType in _members(annotation)


def _section(annotation: object) -> type[Any] | None:
    """Return the dataclass in `Dataclass` or `Dataclass | None`."""
    members = (member for member in _members(annotation) if isinstance(member, type))
    return next(filter(dataclasses.is_dataclass, members), None)


def _describe(annotation: object) -> str:
    """Describe an annotation for a message: `an integer, or none`."""
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
    return _TYPE_NAMES.get(annotation, str(annotation))


def _choices(annotation: object) -> list[str]:
    """Return the texts that an annotation accepts, as candidates for a suggestion."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if annotation is bool:
        return ["true", "false"]
    if annotation is types.NoneType:
        return ["none"]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _nearest_key(cls: type[Any], name: str) -> str:
    """Suggest a key: the same name in a subsection, else the nearest in this section, else all of them."""
    below = [key for key in _keys_below(cls) if key.endswith(f".{name}")]
    if below:
        return f"did you mean {' or '.join(below)}?"
    keys = _fields(cls)
    return did_you_mean(name, keys) or f"known keys: {', '.join(keys)}"


def _keys_below(cls: type[Any]) -> list[str]:
    """Return the dotted keys of all subsections."""
    annotations = get_type_hints(cls)
    sections = {name: section for name in _fields(cls) if (section := _section(annotations[name]))}
    return [f"{name}.{key}" for name, section in sections.items() for key in [*_fields(section), *_keys_below(section)]]


# Reading


@dataclasses.dataclass(frozen=True)
class _Text:
    """Value from the command line, to be interpreted by the type of its field."""

    text: str

    def __str__(self) -> str:
        return self.text

    def interpretations(self) -> list[object]:
        """Return the possible values, the preferred one first."""
        try:
            parsed = parse_toml(f"value = {self.text}")
        except (ValueError, RecursionError):
            parsed = {}
        values = [parsed["value"]] if list(parsed) == ["value"] else []
        values.append(self.text)
        if re.fullmatch(r"[0-9]+(x[0-9]+)+", self.text):
            values.append([int(side) for side in self.text.split("x")])
        return values


def _nest(settings: Mapping[str, object]) -> dict[str, object]:
    """Turn `{"a.b": 1, "c": 2}` into `{"a": {"b": 1}, "c": 2}`."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = nested
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return nested


def _read(annotation: object, value: object, *, start: object, key: str) -> object:
    """Return the value of one field; a section lists its differences from `start`."""
    candidates = value.interpretations() if isinstance(value, _Text) else [value]
    if _may_be_none(annotation) and (None in candidates or "none" in candidates):
        return None
    section = _section(annotation)
    if section is None and isinstance(value, Mapping):
        inner = ", ".join(f"{key}.{name}" for name in value) or "an empty section"
        raise ConfigError(f"{key} is a value, not a section", expected=_describe(annotation), got=inner)
    for candidate in candidates:
        if section is None:
            try:
                return _validate(annotation, candidate)
            except (TypeError, ValueError):
                continue
        if isinstance(candidate, Mapping):
            base = start if isinstance(start, section) else None
            return from_mapping(section, candidate, base=base, where=f"{key}.")
    raise ConfigError(
        f"{key} is not valid",
        expected=_describe(annotation),
        got=_toml_value(candidates[0]),
        hint=did_you_mean(str(candidates[0]), _choices(annotation)),
    )


@functools.cache
def _adapter(annotation: Any) -> Any:
    """Return pydantic's validator of a type; building one takes longer than reading a whole configuration."""
    from pydantic import TypeAdapter  # noqa: PLC0415  importing it takes 0.1 s, which `vitkit --help` does not need

    return TypeAdapter(annotation)


def _validate(annotation: Any, value: object) -> object:
    """Return the value if it fits; raise TypeError (not JSON) or ValueError (another type) if not.

    pydantic validates the value as JSON, because there a list may stand for a tuple while all else is strict.
    """
    result = _adapter(annotation).validate_json(json.dumps(value), strict=True)
    if not _keeps_integers(value, result):
        raise ValueError(f"{value} is not {result}")
    return result


def _keeps_integers(value: object, result: object) -> bool:
    """Return whether pydantic made no integer of another type: its `Literal[1]` also accepts true and 1.0."""
    if isinstance(value, list | tuple) and isinstance(result, tuple):
        return all(map(_keeps_integers, value, result))
    return not isinstance(result, int) or type(value) is type(result)


def read_toml(path: Path) -> dict[str, object]:
    """Parse a TOML file of at most 64 KiB."""
    try:
        return parse_toml(read_bytes(path, max_bytes=_MAX_BYTES).decode())
    except FileNotFoundError as error:
        neighbors = [neighbor.name for neighbor in path.parent.glob("*.toml")]
        raise ConfigError(f"{path}: no such file", hint=did_you_mean(path.name, neighbors)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not a TOML file: it is nested too deep") from error
    except ValueError as error:  # tomllib names the line, the UTF-8 decoder the byte
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def parse_toml(text: str) -> dict[str, object]:
    """Parse TOML; raise ValueError if it is invalid or has a key of more than 64 parts.

    >>> parse_toml("[schedule]\\nsteps = 40")
    {'schedule': {'steps': 40}}
    """
    keys = re.split(r"[\n=,\[\]{}]", _TOML_STRING_OR_COMMENT.sub('""', text))
    if (parts := 1 + max(key.count(".") for key in keys)) > _MAX_KEY_PARTS:
        raise ValueError(f"a key has too many parts (expected at most {_MAX_KEY_PARTS}, got {parts:,})")
    return tomllib.loads(text)


# Writing


def _plain_value(value: object, *, key: str) -> object:
    if type(value) is tuple:
        return [_plain_value(item, key=key) for item in value]
    if type(value) in (bool, int, float, str) and not _LONE_SURROGATE.search(str(value)):
        return value
    expected = "a number, a boolean, Unicode text, or a tuple of these"
    raise ConfigError(f"{key} cannot be written", expected=expected, got=ascii(value))


def _toml_lines(data: Mapping[str, object], *, prefix: str = "") -> list[str]:
    """Return values first, then sections: in TOML everything after a section header belongs to the section."""
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
        case str():  # TOML has the escapes of JSON, and requires one for DEL too
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case _:  # the shortest digits that parse to the same number
            return str(value)
