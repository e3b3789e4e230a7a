"""What is shown of a run: a bar on a terminal, plain lines elsewhere, and nothing that could steer either."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from vitkit.cli import watching
from vitkit.cli.watching import Shown
from vitkit.train.watch import Pulse


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where a watcher that is no terminal writes."""
    file = io.StringIO()
    monkeypatch.setattr(watching, "talk_console", lambda: Console(file=file, width=60, highlight=False, markup=False))
    return file


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal's screen, with all that was ever drawn on it."""
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=80, highlight=False, markup=False, color_system=None)
    monkeypatch.setattr(watching, "talk_console", lambda: screen)
    return file


def pulse(step: int, *, steps: int = 100) -> Pulse:
    return Pulse(
        step=step,
        steps=steps,
        epoch=step / 50,
        loss=1.25,
        shares={"top1": 0.5},
        lr=1e-3,
        images_per_second=1234.5,
        waiting=0.07,
        seconds_left=3723.0,
    )


def test_without_a_terminal_the_first_and_the_last_step_have_a_line(written):
    with Shown() as shown:
        for step in range(1, 101):
            shown.pulse(pulse(step))
    first, last = written.getvalue().splitlines()
    assert first.startswith("step 1/100 · epoch 0.02 · loss 1.250 · top-1 50% · lr 1.00e-03 · 1,234 images/s")
    assert first.endswith("waiting 7% · 01:02:03 left")
    assert last.startswith("step 100/100")


def test_without_a_terminal_a_long_run_says_something_now_and_then(written, monkeypatch):
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(clock))
    with Shown() as shown:
        for step in range(1, 21):
            shown.pulse(pulse(step))
    assert 3 <= len(written.getvalue().splitlines()) <= 10


def test_days_are_left_in_hours(written):
    with Shown() as shown:
        shown.pulse(replace(pulse(1), seconds_left=30 * 3600.0))
    assert written.getvalue().endswith("30:00:00 left\n")


def test_long_lines_are_not_broken_and_nothing_is_written_at_the_end(written):
    with Shown() as shown:
        shown.say("a" * 200)
        shown.warn("b" * 200)
        shown.work("checking images", 7)
        shown.advance(3)
    assert written.getvalue() == f"{'a' * 200}\nwarning: {'b' * 200}\nchecking images: 7\n"


def test_names_of_strangers_are_written_as_escapes(written):
    with Shown() as shown:
        shown.say("cat\x1b[31m.jpg")
        shown.warn("dog\x07 [red]")
    assert written.getvalue() == "cat\\x1b[31m.jpg\nwarning: dog\\x07 [red]\n"


def test_an_evaluation_has_a_line(written):
    with Shown() as shown:
        shown.evaluated(30, {"val_top1": 0.915, "val_loss": 0.25, "val_top5": 1.0})
    assert written.getvalue() == "step 30: validation top-1 91.50%, loss 0.250\n"


@pytest.mark.parametrize(
    ("shares", "shown"), [({}, ""), ({"right": 0.4}, "patches right 40.00%, "), ({"top1": 0.5}, "top-1 50.00%, ")]
)
def test_what_is_right_is_shown_where_there_is_such_a_thing(written, shares, shown):
    with Shown() as watcher:
        watcher.evaluated(30, {"val_loss": 0.25} | {f"val_{name}": share for name, share in shares.items()})
        watcher.pulse(replace(pulse(1), shares=shares))
    judged, step = written.getvalue().splitlines()
    assert judged == f"step 30: validation {shown}loss 0.250"
    assert f" · loss 1.250 · {shown.replace('.00%, ', '% · ')}lr 1.00e-03 · " in step


def test_a_terminal_has_a_bar_with_the_numbers_and_the_time_left(terminal):
    with Shown() as shown:
        shown.work("checking images", 40)
        shown.advance(40)
        shown.pulse(pulse(10))
        shown.pulse(pulse(20))
        shown.progress.refresh()
        shown.work("judging the model", 4)
        shown.advance(4)
        shown.progress.refresh()
    drawn = terminal.getvalue()
    for text in (
        "training",
        "20/100",
        "loss 1.250",
        "lr 1.00e-03",
        "1,234 images/s",
        "waiting 7%",
        "judging the model",
    ):
        assert text in drawn
    assert "━━━━━━━━━━" in drawn
    assert "…" not in drawn  # 80 columns are enough
    assert drawn.endswith("\x1b[2K")  # the bar is gone
    assert "\x1b[?25h" in drawn  # and the cursor is back


def test_the_bar_begins_anew_with_the_next_run_of_a_sweep(terminal):
    with Shown() as shown:
        for steps in (3, 50):
            shown.work("checking images", 4)
            for step in range(1, 4):
                shown.pulse(pulse(step, steps=steps))
        (task,) = shown.progress.tasks
        assert (task.completed, task.total, task.finished) == (3, 50, False)


def test_an_error_leaves_the_terminal_in_order(terminal):
    def fail() -> None:
        with Shown() as shown:
            shown.pulse(pulse(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "\x1b[?25h" in terminal.getvalue()
