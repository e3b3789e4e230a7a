"""The clock of the server, which stands still while the server is suspended."""

import pytest
from server.front_end import FakeClock

from vitkit.server.clock import MAX_INTERVAL
from vitkit.server.supervisor import CHECK_INTERVAL


def test_clock_stands_still_while_suspended() -> None:
    clock = FakeClock()
    start = clock()
    clock.advance(3.0)
    clock.suspend(60.0)
    assert clock() - start == pytest.approx(3.0 + MAX_INTERVAL)
    clock.advance(2.0)
    assert clock() - start == pytest.approx(5.0 + MAX_INTERVAL)


def test_supervisor_reads_the_clock_often_enough() -> None:
    assert 2 * CHECK_INTERVAL <= MAX_INTERVAL


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 1.0), (10.0, 2.0), (33.0, 3.0 + MAX_INTERVAL)])
def test_running_part_leaves_out_suspensions(seconds: float, expected: float) -> None:
    clock = FakeClock()
    clock.advance(5.0)
    clock.suspend(30.0)
    clock()
    clock.advance(2.0)
    assert clock.running_part(seconds) == pytest.approx(expected)
