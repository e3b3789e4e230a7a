"""Campaign for guarantee R5: I/O errors, full disks and read-only folders."""

import contextlib
import errno
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from soak.faults import Finding, expect_same, finish, run_undisturbed
from soak.victim import STEPS, Launcher, Run, Victim, until


def broken_sync(
    launcher: Launcher, folder: Path, *, count: int, seed: int = 0, reference: Run | None = None
) -> Finding:
    """R5: I/O errors from some write on; the same command on a working disk finishes the run."""
    finding = Finding("R5 I/O error", {"faults": 0, "runs compared": 0})
    chance = random.Random(seed)
    reference = reference or run_undisturbed(launcher, folder / "reference")
    for number in range(count):
        run = Run(folder / f"io-{number}")
        victim = launcher.start(run, faulty_sync=(chance.randrange(2, 90), errno.EIO))
        code = victim.wait(600)
        finding.count("faults")
        ended_cleanly(finding, run, victim, code, f"I/O error {number}")
        run.log.unlink()
        finish(launcher, run)
        expect_same(finding, run, reference)
    return finding


def ended_cleanly(finding: Finding, run: Run, victim: Victim, code: int, what: str) -> None:
    """Expect exit code 1 and one error line without a traceback, or a finished run; and only good checkpoints."""
    errors = [line for line in victim.words().splitlines() if line.startswith("error:")]
    finding.count("finished" if code == 0 else "stopped with exit code 1")
    finding.expect(code in (0, 1), f"{what}: exit code {code}")
    finding.expect("Traceback" not in victim.words(), f"{what}: a traceback")
    finding.expect("bug in vitkit" not in victim.words(), f"{what}: an unexpected error: {errors}")
    finding.expect(len(errors) == code, f"{what}: {len(errors)} error lines, exit code {code}")
    for step in run.steps():
        finding.count("checkpoints checked")
        finding.expect(run.is_good(step), f"{what}: the checkpoint of step {step} is damaged")


def full_disk(launcher: Launcher, folder: Path, *, count: int, seed: int = 0, reference: Run | None = None) -> Finding:
    """R5: a real file system becomes full; with free space the same command finishes the run."""
    finding = Finding("R5 full disk and read-only folder", {"faults": 0, "runs compared": 0})
    chance = random.Random(seed)
    reference = reference or run_undisturbed(launcher, folder / "reference")
    disk = folder / "disk"
    disk.mkdir(parents=True)
    with small_disk(disk) as holder:
        enter = f"nsenter --mount=/proc/{holder}/ns/mnt"

        def run_on_disk(name: str) -> Run:
            seen = Path(f"/proc/{holder}/root") / disk.relative_to("/")
            return Run(seen / name, inside=disk / name, beside=folder, mounts=f"/proc/{holder}/ns/mnt")

        for number in range(count):
            run = run_on_disk(f"full-{number}")
            room = chance.randrange(100, 900)
            shell(f"{enter} mount -o remount,size={room}k {disk}")
            victim = launcher.start(run, "checkpoint.last=100")
            code = victim.wait(600)
            finding.count("faults")
            ended_cleanly(finding, run, victim, code, f"disk of {room} KB")
            finding.expect(code == 1 or run.is_finished(), f"disk of {room} KB: it ended without a result")
            shell(f"{enter} mount -o remount,size=8m {disk}")
            finish(launcher, run)
            expect_same(finding, run, reference)
            shell(f"{enter} rm -rf {run.inside}")
        for number in range(max(1, count // 4)):
            read_only(finding, launcher, run_on_disk(f"ro-{number}"), reference, enter)
    return finding


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[int]:
    """Mount a disk of 8 MB in a new mount namespace; yield the process that holds it."""
    mount = f'mount -t tmpfs -o size=8m soak "{path}" && echo mounted && exec sleep infinity'
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"mounted\n"
            yield holder.pid
        finally:
            holder.kill()


def read_only(finding: Finding, launcher: Launcher, run: Run, reference: Run, enter: str) -> None:
    """The folder of the checkpoints turns read-only while the run goes on."""
    victim = launcher.start(run)
    until(lambda: run.last_step() >= 6, victim)
    place = run.inside / "checkpoints"
    shell(f"{enter} mount --bind {place} {place}")
    # It is busy while a checkpoint is being written.
    shell(f"{enter} sh -c 'for i in $(seq 200); do mount -o remount,bind,ro {place} && exit; sleep 0.01; done; exit 1'")
    code = victim.wait(600)
    finding.count("faults")
    ended_cleanly(finding, run, victim, code, "read-only checkpoints")
    finding.count("read-only folders")
    again = launcher.start(run)
    code = again.wait(600)
    finding.expect(code == 1 or run.is_finished(), f"read-only, again: exit code {code}")
    shell(f"{enter} umount {place}")
    run.log.unlink()
    finish(launcher, run)
    # Where it finished without its last checkpoint the model is whole, and there is nothing to resume.
    expect_same(finding, run, reference, state=run.steps()[-1:] == [STEPS])


def shell(command: str) -> None:
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
