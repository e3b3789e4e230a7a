"""`Run` and `History`: what a run directory tells, finished or interrupted."""

from pathlib import Path

import pytest
from cli.tiny_runs import photos

import vitkit
from vitkit.errors import DataError, InputError

OPTIONS = {
    "model": "Ti/16",
    "image_size": 16,
    "steps": 4,
    "batch_size": 8,
    "workers": 0,
    "progress": False,
    "settings": {
        "model.patch_size": 8,
        "model.settings": ["width=16", "heads=2", "depth=1", "mlp_dim=16"],
        "evaluation.every": 2,
        "logging.log_every": 1,
    },
}


class Stop(vitkit.Callback):
    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> vitkit.Run:
    return vitkit.train(photos(folder / "photos"), out=folder / "run", **OPTIONS)


@pytest.fixture(scope="module")
def interrupted(folder: Path, run: vitkit.Run) -> vitkit.Run:
    with pytest.raises(vitkit.Interrupted) as caught:
        vitkit.train(folder / "photos", out=folder / "interrupted", callbacks=[Stop()], **OPTIONS)
    return caught.value.run


def test_run_is_opened_by_its_path(run):
    opened = vitkit.Run(str(run.path))
    assert opened == run
    assert hash(opened) == hash(run)
    assert (opened.status, opened.config, opened.labels) == ("finished", run.config, ("cat", "dog"))
    assert opened.report_path == run.path / "report.html"
    assert opened.trials == ()
    reason = "the settings describe a model or an objective of their own"
    assert opened.decisions == ("recipe: the default for images", f"initial weights: random ({reason})")
    assert repr(opened) == f"Run({str(run.path)!r}, status='finished', top1={run.metrics.top1:.4g})"


def test_run_is_a_table_in_notebooks(run, interrupted):
    table = run._repr_html_()
    assert "<td style='text-align:left'>finished</td>" in table
    assert f"{run.metrics.top1:.1%} (95 % interval " in table
    assert "<td style='text-align:left'>interrupted</td>" in interrupted._repr_html_()


def test_unknown_attribute_names_the_right_one(run):
    with pytest.raises(AttributeError, match=r"no attribute 'accuracy'\nhint: run.metrics.accuracy"):
        run.accuracy  # noqa: B018


def test_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a run directory"):
        vitkit.Run(tmp_path)


def test_model_is_loaded_once(run):
    assert run.model is run.model
    assert run.model.labels == ("cat", "dog")


def test_metrics_are_those_of_the_summary(run):
    metrics = run.metrics
    stored = run.to_dict()["result"]
    assert metrics.to_dict() == stored | {"confusion": metrics.to_dict()["confusion"]}
    assert metrics.accuracy == metrics.top1
    assert len(metrics.targets) == len(metrics.predictions) == metrics.count == 4
    assert len(metrics.mistakes(10)) == sum(metrics.targets != metrics.predictions)


def test_history_has_columns_of_equal_length(run):
    history = run.history
    assert history.steps == (1, 2, 3, 4)
    assert len(history["loss"]) == 4
    assert len(history["val_top1"]) == 2
    columns = history.to_dict()
    assert columns["step"] == [1, 2, 3, 4]
    assert {len(column) for column in columns.values()} == {4}
    assert columns["val_top1"][0] is None
    assert columns["val_top1"][-1] == history["val_top1"][-1] == run.to_dict()["validation"]["val_top1"]
    assert "\n" not in repr(history)
    with pytest.raises(KeyError, match="there is no metric nothing, only epoch, loss"):
        history["nothing"]


def test_curves_are_drawn_without_pyplot(run):
    figure = run.plot()
    assert [axes.get_xlabel() for axes in figure.axes] == ["step"] * 4


def test_interrupted_run_has_history_but_no_result(interrupted):
    assert interrupted.status == "interrupted"
    assert interrupted.history.steps[-1] < 4
    assert interrupted.metrics is None
    assert interrupted.report_path is None
    assert interrupted.to_dict() == {}
    assert repr(interrupted).endswith("status='interrupted')")


def test_run_predicts(folder, run):
    predictions = run.predict([folder / "photos/cat/00.png", folder / "photos/dog/00.png"], top=1)
    assert [each.label for each in predictions] == [
        run.labels[run.model(run.model.preprocess(folder / f"photos/{name}/00.png")).argmax()]
        for name in ("cat", "dog")
    ]


def test_run_evaluates_its_own_and_other_images(folder, run):
    assert run.evaluate().to_dict()["top1"] == run.metrics.top1
    assert run.evaluate().count == 4
    other = photos(folder / "other", each=3)
    assert run.evaluate(other).count == 6
    pairs = [(path, path.parent.name) for path in sorted(other.rglob("*.png"))]
    on_pairs = vitkit.train(pairs, out=folder / "pairs", **OPTIONS)
    with pytest.raises(DataError, match="were in memory"):
        on_pairs.evaluate()
    assert on_pairs.evaluate(pairs).count == on_pairs.metrics.count


def test_run_inspects(folder, run):
    [section] = run.inspect(folder / "photos/cat/00.png", only=["rollout"]).sections
    assert section.name == "rollout"


def test_run_is_exported(folder, run):
    result = run.export(folder / "exported", to="timm")
    assert result.path == folder / "exported"
    assert (folder / "exported" / "model.safetensors").is_file()


def test_interrupted_run_has_a_model(interrupted):
    assert interrupted.labels == ("cat", "dog")
    assert interrupted.model.num_classes == 2


def test_self_supervised_run_has_no_labels(folder, run):
    options = OPTIONS | {"settings": OPTIONS["settings"] | {"evaluation.every": 4}}
    result = vitkit.train(folder / "photos", recipe="mae-folder", out=folder / "mae", **options)
    assert (result.labels, result.metrics) == ((), None)
    assert result.history["val_loss"]
    assert result.plot().axes
