"""Signals set a flag that work checks between steps."""

import os
import signal
import threading

import pytest

from vitkit.core.signals import EXIT_INTERRUPTED, StopFlag, StopRequested, catch_stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_the_flag_and_its_name(number) -> None:
    with catch_stop_signals() as stop:
        assert not stop.requested
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal == signal.Signals(number).name
        with pytest.raises(StopRequested):
            stop.raise_if_requested()


def test_other_threads_leave_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers: list[object] = []

    def work() -> None:
        with catch_stop_signals() as stop:
            handlers.append(signal.getsignal(signal.SIGINT))
            assert not stop.requested

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_second_interrupt_raises_at_once() -> None:
    with catch_stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_repeated_sigterm_only_sets_the_flag() -> None:
    with catch_stop_signals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_handlers_are_restored_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(RuntimeError), catch_stop_signals():
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_new_flag_is_not_set() -> None:
    assert not StopFlag().requested
    assert EXIT_INTERRUPTED == os.EX_TEMPFAIL
