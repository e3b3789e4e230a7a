"""Files of predictions: CSV, JSON lines or parquet, written completely or not at all, and resumable.

While a file is written, `NAME.partial` holds a header line and one JSON line per finished image. At the end the file is
written from it, with `NAME.json` next to it: the request, fingerprints of its inputs, and the images that failed.
"""

import contextlib
import csv
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import ConfigError, DataError, WeightsError, did_you_mean
from vitkit.core.files import atomic_write, sha256, write_json
from vitkit.data.dataset import ImageSource, fingerprint_source
from vitkit.data.layouts.shards import import_pyarrow
from vitkit.inference.predictions import ImagePrediction, Prediction, count_images
from vitkit.typing import ModelSource
from vitkit.weights.artifact import CHECKSUMS, CONFIG, PREPROCESSING
from vitkit.weights.load import WEIGHT_FILES, load_bundle, resolve_source

TableFormat = Literal["csv", "jsonl", "parquet"]
TABLE_FORMATS: tuple[TableFormat, ...] = ("csv", "jsonl", "parquet")
PARQUET_ROWS = 10_000
"""Rows per parquet row group, which are in memory together."""


def detect_table_format(path: Path) -> TableFormat:
    """Return the format of a file by its suffix."""
    for table_format in TABLE_FORMATS:
        if path.suffix.lower() == f".{table_format}":
            return table_format
    hint = did_you_mean(path.suffix, [f".{each}" for each in TABLE_FORMATS]) or "use one of these suffixes"
    raise ConfigError(f"{path}: unknown suffix", expected=".csv, .jsonl or .parquet", got=path.name, hint=hint)


class PredictionFile:
    """A file of predictions that is being written or is complete.

    Args:
        request: The arguments of the prediction. A file of another request is not overwritten.
        fingerprints: Fingerprints of "weights" and "images". A file of other inputs is not overwritten either.
    """

    file: BinaryIO
    """The partial file while it is open. There must be no second handle: closing one releases the lock."""

    def __init__(self, path: Path, request: Mapping[str, object], *, fingerprints: Mapping[str, object]) -> None:
        self.path, self.request, self.fingerprints = path, dict(request), dict(fingerprints)
        self.format = detect_table_format(path)
        if self.format == "parquet":
            import_pyarrow("pyarrow")  # fail before the work if it is missing
        self.partial_path = path.with_name(f"{path.name}.partial")
        self.metadata_path = path.with_name(f"{path.name}.json")

    def is_complete(self) -> bool:
        """Return whether this request was completed before. Raise DataError if the file holds something else."""
        if not self.path.exists():
            return False
        try:
            metadata = self.metadata_path.read_bytes()
        except OSError:
            metadata = b""
        self._check_header(self.path, metadata, hint="choose another out (--out), or delete it and its .json file")
        with contextlib.suppress(OSError):  # left over if the process was killed in the last step
            self.partial_path.unlink()
        return True

    def read_metadata(self) -> dict[str, Any]:
        """Return the metadata of a complete file."""
        metadata: dict[str, Any] = json.loads(self.metadata_path.read_bytes())
        return metadata

    @contextmanager
    def open(self) -> Iterator[int]:
        """Lock the partial file for this process and yield the number of images that it already holds."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_exclusively(self.partial_path) as self.file:
            yield self._resume()

    def append(self, batches: Iterable[list[ImagePrediction]]) -> Iterator[list[ImagePrediction]]:
        """Write each batch and yield it once it is on the disk."""
        for batch in batches:
            self.file.write(b"".join(_json_line(prediction.to_dict()) for prediction in batch))
            self.file.flush()
            os.fsync(self.file.fileno())
            yield batch

    def finalize(
        self, *, model: str, classes: int, features: int, engine: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Write the table and its metadata, remove the partial file, and return the metadata.

        `classes` and `features` are their numbers per image, so that the files of all processes have the same columns.
        """
        with atomic_write(self.path) as temporary:
            if self.format == "csv":
                self._write_csv(temporary, classes=classes, features=features)
            elif self.format == "jsonl":
                self._write_jsonl(temporary)
            else:
                self._write_parquet(temporary)
            metadata = {"model": model, **count_images(map(_from_json, self._rows())), "request": self.request}
            metadata |= {"fingerprints": self.fingerprints, **(engine or {})}
            # Metadata first: a table without it is taken for a file of another program.
            write_json(self.metadata_path, metadata)
        self.file.close()
        self.partial_path.unlink(missing_ok=True)
        return metadata

    def _check_header(self, path: Path, header: bytes, *, hint: str) -> None:
        """Raise DataError if a file's header has another request or other fingerprints."""
        try:
            stored = json.loads(header)
        except ValueError:
            stored = None
        if not isinstance(stored, dict) or stored.get("request") != self.request:
            raise DataError(f"{path} already exists and holds the predictions of another request", hint=hint)
        before = stored.get("fingerprints")
        before = before if isinstance(before, dict) else {}
        if changed := [name for name, value in self.fingerprints.items() if before.get(name, value) != value]:
            raise DataError(f"{path} already exists, and the {' and '.join(changed)} changed since", hint=hint)

    def _resume(self) -> int:
        """Return the number of valid lines and remove the first that is damaged, and all after it.

        Write the header of a new file.
        """
        self.file.seek(0)
        header = self.file.readline()
        count, end = 0, len(header)
        for line in self.file:
            if not line.endswith(b"\n") or not _is_row(line):
                break
            count, end = count + 1, end + len(line)
        if count:
            self._check_header(
                self.partial_path, header, hint="choose another out (--out), or delete it to start again"
            )
        self.file.truncate(end if count else 0)
        self.file.seek(0, os.SEEK_END)
        if not count:
            self.file.write(_json_line({"request": self.request, "fingerprints": self.fingerprints}))
            self.file.flush()
        return count

    def _rows(self) -> Iterator[dict[str, Any]]:
        self.file.seek(0)
        next(self.file)
        for line in self.file:
            yield json.loads(line)

    def _write_jsonl(self, path: Path) -> None:
        with path.open("wb") as file:
            for row in self._rows():
                file.write(_json_line(row))

    def _write_csv(self, path: Path, *, classes: int, features: int) -> None:
        """Write one row per image: labels and probabilities side by side, then features, then the error."""
        ranked = [f"{column}_{rank}" for rank in range(1, classes + 1) for column in ("label", "probability")]
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["file", *ranked, *(f"feature_{index}" for index in range(features)), "error"])
            for row in self._rows():
                top = [value for each in row.get("predictions", ()) for value in (each["label"], each["probability"])]
                top += [""] * (2 * classes - len(top))
                values = [*row.get("features", ())] or [""] * features
                writer.writerow([row["file"], *top, *values, row.get("error", "")])

    def _write_parquet(self, path: Path) -> None:
        pyarrow, parquet = import_pyarrow("pyarrow"), import_pyarrow("pyarrow.parquet")
        schema = pyarrow.schema(
            [
                ("file", pyarrow.string()),
                ("labels", pyarrow.list_(pyarrow.string())),
                ("probabilities", pyarrow.list_(pyarrow.float32())),
                ("features", pyarrow.list_(pyarrow.float32())),
                ("error", pyarrow.string()),
            ]
        )
        rows = map(_parquet_row, self._rows())
        with parquet.ParquetWriter(path, schema) as writer:
            while group := list(islice(rows, PARQUET_ROWS)):
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


