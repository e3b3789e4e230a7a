"""Handle of a run in its directory, and the history of its metrics."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Literal, NoReturn

from vitkit.core.errors import DataError, InputError
from vitkit.core.result import Result, render_table
from vitkit.typing import DataSource, ImageLike, Path, Settings

if TYPE_CHECKING:
    import matplotlib.figure

    from vitkit.evaluation.evaluation import EvaluationResult
    from vitkit.exporters.exporter import ExportResult
    from vitkit.inference.predictions import Predictions
    from vitkit.report.inspection import InspectionResult
    from vitkit.training.config import RunConfig
    from vitkit.training.run import Trial
    from vitkit.training.run_dir import RunDir
    from vitkit.zoo.registry import Model


OTHER_NAMES = {
    "accuracy": "run.metrics.accuracy",
    "best_model": "run.model",
    "classes": "run.labels",
    "results": "run.metrics",
    "resume": "vitkit.train with the same arguments",
    "save": "vitkit.save(run.model, path)",
    "serve": "vitkit.serve(run)",
    "test": "run.evaluate(data)",
    "top1": "run.metrics.top1",
    "train": "vitkit.train with the same arguments resumes, vitkit.finetune(run, data) starts from its weights",
}
"""What to use for attributes that users try."""


@dataclass(frozen=True, kw_only=True, repr=False)
class History(Result):
    """Metrics of a run by step: those of training, and with the prefix `val_` those of evaluations."""

    steps: tuple[int, ...]
    metrics: Mapping[str, tuple[float | None, ...]]
    """Values at each step, None where a metric was not measured."""

    def __getitem__(self, name: str) -> tuple[float, ...]:
        """Return the values of a metric, without steps at which it was not measured."""
        if name not in self.metrics:
            raise KeyError(f"there is no metric {name}, only {', '.join(self.metrics)}")
        return tuple(value for value in self.metrics[name] if value is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.steps)

    def to_dict(self) -> dict[str, object]:
        """Return columns of equal length, for pandas."""
        return {"step": list(self.steps)} | {name: list(values) for name, values in self.metrics.items()}

    def highlights(self) -> dict[str, object]:
        """Return the last value of each metric."""
        last: dict[str, object] = {name: self[name][-1] for name in self.metrics if self[name]}
        return {"steps": self.steps[-1] if self.steps else 0} | last

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw loss, accuracy, learning rate and gradient norm over the steps."""
        from vitkit.report.history import plot_history

        return plot_history(self.steps, self.metrics)


