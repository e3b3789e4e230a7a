"""Ranks that meet at a store where an earlier attempt has left its traces."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from vitkit.core.errors import TrainingError
from vitkit.train.parallel import meet


def meet_all(store: Store, *, ranks: int) -> list[Store]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: meet(store, rank=rank, ranks=ranks, timeout=20.0), range(ranks)))


def test_all_come_to_one_corner_and_each_attempt_has_its_own():
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    first = meet_all(store, ranks=3)
    first[2].set("address", "of a rank that is gone")
    assert first[0].get("address") == b"of a rank that is gone"
    second = meet_all(store, ranks=3)
    assert not any(corner.check(["address"]) for corner in second)
    second[1].set("address", "new")
    assert {corner.get("address") for corner in second} == {b"new"}


def test_greetings_of_the_dead_are_no_arrivals():
    store = HashStore()
    store.set("greeting/1", "left by a rank that was killed before it was answered")
    with pytest.raises(TrainingError, match=r"rank 1 did not come within 0\.2 s"):
        meet(store, rank=0, ranks=2, timeout=0.2)
    store.set_timeout(timedelta(seconds=20))
    leader, other = meet_all(store, ranks=2)
    leader.set("found", "yes")
    assert other.get("found") == b"yes"


def test_those_who_wait_for_a_leader_that_never_comes_say_so():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TrainingError, match="rank 0 did not come") as caught:
        meet(store, rank=1, ranks=2, timeout=0.2)
    assert "start all nodes" in str(caught.value.hint)


def test_a_single_rank_waits_for_nobody():
    assert not meet(HashStore(), rank=0, ranks=1, timeout=0.0).check(["anything"])
