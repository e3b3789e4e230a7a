"""The run log: a step's numbers go in, one line of JSON comes out, and a killed run leaves a log that reads.

A line counts once its newline is written. Each line is one `write` to a file opened for appending, so a
killed run leaves at most one torn line, the last, which readers leave out and the next writer removes.

JSON has no NaN and no infinity: they are written as the texts "nan", "inf" and "-inf", and a value that is
one of these texts is read as the float.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vitkit.core.errors import VitkitError
from vitkit.core.files import write_bytes

__all__ = ["Record", "RunLog", "Scalar", "Value", "read", "truncate_after"]

Scalar = bool | int | float | str | None
Value = Scalar | Sequence[Scalar]
Record = dict[str, Value]
"""One line: `step` and whatever else was logged with it."""


class RunLog:
    """Appends to the log at `path`; the file is created where there is none, its folder must exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     with RunLog(path) as log:
    ...         log.write(step=1, loss=0.5)
    ...         log.write(step=2, loss=float("inf"), rates=[0.1, 0.2])
    ...     print(path.read_text(encoding="utf-8"), end="")
    {"step": 1, "loss": 0.5}
    {"step": 2, "loss": "inf", "rates": [0.1, 0.2]}
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        _remove_torn_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, *, step: int, **fields: Value) -> None:
        """Append one line."""
        record = {"step": step} | {name: _to_json(value) for name, value in fields.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written < len(line):
            self.close()  # another line after the torn one would be damage in the middle
            raise VitkitError(
                f"{self.path}: the line of step {step} was cut off",
                expected=f"{len(line)} bytes",
                got=written,
                hint="make room on the disk and resume the run",
            )

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read(path: Path | str) -> list[Record]:
    """All whole lines of a log; a torn last line is left out, damage anywhere else is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"step": 1, "loss": "nan"}\\n{"step": 2, "lo', encoding="utf-8")
    ...     read(path)
    [{'step': 1, 'loss': nan}]
    """
    return [line.record for line in _whole_lines(Path(path))]


def truncate_after(path: Path | str, step: int) -> None:
    """Drop every line of a later step, before a run resumes from `step` and opens its log.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     with RunLog(path) as log:
    ...         for step in (10, 20, 30):
    ...             log.write(step=step)
    ...     truncate_after(path, 20)
    ...     read(path)
    [{'step': 10}, {'step': 20}]
    """
    path = Path(path)
    kept = [line.text for line in _whole_lines(path) if line.step <= step]
    write_bytes(path, b"".join(kept))


@dataclass(frozen=True, kw_only=True)
class _Line:
    text: bytes
    step: int
    record: Record


def _whole_lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                record = json.loads(text)
            except ValueError:
                record = None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise VitkitError(
                    f"{path}: line {number} is damaged",
                    expected="a JSON object with an integer step",
                    got=ascii(text[:60].decode(errors="replace")),
                    hint="restore the file, or delete the line",
                )
            values = {name: _from_json(value) for name, value in record.items()}
            yield _Line(text=text, step=record["step"], record=values)


def _remove_torn_line(path: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _to_json(value: Value) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Value) -> Value:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return _scalar_from_json(value)
    return [_scalar_from_json(item) for item in value]


def _scalar_from_json(value: Scalar) -> Scalar:
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
