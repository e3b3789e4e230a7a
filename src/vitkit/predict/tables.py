"""Answers go in, a file of them comes out: JSON lines, CSV or parquet, whole or not at all; what was cut off goes on.

While it is written, `NAME.partial` holds a line of JSON for each answer that is done, after a line that says what was
asked and of what. When all are there, the file is made of it; `NAME.json` beside it says what it holds and which images
are bad.
"""

import contextlib
import csv
import errno
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from vitkit.core.errors import ConfigError, DataError, did_you_mean
from vitkit.core.files import write_text, written_aside
from vitkit.data.sources.parquet import arrow
from vitkit.predict.stream import Answer

Form = Literal["csv", "jsonl", "parquet"]
FORMS: tuple[Form, ...] = ("csv", "jsonl", "parquet")
ROWS = 10_000
"""Rows of a parquet file that are held at once."""


def form_of(path: Path) -> Form:
    """The form of a file by the end of its name.

    >>> form_of(Path("answers.csv"))
    'csv'
    """
    for form in FORMS:
        if path.suffix.lower() == f".{form}":
            return form
    hint = did_you_mean(path.suffix, [f".{form}" for form in FORMS]) or "use one of these endings"
    raise ConfigError(f"{path}: the ending says no form", expected=".csv, .jsonl or .parquet", got=path.name, hint=hint)


