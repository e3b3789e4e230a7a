"""Numbers, sizes, durations and log records as text."""

import logging

import pytest

from vitkit.core.formatting import (
    TimestampFormatter,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_percent,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (86_567_656, "86.6 M"), (999_960, "1.0 M"), (1.2e17, "120000.0 T")],
)
def test_count_has_a_unit_prefix(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1_204_000_000, "1.2 GB"), (999.7, "1.0 kB")])
def test_bytes_have_decimal_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (3600, "1 h 0 min"), (None, "–")])
def test_duration_has_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (3599.6, "1:00:00"), (108_000, "30:00:00")])
def test_clock_has_hours_if_there_are_any(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def test_percent_of_a_missing_value_is_a_dash() -> None:
    assert (format_percent(1), format_percent(0.12345, digits=2), format_percent(None)) == ("100.0 %", "12.35 %", "–")


def test_log_of_a_server_has_time_and_level_in_every_record() -> None:
    record = logging.LogRecord("vitkit", logging.WARNING, "", 0, "the worker %s\n\x1b[31m", ("died",), None)
    record.created = 1_700_000_000.5
    first, second = TimestampFormatter().format(record).splitlines()
    assert first == "2023-11-14T22:13:20.500+00:00 WARNING the worker died"
    assert second == "    \\x1b[31m"
