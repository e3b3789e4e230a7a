"""Progress: a cell in a notebook, a bar on a terminal, plain lines elsewhere, escaped names."""

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from vitkit.api import progress
from vitkit.api.progress import RunDisplay, show_progress
from vitkit.training.callbacks import StepMetrics


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output of a console that is not a terminal."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "stderr_console", lambda: Console(file=file, width=60, highlight=False, markup=False))
    return file


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return everything that was drawn on a terminal."""
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=80, highlight=False, markup=False, color_system=None)
    monkeypatch.setattr(progress, "stderr_console", lambda: screen)
    return file


def step_metrics(step: int, *, total_steps: int = 100) -> StepMetrics:
    return StepMetrics(
        step=step,
        total_steps=total_steps,
        epoch=step / 50,
        loss=1.25,
        metrics={"top1": 0.5},
        lr=1e-3,
        images_per_second=1234.5,
        data_wait=0.07,
        seconds_left=3723.0,
    )


def test_plain_output_has_first_and_last_step(output):
    with RunDisplay() as printed:
        for step in range(1, 101):
            printed.on_step(step_metrics(step))
    first, last = output.getvalue().splitlines()
    assert first.startswith("step 1/100 · epoch 0.02 · loss 1.250 · top-1 50% · lr 1.00e-03 · 1,234 images/s")
    assert first.endswith("data wait 7% · 1:02:03 left")
    assert last.startswith("step 100/100")


def test_plain_output_has_a_line_every_ten_seconds(output):
    clock = iter(range(0, 10_000, 4))
    with RunDisplay(clock=lambda: next(clock)) as printed:
        for step in range(1, 21):
            printed.on_step(step_metrics(step))
    assert 3 <= len(output.getvalue().splitlines()) <= 10


def test_days_left_are_in_hours(output):
    with RunDisplay() as printed:
        printed.on_step(replace(step_metrics(1), seconds_left=30 * 3600.0))
    assert output.getvalue().endswith("30:00:00 left\n")


def test_long_lines_are_not_wrapped(output):
    with RunDisplay() as printed:
        printed.on_message("a" * 200)
        printed.on_warning("b" * 200)
        printed.on_task("checking images", 7)
        printed.on_progress(3)
    assert output.getvalue() == f"{'a' * 200}\nwarning: {'b' * 200}\nchecking images: 7\n"


def test_control_characters_are_escaped(output):
    with RunDisplay() as printed:
        printed.on_message("cat\x1b[31m.jpg")
        printed.on_warning("dog\x07 [red]")
    assert output.getvalue() == "cat\\x1b[31m.jpg\nwarning: dog\\x07 [red]\n"


def test_evaluation_has_a_line(output):
    with RunDisplay() as printed:
        printed.on_evaluate(30, {"val_top1": 0.915, "val_loss": 0.25, "val_top5": 1.0})
    assert output.getvalue() == "step 30: validation top-1 91.50%, loss 0.250\n"


@pytest.mark.parametrize(
    ("shares", "shown"),
    [({}, ""), ({"patch_accuracy": 0.4}, "patch accuracy 40.00%, "), ({"top1": 0.5}, "top-1 50.00%, ")],
)
def test_accuracy_is_shown_if_there_is_one(output, shares, shown):
    with RunDisplay() as callback:
        callback.on_evaluate(30, {"val_loss": 0.25} | {f"val_{name}": share for name, share in shares.items()})
        callback.on_step(replace(step_metrics(1), metrics=shares))
    evaluation, step = output.getvalue().splitlines()
    assert evaluation == f"step 30: validation {shown}loss 0.250"
    assert f" · loss 1.250 · {shown.replace('.00%, ', '% · ')}lr 1.00e-03 · " in step


def test_terminal_has_a_bar_with_metrics(terminal):
    with RunDisplay() as printed:
        printed.on_task("checking images", 40)
        printed.on_progress(40)
        printed.on_step(step_metrics(10))
        printed.on_step(step_metrics(20))
        printed.display.bars.refresh()
        printed.on_task("evaluating the model", 4)
        printed.on_progress(4)
        printed.display.bars.refresh()
    drawn = terminal.getvalue()
    for text in (
        "training",
        "20/100",
        "loss 1.250",
        "lr 1.00e-03",
        "1,234 images/s",
        "data wait 7%",
        "evaluating the model",
    ):
        assert text in drawn
    assert "━━━━━━━━━━" in drawn
    assert "…" not in drawn  # 80 columns are enough
    assert drawn.endswith("\x1b[2K")  # the bar is gone
    assert "\x1b[?25h" in drawn  # and the cursor is back


def test_bar_restarts_with_the_next_run_of_a_sweep(terminal):
    with RunDisplay() as printed:
        for steps in (3, 50):
            printed.on_task("checking images", 4)
            for step in range(1, 4):
                printed.on_step(step_metrics(step, total_steps=steps))
        (task,) = printed.display.bars.tasks
        assert (task.completed, task.total, task.finished) == (3, 50, False)


def test_error_restores_the_terminal(terminal):
    def fail() -> None:
        with RunDisplay() as printed:
            printed.on_step(step_metrics(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "\x1b[?25h" in terminal.getvalue()


def test_task_has_a_line_every_ten_seconds(output):
    now = 0.0
    with show_progress(clock=lambda: now) as report:
        for done in range(0, 101, 10):
            report("evaluating", done, 100)
            now += 4.0
    assert output.getvalue() == "evaluating: 30/100\nevaluating: 60/100\nevaluating: 90/100\n"


def test_terminal_has_a_bar_for_each_task(terminal):
    with show_progress() as report:
        report("reading", 3, 40)
        report("evaluating", 5, 50)
        report("counting", 5, 0)
        report.__self__.bars.refresh()
    for text in ("reading", "3/40", "evaluating", "5/50"):
        assert text in terminal.getvalue()
    assert "counting" not in terminal.getvalue()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_no_progress_is_shown_if_not_wanted(output, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    with RunDisplay(False if rank == "0" else None) as display:
        display.on_step(step_metrics(1))
        display.on_message("hello")
    assert output.getvalue() == ""


@pytest.mark.parametrize("wanted", [None, False])
def test_configured_logger_gets_messages(output, caplog, monkeypatch, wanted):
    monkeypatch.setattr(progress, "is_logging_configured", lambda: False)
    with caplog.at_level("INFO", logger="vitkit"), RunDisplay(wanted) as display:
        display.on_message("hello")
        display.on_warning("beware")
    assert [(each.levelname, each.message) for each in caplog.records] == [("INFO", "hello"), ("WARNING", "beware")]
    assert output.getvalue() == ""


class Cell:
    """Stand-in for IPython's display of one cell."""

    def __init__(self) -> None:
        self.contents: list[str] = []

    def display(self, content: "Cell.HTML", *, display_id: bool) -> "Cell":
        assert display_id
        assert not self.contents
        self.update(content)
        return self

    def update(self, content: "Cell.HTML") -> None:
        self.contents.append(content.text)

    class HTML:
        def __init__(self, text: str) -> None:
            self.text = text


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=Cell.HTML, display=cell.display))
    return cell


def test_notebook_updates_one_cell(cell):
    now = 0.0
    with RunDisplay(clock=lambda: now) as display:
        display.on_warning("<b>bold</b>")
        for step in range(1, 11):
            display.on_step(step_metrics(step))
            now += 0.1
    assert 3 <= len(cell.contents) <= 7
    assert all("&lt;b&gt;bold&lt;/b&gt;" in each and "<b>" not in each for each in cell.contents)
    assert 'max="100"' in cell.contents[-2]
    assert "loss 1.250" in cell.contents[-2]
    assert "<progress" not in cell.contents[-1]


def test_notebook_cell_of_tasks(cell):
    with show_progress() as report:
        report("evaluating", 1, 10)
    assert 'evaluating <progress value="1" max="10"></progress> 1/10' in cell.contents[0]


def test_terminal_ipython_is_not_a_notebook(output, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    with RunDisplay() as display:
        display.on_message("hello")
    assert output.getvalue() == "hello\n"