class StoredPredictions(Sequence[ImagePrediction]):
    """The rows of a complete file, read when they are used. The file is not held in memory."""

    def __init__(self, path: Path, *, size: int) -> None:
        self.path, self.size, self.format = path, size, detect_table_format(path)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[ImagePrediction]:
        if self.format == "parquet":
            for group in range(-(-self.size // PARQUET_ROWS)):
                yield from map(_from_parquet, self._read_group(group).to_pylist())
            return
        with self.path.open("rb") as file:
            for _, row in self._records(file):
                yield row

    @overload
    def __getitem__(self, index: int) -> ImagePrediction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ImagePrediction]: ...
    def __getitem__(self, index: int | slice) -> ImagePrediction | Sequence[ImagePrediction]:
        if isinstance(index, slice):
            return [self[position] for position in range(self.size)[index]]
        index = range(self.size)[index]
        if self.format == "parquet":
            group, row = divmod(index, PARQUET_ROWS)
            return _from_parquet(self._read_group(group).slice(row, 1).to_pylist()[0])
        with self.path.open("rb") as file:
            file.seek(int(self.offsets[index]))
            return next(self._records(file, skip_header=False))[1]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Position of each row in the file, so that any of them can be read without the others."""
        with self.path.open("rb") as file:
            return np.fromiter((offset for offset, _ in self._records(file)), dtype=np.int64, count=self.size)

    def _read_group(self, group: int) -> Any:
        return import_pyarrow("pyarrow.parquet").ParquetFile(self.path).read_row_group(group)

    def _records(self, file: BinaryIO, *, skip_header: bool = True) -> Iterator[tuple[int, ImagePrediction]]:
        """Yield the position and the content of each row from the file's position on."""
        if self.format == "jsonl":
            while line := file.readline():
                yield file.tell() - len(line), _from_json(json.loads(line))
            return
        rows = csv.reader(line.decode("utf-8", "surrogateescape") for line in iter(file.readline, b""))
        if skip_header:
            next(rows)
        offset = file.tell()
        for row in rows:  # a field may contain line breaks; the reader takes as many lines as it needs
            yield offset, self._from_csv(row)
            offset = file.tell()

    @cached_property
    def columns(self) -> tuple[int, int]:
        """Numbers of classes and of features in each row of a CSV file."""
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            header = next(csv.reader(file))
        return sum(name.startswith("label_") for name in header), sum(name.startswith("feature_") for name in header)

    def _from_csv(self, row: Sequence[str]) -> ImagePrediction:
        classes, features = self.columns
        file, *cells, error = row
        top, values = cells[: 2 * classes], cells[2 * classes :]
        pairs = zip(top[::2], top[1::2], strict=True)
        return ImagePrediction(
            file=file,
            predictions=tuple(Prediction(label, float(value)) for label, value in pairs if value),
            features=tuple(map(float, values)) if features and not error else (),
            error=error or None,
        )


def _is_row(line: bytes) -> bool:
    """Return whether a line is the JSON of a prediction."""
    try:
        return isinstance(_from_json(json.loads(line)).file, str)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _from_json(row: Mapping[str, Any]) -> ImagePrediction:
    predictions = tuple(Prediction(each["label"], each["probability"]) for each in row.get("predictions", ()))
    features = tuple(row.get("features", ()))
    return ImagePrediction(file=row["file"], predictions=predictions, features=features, error=row.get("error"))


def _from_parquet(row: Mapping[str, Any]) -> ImagePrediction:
    return ImagePrediction(
        file=row["file"],
        predictions=tuple(map(Prediction, row["labels"], row["probabilities"])),
        features=tuple(row["features"]),
        error=row["error"],
    )


def _parquet_row(row: Mapping[str, Any]) -> dict[str, Any]:
    predictions = row.get("predictions", ())
    return {
        "file": row["file"].encode("utf-8", "backslashreplace").decode(),
        "labels": [each["label"] for each in predictions],
        "probabilities": [each["probability"] for each in predictions],
        "features": row.get("features", []),
        "error": row.get("error"),
    }


def _json_line(value: Mapping[str, object]) -> bytes:
    """Encode a JSON line in UTF-8; in ASCII if a file name is not valid text."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


@contextmanager
def open_exclusively(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading and appending. Raise DataError if another process has opened it this way."""
    while True:
        with path.open("ab+") as file:
            _lock(file, path)
            if not _is_at(path, file):  # the process that held the lock finished and removed the file
                continue
            yield file
            return


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed or the process ends, where the system and file system support locks."""
    try:
        import fcntl  # noqa: PLC0415  not on every system
    except ImportError:  # pragma: no cover
        return
    try:
        # Not flock (nor filelock, which uses it): decoding processes would inherit the lock and hold it for seconds
        # after this process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise DataError(f"another process is writing {path}", hint="wait for it, or choose another out") from error


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def fingerprint_inputs(model: ModelSource, source: ImageSource) -> dict[str, object]:
    """Return fingerprints of a model's weights and of the images, to detect changes before resuming."""
    weights = fingerprint_weights(model)
    return {"images": fingerprint_images(source), **({"weights": weights} if weights else {})}


def fingerprint_images(source: ImageSource) -> dict[str, object]:
    """Return the number of images and a checksum of their names in order."""
    return {"count": len(source), "names": fingerprint_source(source)}


def fingerprint_weights(model: ModelSource) -> str | None:
    """Return a checksum that changes with the weights; None if there are no weights.

    For a model in memory it covers the tensors, for an artifact the checksums of its files, for other weights their
    sizes and times: reading them would take as long as loading the model.
    """
    try:
        path = resolve_source(model)
    except WeightsError:  # raised again when the model is loaded
        return None
    if not isinstance(path, Path):
        return load_bundle(path).fingerprint()
    if (path / CHECKSUMS).is_file():
        return sha256(path / CHECKSUMS)
    files = _weight_files(path)
    if not files:
        return None
    directory = files[0].parent
    files += [file for file in (directory / CONFIG, directory / PREPROCESSING) if file.is_file()]
    stats = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in (file.stat(),)]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.name.endswith(WEIGHT_FILES) and file.is_file())
    return [path] if path.is_file() else []
