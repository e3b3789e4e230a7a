"""Strict configuration loader: round trips, merging, assignments and files."""

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.core import config as config_module
from vitkit.core.config import apply_overrides, from_mapping, load_toml, parse_toml, to_mapping, to_toml
from vitkit.core.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Positions:
    kind: Literal["learned", "relative", "none"] = "learned"
    grid: int | tuple[int, int] = (14, 14)


@dataclass(frozen=True, kw_only=True)
class Head:
    pool: Literal["class", "mean", "map"] = "class"
    hidden: int | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    positions: Positions = Positions()
    head: Head | None = None
    width: int = 768
    heads: int = 12
    patch: Literal[14, 16] = 16

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("the heads do not divide the width", expected=self.heads, got=self.width)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    path: str
    weight: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    model: Model = Model(positions=Positions(kind="relative"))
    teacher: Teacher | None = None
    rate: float = 1e-3
    clip: float | None = 1.0
    note: str | None = None
    tags: tuple[str, ...] = ()
    scale: tuple[float, float] = (0.05, 1.0)
    compile: bool = False
    labels: tuple[tuple[str, int], ...] = field(default_factory=lambda: (("cat", 0),))


RUN = Run(name="first")

floats = st.floats(allow_nan=False)
runs = st.builds(
    Run,
    name=st.text(),
    model=st.builds(
        Model,
        positions=st.builds(
            Positions,
            kind=st.sampled_from(["learned", "relative", "none"]),
            grid=st.integers() | st.tuples(st.integers(), st.integers()),
        ),
        head=st.none() | st.builds(Head, pool=st.sampled_from(["class", "mean", "map"])),
        width=st.integers().map(lambda number: 12 * number),
        patch=st.sampled_from([14, 16]),
    ),
    teacher=st.none() | st.builds(Teacher, path=st.text(), weight=floats),
    rate=floats,
    clip=st.none() | floats,
    note=st.none() | st.text().filter(lambda text: text != "none"),
    tags=st.lists(st.text()).map(tuple),
    scale=st.tuples(floats, floats),
    compile=st.booleans(),
    labels=st.lists(st.tuples(st.text(), st.integers())).map(tuple),
)


# Round trips


@given(run=runs)
def test_mapping_round_trip(run: Run) -> None:
    data = json.loads(json.dumps(to_mapping(run)))
    assert repr(from_mapping(Run, data)) == repr(run)


@given(run=runs)
def test_toml_round_trip(run: Run) -> None:
    assert repr(from_mapping(Run, tomllib.loads(to_toml(run)))) == repr(run)


