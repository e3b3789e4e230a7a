"""The reliability promises at small counts, on real processes; `make soak` has the full ones."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak import damage, disks, faults, images, ranks
from soak.faults import Finding
from soak.victim import Launcher, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches processes as only Linux lets it")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def kept(finding: Finding) -> bool:
    assert not finding.failures, "\n".join(finding.failures)
    return True


def test_a_forked_run_is_the_run_of_the_command_line(launcher: Launcher, tmp_path: Path) -> None:
    forked, typed = faults.never_touched(launcher, tmp_path / "forked"), Run(tmp_path / "typed")
    command = [sys.executable, "-m", "vitkit", "train", str(typed.recipe), "--out", str(typed.path)]
    subprocess.run(command, check=True, capture_output=True)
    assert typed.outcome() == forked.outcome()


def test_a_run_killed_again_and_again_comes_out_bit_for_bit_the_same(launcher: Launcher, tmp_path: Path) -> None:
    finding = faults.kills(launcher, tmp_path, count=5)
    assert kept(finding)
    assert finding.figures["kills"] == 5


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_killed_ranks_go_on_to_the_same_result(launcher: Launcher, tmp_path: Path, mode: str) -> None:
    assert kept(faults.kills(launcher, tmp_path, count=2, ranks=2, mode=mode))


def test_a_run_asked_to_stop_saves_where_it_stands_and_goes_on_exactly(launcher: Launcher, tmp_path: Path) -> None:
    assert kept(faults.stops(launcher, tmp_path, count=5))


def test_the_number_of_workers_changes_no_bit(launcher: Launcher, tmp_path: Path) -> None:
    assert kept(faults.other_workers(launcher, tmp_path))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_the_number_of_ranks_does_not_change_the_order_of_images(before: int, after: int) -> None:
    assert faults.same_order(before, after, steps=200) == 200 * 32


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(launcher: Launcher, tmp_path: Path) -> None:
    finding = damage.damaged_checkpoints(launcher, tmp_path, count=10, runs=1)
    assert kept(finding)
    assert (finding.figures["truncations"], finding.figures["missing files"]) == (10, 3)


def test_a_disk_with_errors_leaves_good_checkpoints_and_one_message(launcher: Launcher, tmp_path: Path) -> None:
    assert kept(disks.broken_sync(launcher, tmp_path, count=2))


@pytest.mark.skipif(
    sys.platform != "linux"
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="mounting a small disk needs root",
)
def test_a_full_or_read_only_disk_leaves_good_checkpoints_and_one_message(tmp_path: Path) -> None:
    assert kept(disks.full_disk(tmp_path, count=2))


def test_nothing_that_is_not_finite_is_saved(launcher: Launcher, tmp_path: Path) -> None:
    assert kept(images.not_finite(launcher, tmp_path))


def test_broken_images_are_listed_and_change_nothing_else(launcher: Launcher, tmp_path: Path) -> None:
    finding = images.broken_images(launcher, tmp_path, count=200)
    assert kept(finding)
    assert finding.figures["listed"] == 20


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    assert kept(ranks.named(tmp_path, timeout=4))
