"""Metrics log of a run: one JSON object per line, readable after the process was killed at any moment.

Each line is one `write` to a file opened for appending, so a killed run leaves at most one incomplete line, the last.
Readers skip it and the next writer removes it. JSON has no NaN and infinity: they are written as the strings "nan",
"inf" and "-inf" and read back as floats.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.core.errors import VitkitError
from vitkit.core.files import write_bytes

Scalar = bool | int | float | str | None
Value = Scalar | Sequence[Scalar]
MetricsRecord = dict[str, Value]
"""One line: `step` and the values logged with it."""


class MetricsLog:
    """Writer that appends to a log, creating the file but not its directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        content = self.path.read_bytes() if self.path.exists() else b""
        if (complete := content.rfind(b"\n") + 1) < len(content):
            os.truncate(self.path, complete)
        self._file = self.path.open("ab", buffering=0)

    def write(self, *, step: int, **fields: Value) -> None:
        """Append one line."""
        record = {"step": step} | {name: _to_json(value) for name, value in fields.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        count = self._file.write(line)
        if count < len(line):
            self.close()  # another line after the incomplete one would be damage in the middle
            raise VitkitError(
                f"{self.path}: the line of step {step} was cut off",
                expected=f"{len(line)} bytes",
                got=count,
                hint="free space on the disk and resume the run",
            )

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[MetricsRecord]:
    """Read all complete lines of a log; damage before the last line is an error."""
    return [record for _, record in _complete_lines(Path(path))]


def validation_score(metrics: Mapping[str, object]) -> float:
    """Return the number by which evaluations are ranked: top-1 accuracy, or minus the loss if there are no labels.

    >>> validation_score({"val_loss": 0.5, "val_top1": 0.9}), validation_score({"val_loss": 0.5})
    (0.9, -0.5)
    """
    score = float(str(metrics["val_top1"])) if "val_top1" in metrics else -float(str(metrics["val_loss"]))
    return -math.inf if math.isnan(score) else score


def find_best(path: Path | str) -> tuple[float, int] | None:
    """Return the best validation score in a log and the first step that reached it; None if nothing was evaluated."""
    records = read_metrics(path) if Path(path).exists() else []
    evaluated = [record for record in records if "val_loss" in record]
    best = max(evaluated, key=validation_score, default=None)
    return None if best is None else (validation_score(best), int(str(best["step"])))


def truncate_metrics(path: Path | str, step: int) -> None:
    """Remove the lines of later steps, before a run resumes from `step`."""
    path = Path(path)
    write_bytes(path, b"".join(text for text, record in _complete_lines(path) if record["step"] <= step))


def _complete_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield the text of each complete line, and the record in it."""
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
            yield text, {name: _from_json(value) for name, value in record.items()}


def _to_json(value: Value) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