@given(run=runs)
def test_toml_file_round_trip(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(to_toml(run), encoding="utf-8")
    assert repr(load_toml(path, Run, recipes={})) == repr(run)


@given(run=runs, base=runs)
def test_complete_mapping_replaces_the_base(run: Run, base: Run) -> None:
    assert from_mapping(Run, to_mapping(run), base=base) == run


@pytest.mark.parametrize(
    "text", ['"', "'", "\\", '"""', "\x00", "\x1f", "\x7f", "\x85", "\u2028", "é", "😀", "\r\n", "\t", "#", "[a]"]
)
def test_any_text_round_trips_through_toml(text: str) -> None:
    assert tomllib.loads(to_toml(replace(RUN, name=text)))["name"] == text


@pytest.mark.parametrize("rate", [math.inf, -math.inf, -0.0, 5e-324, 1e16, 0.1 + 0.2, 1.7976931348623157e308])
def test_any_number_round_trips_through_toml(rate: float) -> None:
    assert repr(tomllib.loads(to_toml(replace(RUN, rate=rate)))["rate"]) == repr(rate)


def test_nan_round_trips_through_toml() -> None:
    run = from_mapping(Run, tomllib.loads(to_toml(replace(RUN, rate=math.nan))))
    assert math.isnan(run.rate)


def test_toml_has_values_before_sections_and_none_as_text() -> None:
    model = Model(head=Head(pool="map"))
    assert to_toml(model) == (
        "width = 768\nheads = 12\npatch = 16\n\n"
        '[positions]\nkind = "learned"\ngrid = [14, 14]\n\n'
        '[head]\npool = "map"\nhidden = "none"\n'
    )


@pytest.mark.parametrize(
    ("run", "key"),
    [
        (replace(RUN, note="none"), "note"),
        (replace(RUN, name="\udc80"), "name"),
        (replace(RUN, tags=["a"]), "tags"),  # type: ignore[arg-type]
        (replace(RUN, tags=(None,)), "tags"),  # type: ignore[arg-type]
        (replace(RUN, teacher=Teacher(path=Path("a"))), r"teacher\.path"),  # type: ignore[arg-type]
    ],
)
def test_value_that_cannot_round_trip_is_rejected(run: Run, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} "):
        to_mapping(run)


# Building and merging


def test_missing_keys_take_their_defaults() -> None:
    assert from_mapping(Run, {"name": "first"}) == RUN


def test_partial_section_extends_the_default_of_its_field() -> None:
    run = from_mapping(Run, {"name": "first", "model": {"positions": {"grid": 7}}})
    assert run.model.positions == Positions(kind="relative", grid=7)


def test_partial_section_extends_the_base() -> None:
    base = replace(RUN, model=Model(width=384, head=Head(pool="map", hidden=10)))
    run = from_mapping(Run, {"model": {"head": {"hidden": 20}}}, base=base)
    assert run == replace(base, model=Model(width=384, head=Head(pool="map", hidden=20)))


def test_section_over_none_extends_the_class_defaults() -> None:
    run = from_mapping(Run, {"teacher": {"path": "L/16"}}, base=RUN)
    assert run.teacher == Teacher(path="L/16", weight=0.5)


@pytest.mark.parametrize("none", [None, "none"])
def test_null_and_the_text_none_both_mean_none(none: str | None) -> None:
    base = replace(RUN, teacher=Teacher(path="L/16"), note="a note")
    run = from_mapping(Run, {"teacher": none, "clip": none, "note": none}, base=base)
    assert (run.teacher, run.clip, run.note) == (None, None, None)


def test_none_is_text_in_a_field_that_cannot_be_none() -> None:
    run = from_mapping(Run, {"name": "none", "tags": ["none"], "model": {"positions": {"kind": "none"}}})
    assert (run.name, run.tags, run.model.positions.kind) == ("none", ("none",), "none")


def test_integer_becomes_a_float() -> None:
    run = from_mapping(Run, {"name": "first", "rate": 1, "clip": 2, "scale": [0, 1]})
    assert repr((run.rate, run.clip, run.scale)) == "(1.0, 2.0, (0.0, 1.0))"


def test_error_of_a_dataclass_is_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"^the heads do not divide the width \(expected 12, got 770\)$") as info:
        from_mapping(Run, {"name": "first", "model": {"width": 770}})
    assert info.value.__cause__ is None


