"""Numbers, sizes, durations, untrusted text and log records as people read them."""

import json
import logging
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

MISSING = "–"
"""Shown for a value that does not exist."""
# Control characters, line separators, direction overrides, and lone surrogates (undecodable file names).
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe_text(text: str) -> str:
    r"""Escape characters that could control the terminal or cannot be encoded.

    >>> print(safe_text("cat\x1b[31m.jpg"))
    cat\x1b[31m.jpg
    """
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_count(count: int | float) -> str:
    """Format a count with three or four digits and a unit prefix.

    >>> format_count(86_567_656), format_count(196)
    ('86.6 M', '196')
    """
    return _scale(count, ("", "k", "M", "G", "T"))


def format_plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> format_plural(1, "head"), format_plural(3, "head")
    ('1 head', '3 heads')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten_list(names: Sequence[str], *, limit: int = 5) -> str:
    """Join the first names for a message.

    >>> shorten_list(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def format_bytes(size: int | float) -> str:
    """Format a size in decimal units.

    >>> format_bytes(1_204_000_000), format_bytes(512)
    ('1.2 GB', '512 B')
    """
    return _scale(size, ("B", "kB", "MB", "GB", "TB"))


def format_percent(fraction: int | float | None, digits: int = 1) -> str:
    """Format a fraction as a percentage.

    >>> format_percent(0.8415), format_percent(None)
    ('84.2 %', '–')
    """
    return MISSING if fraction is None else f"{100 * fraction:.{digits}f} %"


def format_number(value: int | float | None) -> str:
    """Format a number of any magnitude in a few characters, for axes and tables.

    >>> [format_number(value) for value in (86_600_000, 0.00018, 250, 1_000_000_000_000, None)]
    ['86.6M', '0.00018', '250', '1e12', '–']
    """
    if value is None:
        return MISSING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= value < 1000 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def format_value(value: object) -> str:
    """Format a value as settings are written.

    >>> format_value(None), format_value(1e-6), format_value([224, 320])
    ('none', '1e-06', '224x320')
    """
    if isinstance(value, list | tuple):
        return ("x" if all(isinstance(part, int) for part in value) else " ").join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_duration(seconds: int | float | None) -> str:
    """Format a duration with its two largest units.

    >>> format_duration(95), format_duration(7260), format_duration(None)
    ('1 min 35 s', '2 h 1 min', '–')
    """
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_hours(hours: int | float) -> str:
    """Format an estimated duration in hours, or in minutes if it is short.

    >>> format_hours(2.34), format_hours(0.2), format_hours(0.01)
    ('2.3 hours', '12 minutes', '1 minute')
    """
    return f"{hours:,.1f} hours" if hours >= 1 else format_plural(round(60 * hours), "minute")


def format_clock(seconds: int | float) -> str:
    """Format a duration as on a clock, with hours only if there are any.

    >>> format_clock(130), format_clock(100_000.4)
    ('2:10', '27:46:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scale(number: int | float, units: tuple[str, ...]) -> str:
    """Format a number in the largest unit in which it is at least 1.0."""
    power = 0
    while abs(number) >= (999.95 if power else 999.5) and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.{1 if power else 0}f} {units[power]}".rstrip()


LogFormat = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    """Plain messages; warnings and errors start with their level."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without control characters."""
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return "\n".join(map(safe_text, f"{prefix}{super().format(record)}".splitlines()))


class TimestampFormatter(TextFormatter):
    """Time in UTC and level before the message, for processes that run for days."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without control characters; further lines are indented."""
        lines = logging.Formatter.format(self, record).splitlines() or [""]
        prefix = f"{_utc(record)} {record.levelname:<7}"
        return "\n".join(f"{prefix if not number else '   '} {safe_text(line)}" for number, line in enumerate(lines))


class JsonFormatter(logging.Formatter):
    """One JSON object per record. Keys passed as `extra={"fields": {...}}` are added."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of ASCII."""
        entry: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class StandardErrorHandler(logging.Handler):
    """Handler that writes to the current `sys.stderr`, also after it was replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except OSError:  # stderr is a closed pipe
            self.handleError(record)


def configure_logging(
    log_format: LogFormat = "text", *, handler: logging.Handler | None = None, has_timestamps: bool = False
) -> None:
    """Send vitkit's log records, and errors of the libraries it uses, to stderr or to another handler.

    JSON has timestamps in any case. A second call replaces the handler of the first; handlers of other programs stay.
    """
    handler = handler or StandardErrorHandler()
    text_formatter = TimestampFormatter() if has_timestamps else TextFormatter()
    handler.setFormatter(JsonFormatter() if log_format == "json" else text_formatter)
    root = logging.getLogger()
    for previous in _own_handlers():
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.ERROR)
    logging.getLogger("vitkit").setLevel(logging.INFO)


def get_log_format() -> LogFormat:
    """Return the format that `configure_logging` was called with."""
    return "json" if any(isinstance(each.formatter, JsonFormatter) for each in _own_handlers()) else "text"


def is_logging_configured() -> bool:
    """Return whether `configure_logging` was called, as the command line does."""
    return bool(_own_handlers())


def _own_handlers() -> list[logging.Handler]:
    return [each for each in logging.getLogger().handlers if isinstance(each.formatter, TextFormatter | JsonFormatter)]
