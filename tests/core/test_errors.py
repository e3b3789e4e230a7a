"""Error messages and suggestions."""

import pytest

from vitkit.core.errors import ConfigError, InputError, UnknownNameError, VitkitError, did_you_mean


@pytest.mark.parametrize(
    ("expected", "got", "text"),
    [
        (None, None, "the sizes do not fit"),
        (12, None, "the sizes do not fit (expected 12)"),
        (None, 0, "the sizes do not fit (got 0)"),
        (12, False, "the sizes do not fit (expected 12, got False)"),
    ],
)
def test_error_text_has_expected_and_actual_values(expected: object, got: object, text: str) -> None:
    error = VitkitError("the sizes do not fit", expected=expected, got=got)
    assert str(error) == text
    assert error.args == (text,)


def test_hint_is_the_second_line_of_the_text() -> None:
    error = VitkitError("the sizes do not fit", hint="pass --image-size 224")
    assert error.hint == "pass --image-size 224"
    assert error.summary == "the sizes do not fit"
    assert str(error) == "the sizes do not fit\nhint: pass --image-size 224"


@pytest.mark.parametrize("kind", [ConfigError, InputError, UnknownNameError])
def test_every_error_is_a_vitkit_error(kind: type[VitkitError]) -> None:
    with pytest.raises(VitkitError, match="too small"):
        raise kind("too small")


def test_errors_are_no_value_errors() -> None:
    assert not issubclass(VitkitError, ValueError | TypeError | AssertionError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("B/61", "did you mean B/16?"),
        ("b/16", "did you mean B/16?"),
        ("L/16", "did you mean L/16?"),
        ("resnet", None),
        ("", None),
    ],
)
def test_suggestion_ignores_case(name: str, hint: str | None) -> None:
    assert did_you_mean(name, ["B/16", "L/16"]) == hint


def test_no_suggestion_without_candidates() -> None:
    assert did_you_mean("B/16", []) is None