class AnswerFile:
    """A file of answers that is being written, or is done.

    `asked` is the question, and `seen` has marks of what answers and of what it is asked about: "weights", "images".
    """

    file: BinaryIO
    """The answers up to now, while the file is `begun`. A second handle must not be: to close it ends the lock."""

    def __init__(self, path: Path, asked: Mapping[str, object], *, seen: Mapping[str, object]) -> None:
        self.path, self.asked, self.seen, self.form = path, dict(asked), dict(seen), form_of(path)
        if self.form == "parquet":
            arrow("pyarrow")  # who lacks it learns so before hours of work, not after
        self.partial, self.about = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.json")

    def is_done(self) -> bool:
        """Whether the same was asked before and answered; a file that answers something else is an error."""
        if not self.path.exists():
            return False
        try:
            said = self.about.read_bytes()
        except OSError:
            said = b""
        self._refuse_another(self.path, said, hint="name another --out, or remove it and the .json beside it")
        with contextlib.suppress(OSError):  # there only if the last step of all was not reached
            self.partial.unlink()
        return True

    def _refuse_another(self, path: Path, said: bytes, *, hint: str) -> None:
        """Refuse a file whose JSON speaks of another question, or of other images or weights."""
        try:
            found = json.loads(said)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("asked") != self.asked:
            raise DataError(f"{path} is there already, and answers another question", hint=hint)
        before = found.get("seen")
        before = before if isinstance(before, dict) else {}  # older files of answers have none
        if changed := [what for what, mark in self.seen.items() if before.get(what, mark) != mark]:
            raise DataError(f"{path} is there already, and the {' and '.join(changed)} changed since", hint=hint)

    @contextmanager
    def begun(self) -> Iterator[int]:
        """Let no other process write here while answers are added; how many of an interrupted run are there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with opened_alone(self.partial) as self.file:
            yield self._done()

    def _done(self) -> int:
        """How many answers are there; a line that was cut off is taken back."""
        self.file.seek(0)
        first = self.file.readline()
        count, end = 0, len(first)
        for line in self.file:
            if not line.endswith(b"\n"):
                break
            count, end = count + 1, end + len(line)
        if count:
            self._refuse_another(self.partial, first, hint="name another --out, or remove it to begin anew")
        self.file.truncate(end if count else 0)
        self.file.seek(0, os.SEEK_END)
        if not count:
            self.file.write(_line({"asked": self.asked, "seen": self.seen}))
            self.file.flush()
        return count

    def add(self, batches: Iterable[list[Answer]]) -> Iterator[list[Answer]]:
        """Write the answers of each batch, and hand it on once they are on the disk."""
        for batch in batches:
            self.file.write(b"".join(_line(answer.to_json()) for answer in batch))
            self.file.flush()
            os.fsync(self.file.fileno())
            yield batch

    def finish(
        self, *, model: str, classes: int, features: int, engine: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Write what is to be known of the answers, with words on the engine, then the file of them; the former, too.

        `classes` and `features` are how many of them an answer has, so that all parts have the same columns.
        """
        writers: Mapping[Form, Callable[[Path], None]] = {
            "csv": functools.partial(self._write_csv, classes=classes, features=features),
            "jsonl": self._write_lines,
            "parquet": self._write_parquet,
        }
        with written_aside(self.path) as aside:
            writers[self.form](aside)
            about = {"model": model, **self._counted(), "asked": self.asked, "seen": self.seen, **(engine or {})}
            # First, because a file of answers without it is taken for somebody else's.
            write_text(self.about, json.dumps(about, indent=2) + "\n")
        self.file.close()
        self.partial.unlink(missing_ok=True)
        return about

    def _counted(self) -> dict[str, Any]:
        """How many images there are, and which are bad."""
        images, bad = 0, []
        for row in self._rows():
            images += 1
            if "error" in row:
                bad.append({"file": row["file"], "reason": row["error"]})
        return {"images": images, "bad": bad}

    def _rows(self) -> Iterator[dict[str, Any]]:
        self.file.seek(0)
        next(self.file)
        for line in self.file:
            yield json.loads(line)

    def _write_lines(self, path: Path) -> None:
        with path.open("wb") as file:
            for row in self._rows():
                file.write(_line(row))

    def _write_csv(self, path: Path, *, classes: int, features: int) -> None:
        """A row an image: labels and probabilities side by side, then the features, then what went wrong."""
        head = ["file", *(f"{what}_{rank}" for rank in range(1, classes + 1) for what in ("label", "probability"))]
        head += [f"feature_{number}" for number in range(features)]
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*head, "error"])
            for row in self._rows():
                said = [value for each in row.get("predictions", ()) for value in (each["label"], each["probability"])]
                said += [""] * (2 * classes - len(said))
                numbers = [*row.get("features", ())] or [""] * features
                writer.writerow([row["file"], *said, *numbers, row.get("error", "")])

    def _write_parquet(self, path: Path) -> None:
        pyarrow, parquet = arrow("pyarrow"), arrow("pyarrow.parquet")
        schema = pyarrow.schema(
            [
                ("file", pyarrow.string()),
                ("labels", pyarrow.list_(pyarrow.string())),
                ("probabilities", pyarrow.list_(pyarrow.float32())),
                ("features", pyarrow.list_(pyarrow.float32())),
                ("error", pyarrow.string()),
            ]
        )
        with parquet.ParquetWriter(path, schema) as writer:
            for rows in _several(map(_columns, self._rows())):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    said = row.get("predictions", ())
    return {
        "file": row["file"].encode("utf-8", "backslashreplace").decode(),
        "labels": [each["label"] for each in said],
        "probabilities": [each["probability"] for each in said],
        "features": row.get("features", []),
        "error": row.get("error"),
    }


def _several(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == ROWS:
            yield held
            held = []
    yield held


def _line(value: Mapping[str, object]) -> bytes:
    """A line of JSON; as plain text, unless a file's name is no text at all."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


@contextmanager
def opened_alone(path: Path) -> Iterator[BinaryIO]:
    """A file to read and to add to; one that another process has opened in this way is an error."""
    while True:
        with path.open("ab+") as file:
            _lock(file, path)
            if not _is_at(path, file):  # who had the lock was done with the file, and removed it
                continue
            yield file
            return


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed or the process ends, where the system and the disk have such locks."""
    try:
        import fcntl  # noqa: PLC0415  not on every system
    except ImportError:  # pragma: no cover
        return
    try:
        # Not flock: the processes that decode would inherit it, and keep it for seconds after this one was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise DataError(
                f"another process is writing {path}", hint="let it finish, or name another --out"
            ) from error


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