MISTAKES = [
    ({"rate": 1.0}, "name is missing (expected text)", None),
    ({"nam": "a"}, "nam is not a known key", "did you mean name?"),
    ({"zzz": 1}, "zzz is not a known key", "known keys: name, model, teacher, rate, clip, note, "),
    ({"width": 1}, "width is not a known key", "did you mean model.width?"),
    ({"path": "a"}, "path is not a known key", "did you mean teacher.path?"),
    ({"kind": "a"}, "kind is not a known key", "did you mean model.positions.kind?"),
    ({"model": {"widht": 1}}, "model.widht is not a known key", "did you mean width?"),
    ({"model": {"grid": 1}}, "model.grid is not a known key", "did you mean positions.grid?"),
    ({"model": {"width": 1.0}}, "model.width is not valid (expected an integer, got 1.0)", None),
    ({"model": {"width": True}}, "model.width is not valid (expected an integer, got true)", None),
    ({"model": {"width": "768"}}, 'model.width is not valid (expected an integer, got "768")', None),
    ({"model": {"width": None}}, 'model.width is not valid (expected an integer, got "none")', None),
    ({"model": {"patch": True}}, "model.patch is not valid (expected one of: 14, 16, got true)", None),
    ({"model": {"patch": 16.0}}, "model.patch is not valid (expected one of: 14, 16, got 16.0)", "did you mean 16?"),
    ({"model": 3}, "model is not valid (expected a section, got 3)", None),
    ({"model": "none"}, 'model is not valid (expected a section, got "none")', None),
    ({"teacher": True}, "teacher is not valid (expected a section, or none, got true)", None),
    ({"teacher": {"weight": 1}}, "teacher.path is missing (expected text)", None),
    ({"rate": True}, "rate is not valid (expected a number, got true)", None),
    ({"rate": {"start": 1}}, "rate is a value, not a section (expected a number, got rate.start)", None),
    ({"rate": {}}, "rate is a value, not a section (expected a number, got an empty section)", None),
    ({"name": 3}, "name is not valid (expected text, got 3)", None),
    ({"name": date(2020, 10, 22)}, "name is not valid (expected text, got 2020-10-22)", None),
    ({"compile": 1}, "compile is not valid (expected true or false, got 1)", None),
    ({"compile": "True"}, 'compile is not valid (expected true or false, got "True")', "did you mean true?"),
    ({"clip": "None"}, 'clip is not valid (expected a number, or none, got "None")', "did you mean none?"),
    ({"tags": "a"}, 'tags is not valid (expected [text, …], got "a")', None),
    ({"tags": ["a", 1]}, 'tags is not valid (expected [text, …], got ["a", 1])', None),
    ({"scale": [1]}, "scale is not valid (expected [a number, a number], got [1])", None),
    (
        {"model": {"positions": {"grid": [7, True]}}},
        "model.positions.grid is not valid (expected an integer, or [an integer, an integer], got [7, true])",
        None,
    ),
    (
        {"model": {"head": {"pool": "maen"}}},
        'model.head.pool is not valid (expected one of: class, mean, map, got "maen")',
        "did you mean mean?",
    ),
]


