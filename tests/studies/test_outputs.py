"""Figures, fits, verdicts and pages of studies from tables that are written down."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vitkit
from vitkit.cli.study import command
from vitkit.studies import records
from vitkit.studies.claims import evaluate_claim
from vitkit.studies.figures import draw_figure, fit_lines, group_lines
from vitkit.studies.records import RunRecord, count_threads
from vitkit.studies.registry import NAMES, find_study
from vitkit.studies.runner import StudyResult, write_outputs
from vitkit.studies.study import Claim, Study


def make_rows(study: Study, accuracy) -> list[dict[str, object]]:
    """Return a row for each cell and seed, with the accuracy that a function gives for its labels and seed."""
    rows = []
    for seed, *labels in itertools.product(range(study.seeds), *study.all_axes.values()):
        row = dict.fromkeys(study.columns) | dict(zip(study.all_axes, labels, strict=True)) | {"seed": seed}
        rows.append(
            row | {"run": "_".join(labels), study.figure.column: accuracy(*labels) + 0.001 * seed, "flops": 1e13}
        )
    return rows


FIG5 = find_study("fig5")
LEAD = {"ViT": 0.0, "hybrid": 0.04, "BiT": 0.1}
FIG5_ROWS = make_rows(
    FIG5, lambda family, budget: 0.9 - 50 * float(budget) ** -0.15 + LEAD[family] * 1e12 / float(budget)
)


def write_study(study: Study, rows, out: Path) -> str:
    run = RunRecord(name="a", settings={}, status="failed", path=out / "runs/a", pflops=1.0, error="<b>broken</b>")
    write_outputs(StudyResult(study=study, quick=False, runs=(run,), rate=2.0), rows, out)
    return re.sub(r"</?bdi>| style=\"[^\"]*\"", "", (out / "report.html").read_text())


def test_page_has_fits_means_failures_and_time_left(tmp_path) -> None:
    page = write_study(FIG5, FIG5_ROWS, tmp_path)
    assert re.search(r"<td>ViT</td><td>[\d.]+ \([^<]* to [^<]*\)</td><td>0\.1", page)
    assert "a failed: &lt;b&gt;broken" in page
    assert "1 run left, about 30 minutes" in page
    assert '<meta http-equiv="refresh"' in page
    assert "leads at small budgets" in page
    assert "<td>hybrid</td><td>3e13</td><td>3</td>" in page


def test_lines_have_an_estimate_for_each_x() -> None:
    lines = group_lines(FIG5, FIG5_ROWS)
    assert list(lines) == ["ViT", "hybrid", "BiT"]
    assert list(lines["ViT"]) == [3e13, 1e14, 3e14]
    assert all(point.interval and point.seeds == 3 for point in lines["BiT"].values())
    assert fit_lines(FIG5, FIG5_ROWS)["ViT"].b == pytest.approx(0.15, abs=0.01)


def test_rows_without_a_value_are_not_drawn() -> None:
    study = replace(FIG5, figure=replace(FIG5.figure, x="images_per_second", dots=True))
    rows = [
        row | {"images_per_second": speed, study.figure.column: value}
        for row in FIG5_ROWS[:2]
        for speed, value in ((10.0, 0.5), (None, 0.5), (20.0, None))
    ]
    assert list(group_lines(study, rows)["ViT"]) == [10.0]
    assert fit_lines(study, rows) == {}
    assert len(draw_figure(study, rows).axes[0].collections[-1].get_offsets()) == 2


@pytest.mark.parametrize("name", NAMES)
def test_figure_is_drawn_without_rows(name) -> None:
    assert draw_figure(find_study(name), []).axes


def test_small_differences_look_small_and_one_seed_has_no_bars() -> None:
    rows = [row for row in make_rows(FIG5, lambda family, budget: 0.5) if row["seed"] == 0]
    drawing = draw_figure(FIG5, rows)
    low, high = drawing.axes[0].get_ylim()
    assert high - low >= 4
    assert not any(container.has_yerr for container in drawing.axes[0].containers)
    assert "5-shot accuracy on downstream data, % · 1 seed" in [text.get_text() for text in drawing.texts]


def test_only_accuracies_are_percentages() -> None:
    study = replace(FIG5, figure=replace(FIG5.figure, column="hours", fit=False))
    rows = make_rows(study, lambda family, budget: 0.5 + LEAD[family])
    drawing = draw_figure(study, rows)
    assert "Hours · 3 seeds" in [text.get_text() for text in drawing.texts]
    assert drawing.axes[0].get_ylim()[1] < 1
    claim = Claim(text="", kind="greater", column="hours", axis="family", labels=("BiT", "ViT"))
    assert evaluate_claim(claim, rows).detail.startswith("BiT − ViT: +0.1 (")


def test_rows_show_the_numbers_of_the_paper() -> None:
    study = find_study("table8")
    texts = [text.get_text() for text in draw_figure(study, make_rows(study, lambda _: 0.3)).axes[0].texts]
    assert texts == [f"paper: {float(number):.1%}".removesuffix("%") for number in study.paper_numbers.values()]


def test_rows_of_several_axes_have_a_color_for_each_line() -> None:
    study = find_study("table5")
    axes = draw_figure(study, make_rows(study, lambda model, upstream, dataset: float(upstream) / 2)).axes[0]
    assert len(axes.get_yticklabels()) == 9
    assert axes.get_legend_handles_labels()[1] == ["upstream 0.1", "upstream 1.0", "upstream 1.5"]


VERDICTS = [
    (Claim(text="", kind="greater", column="downstream_5shot", axis="family", labels=("BiT", "ViT")), "shows"),
    (Claim(text="", kind="greater", column="downstream_5shot", axis="family", labels=("ViT", "BiT")), "contradicts"),
    (
        Claim(text="", kind="greater", column="downstream_5shot", axis="family", labels=("BiT", "ViT"), margin=0.5),
        "contradicts",
    ),
    (
        Claim(text="", kind="equal", column="downstream_5shot", axis="family", labels=("BiT", "ViT"), margin=0.05),
        "shows",
    ),
    (
        Claim(text="", kind="shrinks", column="downstream_5shot", axis="family", labels=("BiT", "ViT"), x="budget"),
        "shows",
    ),
    (Claim(text="", kind="order", column="downstream_5shot", axis="family", labels=("BiT", "hybrid", "ViT")), "shows"),
    (Claim(text="", kind="rises", column="downstream_5shot", axis="family", labels=("ViT",), x="budget"), "shows"),
    (Claim(text="", kind="greater", column="downstream_5shot", axis="family", labels=("BiT", "other")), "no data"),
]


@pytest.mark.parametrize(("claim", "verdict"), VERDICTS)
def test_verdict_follows_the_interval(claim, verdict) -> None:
    noisy = [
        row | {claim.column: row[claim.column] + 1e-5 * (index * index % 7)} for index, row in enumerate(FIG5_ROWS)
    ]
    assert evaluate_claim(claim, noisy).verdict == verdict
    if verdict != "no data":
        one_seed = [row for row in noisy if row["seed"] == 0]
        assert evaluate_claim(claim, one_seed).verdict == "does not show"


def test_condition_leaves_out_rows() -> None:
    claim = Claim(text="", kind="greater", column="top1", axis="a", labels=("x", "y"), where=("b!=c",))
    rows = [
        {"a": label, "b": b, "seed": seed, "top1": value + 0.001 * seed * (label == "x")}
        for seed in range(3)
        for label, b, value in (("x", "c", 0.0), ("y", "c", 1.0), ("x", "d", 0.6), ("y", "d", 0.5))
    ]
    assert evaluate_claim(claim, rows).verdict == "shows"
    assert evaluate_claim(replace(claim, where=("b=c",)), rows).verdict == "contradicts"


def test_plan_names_runs_minutes_and_hours() -> None:
    result = CliRunner().invoke(command, ["fig9", "--plan", "--quick"], catch_exceptions=False)
    assert re.search(r"class_0.001_seed0 +planned +0\.0\d+ +\d", result.stdout)
    assert re.search(r"6 runs, 0\.\d+ PFLOPs, about [\d.]+ (minutes|hours) left on this machine", result.stdout)


def test_plan_for_a_cluster_is_in_exaflops() -> None:
    result = CliRunner().invoke(command, ["fig5", "--plan", "--paper-scale"], catch_exceptions=False)
    assert re.search(r"ViT-B-16_seed0 +planned +223.5\n", result.stdout)
    assert "39 runs, 11,422 exaFLOPs" in result.stdout


def test_estimate_counts_the_threads_of_the_runs(monkeypatch) -> None:
    monkeypatch.setattr(records, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [count_threads(threads=threads, jobs=1) for threads in (None, 1, 8)] == [4, 1, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert count_threads(threads=None, jobs=1) == 2
    assert count_threads(threads=1, jobs=3) == 3
    assert count_threads(threads=None, jobs=3) == 4, "several runs at the same time share all cores"


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1)])
def test_exit_code_is_1_after_a_failed_run(tmp_path, monkeypatch, status, code) -> None:
    run = RunRecord(name="a", settings={}, status=status, path=tmp_path, pflops=1.0)
    monkeypatch.setattr(
        vitkit, "study", lambda *_, **__: StudyResult(study=FIG5, quick=False, runs=(run,), rate=1.0), raising=False
    )
    assert CliRunner().invoke(command, ["fig5", "--out", str(tmp_path)]).exit_code == code


def test_output_directory_is_required_to_run() -> None:
    assert "give --out DIR, or --plan" in CliRunner().invoke(command, ["fig9"]).stderr


def test_quick_study_claims_what_it_runs() -> None:
    table8, fig3 = (find_study(name).make_quick() for name in ("table8", "fig3"))
    assert table8.claims[1].labels == ("1-D stem", "2-D stem")
    assert fig3.data == ("upstream", "cifar10", "cifar100"), "a rung is trained on cifar100"
    assert {claim.where for claim in fig3.claims} == {("model=small ViT",), ("model=large ViT",), ("model=BiT",), ()}
    assert (fig3.settings["schedule.lr"], fig3.rates) == (1e-3, ())
    assert fig3.transfer is not None
    assert (fig3.transfer.settings["schedule.lr"], fig3.transfer.rates) == (0.01, ())


def print_json(*arguments: str) -> Any:
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_list_and_plan_are_the_same_in_python() -> None:
    listed = print_json()
    assert [each["name"] for each in listed] == list(NAMES)
    assert {"claims", "runs", "pflops", "hours"} <= set(listed[0])
    planned, printed = vitkit.study("fig9", plan=True, quick=True), print_json("fig9", "--plan", "--quick")
    assert printed["runs"] == planned.to_dict()["runs"]
    assert printed["pflops"] == planned.pflops > 0


@pytest.mark.parametrize("name", NAMES)
def test_page_of_the_documentation_states_the_claims(name) -> None:
    study = find_study(name)
    page = (Path(__file__).parents[2] / "docs" / "studies" / f"{name}.md").read_text(encoding="utf-8")
    for claim in study.claims:
        assert f"| {claim.text} | {claim.expected} |" in page, "python tools/study_pages.py writes the pages"