class Run:
    """A run in its directory, new, interrupted or finished. Opening it never trains.

    Two runs are equal if they have the same path.

    Args:
        path: Run directory.
        warnings: What needed attention while it was trained.
        already_finished: Whether the call that returned the run found it finished.

    >>> Run("no-run")
    Traceback (most recent call last):
    vitkit.core.errors.InputError: no-run is not a run directory
    hint: vitkit.train(data, out="no-run") makes one
    """

    def __init__(self, path: Path, *, warnings: Sequence[str] = (), already_finished: bool = False) -> None:
        self.path = FilePath(path)
        self.warnings, self.already_finished = tuple(warnings), already_finished
        if not Run.exists(path):
            raise InputError(
                f"{self.path} is not a run directory", hint=f'vitkit.train(data, out="{self.path}") makes one'
            )

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether a path is a run directory."""
        return FilePath(path, "config.toml").is_file()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path.resolve() == other.path.resolve()

    def __hash__(self) -> int:
        return hash(self.path.resolve())

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @cached_property
    def _directory(self) -> "RunDir":
        from vitkit.training.run_dir import RunDir

        return RunDir(self.path)

    @property
    def status(self) -> Literal["finished", "interrupted"]:
        """State of the run."""
        return "interrupted" if self._directory.read_summary() is None else "finished"

    @cached_property
    def config(self) -> "RunConfig":
        """The complete configuration."""
        return self._directory.read_config()

    @cached_property
    def model(self) -> "Model":
        """The trained model, loaded on first use; of an interrupted run, the best that was evaluated so far."""
        from vitkit.weights.load import load

        return load(self.path)

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names."""
        file = self.path / "labels.json"
        return tuple(json.loads(file.read_bytes())) if file.is_file() else self.model.labels

    @property
    def metrics(self) -> "EvaluationResult | None":
        """The evaluation of the finished model on test or validation images; None if there was none."""
        from vitkit.training.finalize import read_result

        return read_result(self._directory, labels=self.labels) if self.status == "finished" else None

    @property
    def history(self) -> History:
        """The metrics so far."""
        from vitkit.training.run_dir import read_metrics

        rows: dict[int, dict[str, object]] = {}
        for record in read_metrics(self._directory):
            rows.setdefault(int(str(record["step"])), {}).update(record)
        names = dict.fromkeys(name for row in rows.values() for name in row if name != "step")
        metrics = {name: tuple(_number(row.get(name)) for row in rows.values()) for name in names}
        return History(steps=tuple(rows), metrics=metrics)

    @property
    def trials(self) -> "tuple[Trial, ...]":
        """The learning rates of a sweep with their metrics on held-out images."""
        from vitkit.training.run import read_trials

        return read_trials(self.path)

    @property
    def decisions(self) -> tuple[str, ...]:
        """Choices that were made for this run, with their reasons."""
        file = self._directory.decisions
        return tuple(json.loads(file.read_bytes())) if file.is_file() else ()

    @property
    def report_path(self) -> FilePath | None:
        """The HTML report of a finished run."""
        return self._directory.report if self._directory.report.is_file() else None

    def predict(
        self, images: ImageLike | Sequence[ImageLike], *, top: int = 5, out: Path | None = None, batch_size: int = 32
    ) -> "Predictions":
        """Label images as `vitkit.predict` does."""
        from vitkit.api.prediction import predict

        return predict(self, images, top=top, out=out, batch_size=batch_size)

    def evaluate(self, data: DataSource | None = None, *, split: str | None = None) -> "EvaluationResult":
        """Evaluate on other images, or on those of the run that it was not trained on."""
        from vitkit.api.evaluation import evaluate
        from vitkit.data.layouts.pairs import is_pairs_path

        if data is None and is_pairs_path(self.config.data.path):
            raise DataError("the images of this run were in memory", hint="run.evaluate(data)")
        return evaluate(self, self.config.data.path if data is None else data, split=split)

    def inspect(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        out: Path | None = None,
        only: Sequence[str] | None = None,
        target: str | int | None = None,
    ) -> "InspectionResult":
        """Show what the model attends to as `vitkit.inspect` does."""
        from vitkit.api.inspection import inspect

        return inspect(self, images, out=out, only=only, target=target)

    def export(
        self, out: Path, *, to: str = "huggingface", settings: Settings | None = None, overwrite: bool = False
    ) -> "ExportResult":
        """Write the model as a program or in the format of another library, as `vitkit.export` does."""
        from vitkit.api.deployment import export

        return export(self, out, to=to, settings=settings, overwrite=overwrite)

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw the metrics over the steps."""
        return self.history.plot()

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit train --json` prints; an interrupted run has no numbers."""
        trials = {"sweep": [trial._asdict() for trial in self.trials]} if self.trials else {}
        return (self._directory.read_summary() or {}) | trials

    def __getattr__(self, name: str) -> NoReturn:
        hint = f"\nhint: {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        result = self.to_dict().get("result")
        accuracy = f", top1={result['top1']:.4g}" if isinstance(result, Mapping) else ""
        return f"Run({str(self.path)!r}, status={self.status!r}{accuracy})"

    def _repr_html_(self) -> str:
        summary = self.to_dict()
        values: dict[str, object] = {"path": self.path, "status": self.status}
        if "model" in summary:
            values["model"] = summary["model"]
        if isinstance(result := summary.get("result"), Mapping):
            low, high = result["intervals"]["top1"]
            images = f"{result['count']:,} {summary.get('evaluated_on')} images"
            values["top-1"] = f"{result['top1']:.1%} (95 % interval {low:.1%}–{high:.1%}) on {images}"
        if isinstance(selection := summary.get("selection"), Mapping):
            others = ", ".join(each["name"] for each in selection["tried"] if each["name"] != selection["kept"])
            values["kept"] = f"{selection['kept']} (also tried: {others})" if others else selection["kept"]
        if self.report_path is not None:
            values["report"] = self.report_path
        return render_table("Run", values, warnings=self.warnings)


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
