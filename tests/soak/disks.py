"""A number of disk faults goes in; they are done to small runs, and what was seen comes out: promise R5."""

import errno
import random
import subprocess
from pathlib import Path

from soak.faults import Finding, finish, never_touched, the_same
from soak.victim import STEPS, Launcher, Run, Victim, until


def broken_sync(launcher: Launcher, folder: Path, *, count: int, seed: int = 0) -> Finding:
    """R5: the disk answers with an I/O error from some write on; the same command on a mended disk ends the run."""
    finding = Finding("R5 I/O error", {"faults": 0, "runs compared": 0})
    chance = random.Random(seed)
    reference = never_touched(launcher, folder / "reference")
    for number in range(count):
        run = Run(folder / f"io-{number}")
        victim = launcher.start(run, faulty_sync=(chance.randrange(2, 90), errno.EIO))
        code = victim.wait(60)
        finding.count("faults")
        ended_cleanly(finding, run, victim, code, f"I/O error {number}")
        run.log.unlink()
        finish(launcher, run)
        the_same(finding, run, reference)
    return finding


def ended_cleanly(finding: Finding, run: Run, victim: Victim, code: int, what: str) -> None:
    """Expect exit code 1 and one error line without a traceback, or a finished run; and only good checkpoints."""
    errors = [line for line in victim.words().splitlines() if line.startswith("error:")]
    finding.count("went on to the end" if code == 0 else "stopped with exit code 1")
    finding.expect(code in (0, 1), f"{what}: exit code {code}")
    finding.expect("Traceback" not in victim.words(), f"{what}: a traceback")
    finding.expect("not expected" not in victim.words(), f"{what}: an error nobody thought of: {errors}")
    finding.expect(len(errors) == code, f"{what}: {len(errors)} error lines, exit code {code}")
    for step in run.steps():
        finding.count("checkpoints checked")
        finding.expect(run.is_good(step), f"{what}: the checkpoint of step {step} is damaged")


def full_disk(folder: Path, *, count: int, seed: int = 0) -> Finding:
    """R5: a real file system runs full in the middle of a run; with room again the same command ends the run."""
    finding = Finding("R5 full disk and read-only folder", {"faults": 0, "runs compared": 0})
    chance = random.Random(seed)
    disk = folder / "disk"
    disk.mkdir(parents=True)
    with Launcher(
        ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=8m soak "{disk}" && exec "$@"', "sh"]
    ) as launcher:
        seen = Path(f"/proc/{launcher.process.pid}/root") / disk.relative_to("/")
        enter = f"nsenter --mount=/proc/{launcher.process.pid}/ns/mnt"
        reference = never_touched(launcher, folder / "reference")
        for number in range(count):
            run = Run(seen / f"full-{number}", inside=disk / f"full-{number}", beside=folder)
            room = chance.randrange(100, 900)
            shell(f"{enter} mount -o remount,size={room}k {disk}")
            victim = launcher.start(run, "keep.last=100")
            code = victim.wait(60)
            finding.count("faults")
            ended_cleanly(finding, run, victim, code, f"disk of {room} KB")
            finding.expect(code == 1 or run.is_finished(), f"disk of {room} KB: it ended without a result")
            shell(f"{enter} mount -o remount,size=8m {disk}")
            finish(launcher, run)
            the_same(finding, run, reference)
            shell(f"{enter} rm -rf {run.inside}")
        for number in range(max(1, count // 4)):
            read_only(
                finding,
                launcher,
                Run(seen / f"ro-{number}", inside=disk / f"ro-{number}", beside=folder),
                reference,
                enter,
            )
    return finding


def read_only(finding: Finding, launcher: Launcher, run: Run, reference: Run, enter: str) -> None:
    """The folder of the checkpoints turns read-only while the run goes on."""
    victim = launcher.start(run)
    until(lambda: run.last_step() >= 6, victim)
    place = run.inside / "checkpoints"
    shell(f"{enter} mount --bind {place} {place}")
    # It is busy while a checkpoint is being written.
    shell(f"{enter} sh -c 'for i in $(seq 200); do mount -o remount,bind,ro {place} && exit; sleep 0.01; done; exit 1'")
    code = victim.wait(60)
    finding.count("faults")
    ended_cleanly(finding, run, victim, code, "read-only checkpoints")
    finding.count("read-only folders")
    again = launcher.start(run)
    code = again.wait(60)
    finding.expect(code == 1 or run.is_finished(), f"read-only, again: exit code {code}")
    shell(f"{enter} umount {place}")
    run.log.unlink()
    finish(launcher, run)
    # Where it finished without its last checkpoint the model is whole, and there is nothing to resume.
    the_same(finding, run, reference, state=run.steps()[-1:] == [STEPS])


def shell(command: str) -> None:
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