@pytest.mark.parametrize(("data", "message", "hint"), MISTAKES)
def test_mistake_is_reported_with_its_full_key(data: dict[str, object], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as info:
        from_mapping(Run, data if "name is missing" in message else {"name": "first"} | data)
    assert info.value.summary == message
    assert (info.value.hint or "").startswith(hint or "")
    assert (info.value.hint is None) == (hint is None)


def test_mistake_is_reported_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml: model\.width is not valid"):
        from_mapping(Run, {"name": "first", "model": {"width": "wide"}}, where="run.toml: ")


# Assignments


@pytest.mark.parametrize(
    ("assignment", "value", "read"),
    [
        ("name=123", "123", lambda run: run.name),
        ("name=true", "true", lambda run: run.name),
        ('name="a b"', "a b", lambda run: run.name),
        ("name=a=b", "a=b", lambda run: run.name),
        ("name=", "", lambda run: run.name),
        ("name=224x320", "224x320", lambda run: run.name),
        ("name={a = 1}", "{a = 1}", lambda run: run.name),
        ("name=1\nrate = 2", "1\nrate = 2", lambda run: run.name),
        ("rate=1e-3", 1e-3, lambda run: run.rate),
        ("rate=2", 2.0, lambda run: run.rate),
        ("rate=inf", math.inf, lambda run: run.rate),
        ("clip=none", None, lambda run: run.clip),
        ('clip="none"', None, lambda run: run.clip),
        ("note=none", None, lambda run: run.note),
        ("note=nine", "nine", lambda run: run.note),
        ("compile=true", True, lambda run: run.compile),
        ('tags=["a", "b"]', ("a", "b"), lambda run: run.tags),
        ("tags=[]", (), lambda run: run.tags),
        ("model.positions.kind=learned", "learned", lambda run: run.model.positions.kind),
        ("model.positions.kind=none", "none", lambda run: run.model.positions.kind),
        ("model.positions.grid=24", 24, lambda run: run.model.positions.grid),
        ("model.positions.grid=[14, 20]", (14, 20), lambda run: run.model.positions.grid),
        ("model.positions.grid=14x20", (14, 20), lambda run: run.model.positions.grid),
        ("model.patch=14", 14, lambda run: run.model.patch),
        ("model.head.pool=map", Head(pool="map"), lambda run: run.model.head),
        ('teacher={path = "L/16"}', Teacher(path="L/16"), lambda run: run.teacher),
        ("teacher=none", None, lambda run: run.teacher),
    ],
)
def test_field_type_decides_the_interpretation(assignment: str, value: object, read: Callable[[Run], object]) -> None:
    start = replace(RUN, note="a note")
    assert repr(read(apply_overrides(start, [assignment]))) == repr(value)


@given(text=st.from_regex(r"[A-Za-z0-9_/.:+-]*", fullmatch=True))
def test_text_field_takes_any_bare_word(text: str) -> None:
    assert apply_overrides(RUN, [f"name={text}"]).name == text


@given(text=st.text())
def test_text_field_takes_any_quoted_text(text: str) -> None:
    [quoted] = [line for line in to_toml(Teacher(path=text)).split("\n") if line.startswith("path")]
    assert apply_overrides(RUN, [quoted.replace("path = ", "name=", 1)]).name == text


def test_assignments_are_applied_at_once() -> None:
    run = apply_overrides(RUN, ["model.width=770", "model.heads=11", "rate=0.5"])
    assert (run.model.width, run.model.heads, run.rate) == (770, 11, 0.5)
    assert run.model.positions == RUN.model.positions


def test_no_assignments_change_nothing() -> None:
    assert apply_overrides(RUN, []) == RUN


BAD_ASSIGNMENTS = [
    (["rate"], "cannot read the assignment 'rate' (expected section.key=value)", None),
    (["=3"], "cannot read the assignment '=3' (expected section.key=value)", None),
    (["model.=3"], "cannot read the assignment 'model.=3' (expected section.key=value)", None),
    (["model..width=3"], "cannot read the assignment 'model..width=3' (expected section.key=value)", None),
    (["rate=1", "rate=1"], "rate is assigned twice (got rate=1 and rate=1)", None),
    (
        ["model.head.pool=map", "model.head=none"],
        "model.head is assigned twice (got model.head.pool=map and model.head=none)",
        None,
    ),
    (
        ["teacher=none", "teacher.path=a"],
        "teacher.path is assigned twice (got teacher=none and teacher.path=a)",
        None,
    ),
    (["rate=abc"], 'rate is not valid (expected a number, got "abc")', None),
    (["rate=1\nclip = 2"], r'rate is not valid (expected a number, got "1\nclip = 2")', None),
    (["rate="], 'rate is not valid (expected a number, got "")', None),
    (["model.width=1e3"], "model.width is not valid (expected an integer, got 1000.0)", None),
    (["model.width=true"], "model.width is not valid (expected an integer, got true)", None),
    (["model.width=none"], 'model.width is not valid (expected an integer, got "none")', None),
    (["model.width=24x24"], 'model.width is not valid (expected an integer, got "24x24")', None),
    (["compile=True"], 'compile is not valid (expected true or false, got "True")', "did you mean true?"),
    (["model=big"], 'model is not valid (expected a section, got "big")', None),
    (["modle.width=3"], "modle is not a known key", "did you mean model?"),
    (["width=3"], "width is not a known key", "did you mean model.width?"),
    (["rate.start=3"], "rate is a value, not a section (expected a number, got rate.start)", None),
    (["teacher.weight=3"], "teacher.path is missing (expected text)", None),
    (
        ["model.positions.kind=relativ"],
        'model.positions.kind is not valid (expected one of: learned, relative, none, got "relativ")',
        "did you mean relative?",
    ),
    (
        ["model.positions.grid=1x2x3"],
        'model.positions.grid is not valid (expected an integer, or [an integer, an integer], got "1x2x3")',
        None,
    ),
]


@pytest.mark.parametrize(("assignments", "message", "hint"), BAD_ASSIGNMENTS)
def test_bad_assignment_is_explained(assignments: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as info:
        apply_overrides(RUN, assignments)
    assert (info.value.summary, info.value.hint) == (message, hint)


def test_keys_with_a_common_prefix_do_not_clash() -> None:
    run = apply_overrides(RUN, ["model.head.pool=map", "model.heads=6"])
    assert run.model == replace(RUN.model, head=Head(pool="map"), heads=6)


# Files

RECIPES: dict[str, Callable[[], Run]] = {
    "short": lambda: replace(RUN, rate=0.5),
    "long": lambda: replace(RUN, rate=0.25),
}


def test_file_extends_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('base = "short"\n[model]\nwidth = 384\n', encoding="utf-8")
    expected = replace(RUN, rate=0.5, model=replace(RUN.model, width=384))
    assert load_toml(path, Run, recipes=RECIPES) == expected


def test_file_extends_another_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "first.toml").write_text('base = "short"\nnote = "from first"\n', encoding="utf-8")
    (tmp_path / "second.toml").write_text('base = "first.toml"\nclip = "none"\n', encoding="utf-8")
    path = tmp_path / "below" / "third.toml"
    path.write_text('base = "../second.toml"\nname = "third"\n', encoding="utf-8")
    expected = replace(RUN, name="third", rate=0.5, clip=None, note="from first")
    assert load_toml(str(path), Run, recipes=RECIPES) == expected


def test_cyclic_bases_are_rejected(tmp_path: Path) -> None:
    for name, base in [("a", "./b.toml"), ("b", "./c.toml"), ("c", "../" + tmp_path.name + "/a.toml")]:
        (tmp_path / f"{name}.toml").write_text(f'base = "{base}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"its own base .*a\.toml → .*b\.toml → .*c\.toml → .*a\.toml\)"):
        load_toml(tmp_path / "a.toml", Run, recipes=RECIPES)


def test_unknown_recipe_suggests_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('base = "shrot"', encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r'run\.toml: there is no recipe "shrot"') as info:
        load_toml(path, Run, recipes=RECIPES)
    assert info.value.hint == "did you mean short?"


def test_missing_file_suggests_a_neighbor(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match=r"rum\.toml: no such file") as info:
        load_toml(tmp_path / "rum.toml", Run, recipes={})
    assert info.value.hint == "did you mean run.toml?"


def test_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: Is a directory"):
        load_toml(tmp_path, Run, recipes={})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'name = "a"\nrate = \n', r"run\.toml: not a TOML file: .*line 2"),
        (b'name = "a"\nname = "b"\n', r"run\.toml: not a TOML file: .*line 2"),
        (b'name = "\xff"', r"run\.toml: not a TOML file: .*utf-8.*position 8"),
        (b"base = 3", r"run\.toml: base is not valid \(expected the name of a recipe, .* got 3\)"),
        (b'name = "a"\n[model]\nwidht = 3', r"run\.toml: model\.widht is not a known key"),
        (b'name = "a"\n[model]\nbase = "short"', r"run\.toml: model\.base is not a known key"),
        (b'name = "a"\n[[tags]]\nb = 1', r"run\.toml: tags is not valid"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_toml(path, Run, recipes=RECIPES)


LONG_KEY, MANY_DOTS = "a" + ".a" * 100, "." * 100


@pytest.mark.parametrize("quote", ['"', "'"])
@pytest.mark.parametrize("before", ["", "b = {0}x{0} # '\n", "[[b]]\nc = 1\n", "t = {{b = {0}{0}{0}x{0}{0}{0}{0}, "])
def test_key_of_many_parts_is_refused(quote: str, before: str) -> None:
    text = f"{before.format(quote)}{LONG_KEY}.{quote}c{quote} = 1"
    with pytest.raises(ValueError, match=r"a key has too many parts \(expected at most 64, got 102\)"):
        parse_toml(text)


TEXTS_AND_COMMENTS = ['"{}"', "'{}'", r'"\"{}"', "'''''{}'''''", r'"""""{}\""""""', '["{0}", "{0}"]', "1 # {}"]


@pytest.mark.parametrize("value", TEXTS_AND_COMMENTS)
def test_dots_in_text_and_comments_are_no_key(value: str) -> None:
    text = f"a = {value.format(MANY_DOTS)}"
    assert parse_toml(text) == tomllib.loads(text)


UNCLOSED = ['"""' + r"\"" * 9, '"""' + r"\"" * 9 + "\\", "'''" + "''x" * 9, '"' + r"\"" * 9, "'x", "#'"]


@pytest.mark.parametrize("text", UNCLOSED)
def test_unclosed_text_is_scanned_once(text: str) -> None:
    match = config_module._TOML_STRING_OR_COMMENT.match(text)
    assert match is not None
    assert match[0] == text


def test_import_needs_neither_torch_nor_pydantic() -> None:
    program = (
        "import sys, vitkit.core.config, vitkit.core.metrics_log;"
        "print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
