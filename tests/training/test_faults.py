"""Reliability guarantees on real processes with small counts; `make soak` runs large ones."""

import subprocess
import sys
from pathlib import Path

import pytest
from soak import damage, disks, faults, images, ranks
from soak.faults import Finding
from soak.victim import Launcher, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds of Linux")


@pytest.fixture(scope="module")
def reference(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of one process."""
    return faults.run_undisturbed(launcher, tmp_path_factory.mktemp("faults") / "reference")


def check(finding: Finding) -> bool:
    assert not finding.failures, "\n".join(finding.failures)
    return True


def test_forked_run_equals_command_line_run(reference: Run, tmp_path: Path) -> None:
    typed = Run(tmp_path / "typed")
    command = [sys.executable, "-m", "vitkit", "train", str(typed.recipe), "--out", str(typed.path)]
    subprocess.run(command, check=True, capture_output=True)
    assert typed.outcome() == reference.outcome()


def test_killed_run_is_bit_exact(launcher: Launcher, reference: Run, tmp_path: Path) -> None:
    finding = faults.kills(launcher, tmp_path, count=3, reference=reference)
    assert check(finding)
    assert finding.figures["kills"] == 3


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_killed_ranks_resume_to_the_same_result(launcher: Launcher, tmp_path: Path, mode: str) -> None:
    assert check(faults.kills(launcher, tmp_path, count=1, ranks=2, mode=mode, steps=18))


def test_stopped_run_resumes_exactly(launcher: Launcher, tmp_path: Path) -> None:
    assert check(faults.stops(launcher, tmp_path, count=4, seconds=600.0))


def test_number_of_workers_is_bit_exact(launcher: Launcher, reference: Run, tmp_path: Path) -> None:
    assert check(faults.other_workers(launcher, tmp_path, ways=((0, 2), (2, 0)), reference=reference))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_number_of_ranks_keeps_the_order_of_images(before: int, after: int) -> None:
    assert faults.same_order(before, after, steps=200) == 200 * 32


def test_damaged_checkpoint_falls_back_to_previous(launcher: Launcher, reference: Run, tmp_path: Path) -> None:
    finding = damage.damaged_checkpoints(launcher, tmp_path, count=10, runs=1, reference=reference)
    assert check(finding)
    assert (finding.figures["truncations"], finding.figures["missing files"]) == (10, 3)


def test_disk_with_errors_leaves_good_checkpoints(launcher: Launcher, reference: Run, tmp_path: Path) -> None:
    assert check(disks.broken_sync(launcher, tmp_path, count=1, reference=reference))


@pytest.mark.skipif(
    sys.platform != "linux"
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="mounting a small disk needs root",
)
def test_full_disk_leaves_good_checkpoints(launcher: Launcher, reference: Run, tmp_path: Path) -> None:
    assert check(disks.full_disk(launcher, tmp_path, count=1, reference=reference))


def test_non_finite_weights_are_not_saved(launcher: Launcher, tmp_path: Path) -> None:
    assert check(images.not_finite(launcher, tmp_path))


def test_broken_images_are_listed_and_excluded(launcher: Launcher, tmp_path: Path) -> None:
    finding = images.broken_images(launcher, tmp_path, count=200)
    assert check(finding)
    assert finding.figures["listed"] == 20


def test_hung_rank_is_reported(launcher: Launcher, tmp_path: Path) -> None:
    assert check(ranks.report_hung_rank(launcher, tmp_path, timeout=8))
