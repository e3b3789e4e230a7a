"""Signals become a flag that work looks at between steps."""

import os
import signal

import pytest

from vitkit.core.stopping import SAVED_AND_STOPPED, Stop, Stopped, listening


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_says_which(number) -> None:
    with listening() as stop:
        assert not stop
        stop.check()
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == signal.Signals(number).name
        with pytest.raises(Stopped):
            stop.check()


def test_a_second_interrupt_does_not_wait() -> None:
    with listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_more_terminations_only_ask_again() -> None:
    with listening() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop


def test_handlers_are_put_back_even_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(RuntimeError), listening():
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_fresh_flag_does_not_ask() -> None:
    assert not Stop()
    assert SAVED_AND_STOPPED == os.EX_TEMPFAIL
