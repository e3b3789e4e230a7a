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
def test_an_error_reads_as_what_was_expected_and_what_came(expected: object, got: object, text: str) -> None:
    error = VitkitError("the sizes do not fit", expected=expected, got=got)
    assert str(error) == text
    assert error.args == (text,)


def test_the_hint_is_kept_apart_from_the_message() -> None:
    error = VitkitError("the sizes do not fit", hint="pass --image-size 224")
    assert error.hint == "pass --image-size 224"
    assert "pass" not in str(error)


@pytest.mark.parametrize("kind", [ConfigError, InputError, UnknownNameError])
def test_every_kind_of_error_is_caught_as_one(kind: type[VitkitError]) -> None:
    with pytest.raises(VitkitError, match="too small"):
        raise kind("too small")


def test_no_error_is_a_value_error_that_other_libraries_would_wrap() -> None:
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
def test_the_nearest_name_is_suggested_whatever_its_case(name: str, hint: str | None) -> None:
    assert did_you_mean(name, ["B/16", "L/16"]) == hint


def test_nothing_is_suggested_where_nothing_is_known() -> None:
    assert did_you_mean("B/16", []) is None
