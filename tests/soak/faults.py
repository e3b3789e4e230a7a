"""Fault injection into small runs: kills, stop signals, and resume with other workers and ranks.

Every function checks one guarantee of docs/reliability.md for a number of faults and returns a Finding. Random choices
are seeded, but the moment at which a process is hit depends on the machine.
"""

import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from soak.victim import EVALUATION, STEPS, WARMUP, Launcher, Run, SlowError, Victim, listens, until

EXIT_INTERRUPTED = 75


@dataclass
class Finding:
    """Result of checking one guarantee."""

    guarantee: str
    figures: dict[str, object] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def expect(self, condition: object, message: str) -> bool:
        """Record a failure unless the condition is true."""
        if not condition:
            self.failures.append(message)
        return bool(condition)

    def count(self, name: str, by: int = 1) -> None:
        self.figures[name] = int(str(self.figures.get(name, 0))) + by

    def most(self, name: str, value: float) -> None:
        self.figures[name] = max(float(str(self.figures.get(name, 0.0))), round(value, 2))


def run_undisturbed(launcher: Launcher, path: Path, *settings: str) -> Run:
    """Return an uninterrupted run."""
    run = Run(path, settings)
    if not run.is_finished():
        victim = launcher.start(run)
        assert victim.wait(900) == 0, victim.words()
    return run


def expect_same(finding: Finding, run: Run, reference: Run, *, state: bool = True) -> None:
    """Expect the result of a run to equal the reference, with its last checkpoint unless `state` is False."""
    finding.count("runs compared")
    ours, theirs = run.outcome(state=state), reference.outcome(state=state)
    other = [name for name in theirs if ours[name] != theirs[name]]
    finding.expect(not other, f"{run.path.name}: {', '.join(other)} differ from the run that was not hit")


def kills(
    launcher: Launcher,
    folder: Path,
    *,
    count: int,
    seed: int = 0,
    ranks: int = 1,
    mode: str = "",
    steps: int = STEPS,
    reference: Run | None = None,
) -> Finding:
    """R1: SIGKILL at random moments, half of them inside a checkpoint write, and the same command again."""
    name = "one process" if ranks == 1 else f"{mode} on {ranks} ranks"
    finding = Finding(f"R1 SIGKILL, {name}", {"kills": 0, "inside a checkpoint write": 0, "runs compared": 0})
    chance = random.Random(seed)
    settings = (f"schedule.steps={steps}", *((f"parallel.mode={mode}", *divisible_batch(ranks)) if mode else ()))
    reference = reference or Run(folder / "reference", settings)
    start = time.monotonic()
    finish(launcher, reference, ranks=ranks)
    usual = time.monotonic() - start
    number = 0
    while finding.figures["kills"] < count or number == 0:
        number += 1
        run = Run(folder / f"killed-{number}", settings)
        for _ in range(8):
            if finding.figures["kills"] == count:
                break
            left = set(run.being_written())  # by the kill before
            victims = start_all(launcher, run, ranks=ranks)
            aim(run, victims, chance, usual=usual, left=left)
            hit = victims if chance.random() < 0.5 else [chance.choice(victims)]
            alive = [victim for victim in hit if not victim.has_ended()]
            for victim in alive:
                victim.send(signal.SIGKILL)
            end_the_rest(victims)
            if any(victim.code == -signal.SIGKILL for victim in alive):
                finding.count("kills")
                finding.count("inside a checkpoint write", bool(set(run.being_written()) - left))
            if run.is_finished():
                break
        finish(launcher, run, ranks=ranks)
        expect_same(finding, run, reference)
    return finding


def divisible_batch(ranks: int) -> tuple[str, ...]:
    """Return the setting of a batch size that can be divided among these ranks, if the usual one cannot."""
    return ("schedule.batch_size=24",) if ranks == 3 else ()


def aim(run: Run, victims: list[Victim], chance: random.Random, *, usual: float, left: set[str]) -> None:
    """Wait for a random moment, or for one inside a checkpoint write; those `left` by earlier kills do not count."""

    def writes() -> bool:
        return not left.issuperset(run.being_written())

    if chance.random() < 0.4:
        time.sleep(chance.uniform(0.0, usual))
        return
    for last in range(chance.randrange(4), -1, -1):
        if not until(writes, victims[0]):
            return
        if last and not until(lambda: not writes(), victims[0]):
            return
    time.sleep(chance.uniform(0.0, 0.004))


def start_all(launcher: Launcher, run: Run, *settings: str, ranks: int) -> list[Victim]:
    return [launcher.start(run, *settings)] if ranks == 1 else launcher.start_ranks(run, *settings, ranks=ranks)


def end_the_rest(victims: list[Victim]) -> None:
    """Stop the other ranks as torchrun does when one has died."""
    for victim in victims:
        if not victim.has_ended():
            victim.send(signal.SIGTERM)
    for victim in victims:
        if not victim.has_ended(15.0):
            victim.send(signal.SIGKILL)
        victim.wait()


def finish(launcher: Launcher, run: Run, *settings: str, ranks: int = 1) -> None:
    """Run the command again until the end."""
    for victim in start_all(launcher, run, *settings, ranks=ranks):
        if (code := victim.wait(900)) != 0:
            raise AssertionError(f"{run.path.name} could not be finished: exit code {code}: {victim.words()[-500:]}")


MOMENTS = ("start-up", "warm-up", "evaluation", "saving")


def stops(launcher: Launcher, folder: Path, *, count: int, seed: int = 0, seconds: float = 10.0) -> Finding:
    """R2: on SIGTERM or SIGINT to the process group the run saves and exits with code 75 within `seconds`."""
    finding = Finding("R2 SIGTERM or SIGINT", {"stops": 0, "runs compared": 0, "slowest exit, s": 0.0})
    chance = random.Random(seed)
    # Half of the images are for validation, so that an evaluation is long enough to be hit.
    reference = run_undisturbed(launcher, folder / "reference", "data.val_fraction=0.5")
    number = 0
    while finding.figures["stops"] < count:
        moment = MOMENTS[number % 4]
        workers = (0, 2, 4)[number // 4 % 3]
        asked = (signal.SIGTERM, signal.SIGINT)[number % 2 ^ number // 12 % 2]
        number += 1
        if number > 2 * count + 8:
            finding.expect(False, "most runs ended before they could be stopped")
            break
        run = Run(folder / f"stopped-{number}", ("data.val_fraction=0.5", f"data.workers={workers}"))
        victim = launcher.start(run)
        come(run, victim, moment, chance)
        inside = moment == "saving" and bool(run.being_written())
        victim.send(asked)
        sent = time.monotonic()
        try:
            code = victim.wait(seconds)
        except SlowError as error:
            finding.count("stops")
            finding.expect(False, f"{moment}, {workers} workers: {error}")
            continue
        if code == 0:  # it was faster than the signal
            finding.count("finished before the signal")
            continue
        finding.count("stops")
        finding.count(f"at {moment}")
        finding.count("seen inside a checkpoint write", inside)
        finding.most("slowest exit, s", time.monotonic() - sent)
        what = f"{asked.name} at {moment}, {workers} workers"
        if not finding.expect(code == EXIT_INTERRUPTED, f"{what}: exit code {code}: {victim.words()[-300:]}"):
            continue
        saved_where_it_stood(finding, run, what, at_start=moment == "start-up")
        if moment == "evaluation":
            finding.count("evaluations cut short", not any("val_top1" in record for record in run.logged()))
        finish(launcher, run, f"data.workers={chance.choice((0, 2, 4))}")
        expect_same(finding, run, reference)
    return finding


def come(run: Run, victim: Victim, moment: str, chance: random.Random) -> None:
    """Wait until the run has reached the moment."""
    if moment == "start-up":
        until(lambda: listens(victim), victim)
        time.sleep(chance.uniform(0.0, 0.02))
    elif moment == "warm-up":
        step = chance.randrange(1, WARMUP)
        until(lambda: run.last_step() >= step, victim)
    elif moment == "evaluation":
        until(lambda: run.last_step() >= EVALUATION, victim)
    else:
        step = chance.randrange(1, STEPS - 3)
        until(lambda: run.last_step() >= step and run.being_written(), victim)


def saved_where_it_stood(finding: Finding, run: Run, what: str, *, at_start: bool) -> None:
    """Expect an intact checkpoint of the last step."""
    steps, logged = run.steps(), run.last_step()
    if at_start and not logged:
        return  # no step was taken, so there is nothing to save
    if finding.expect(steps, f"{what}: nothing was saved"):
        finding.expect(steps[-1] == logged, f"{what}: saved step {steps[-1]}, stood at {logged}")
        finding.expect(run.is_good(steps[-1]), f"{what}: the checkpoint of step {steps[-1]} is damaged")


def other_workers(
    launcher: Launcher,
    folder: Path,
    *,
    ways: tuple[tuple[int, int], ...] = ((0, 2), (2, 4), (4, 0)),
    seed: int = 0,
    reference: Run | None = None,
) -> Finding:
    """R3: a run resumed with another number of workers is the same bit for bit."""
    finding = Finding("R3 resume with other workers")
    chance = random.Random(seed)
    reference = reference or run_undisturbed(launcher, folder / "reference")
    for before, after in ways:
        run = Run(folder / f"workers-{before}-{after}")
        stop_at(launcher, run, chance.randrange(4, 12), f"data.workers={before}")
        finish(launcher, run, f"data.workers={after}")
        expect_same(finding, run, reference)
    return finding


def stop_at(launcher: Launcher, run: Run, step: int, *settings: str, ranks: int = 1) -> None:
    """Start a run and stop it at about this step."""
    for _ in range(5):
        victims = start_all(launcher, run, *settings, ranks=ranks)
        until(lambda: run.last_step() >= step, victims[0], seconds=120)
        for victim in victims:
            victim.send(signal.SIGTERM)
        codes = {victim.wait() for victim in victims}
        if codes == {EXIT_INTERRUPTED}:
            return
        assert codes == {0}, (codes, victims[0].words()[-500:])
        shutil.rmtree(run.path)  # it was faster than the signal
    raise AssertionError(f"{run.path.name} is too fast to be stopped")


def other_ranks(launcher: Launcher, folder: Path, *, ways: tuple[tuple[int, int], ...], steps: int = 200) -> Finding:
    """R3: a run resumed with another number of ranks sees the same images and differs by rounding only.

    Biases of keys are counted apart. Attention does not depend on them, so their gradient is nothing but rounding,
    which Adam makes as large as any other.
    """
    finding = Finding("R3 resume with other ranks", {"images in the same order": 0})
    settings = (f"schedule.steps={steps}", "checkpoint.save_every=50", "evaluation.every=100")
    reference = run_undisturbed(launcher, folder / "reference-long", *settings)
    for before, after in ways:
        run = Run(folder / f"ranks-{before}-{after}", settings)
        stop_at(launcher, run, steps // 3, ranks=before)
        finish(launcher, run, ranks=after)
        weights, key_biases = distances(run.path / "model.safetensors", reference.path / "model.safetensors")
        finding.count("resumed")
        finding.figures["largest difference"] = max(float(str(finding.figures.get("largest difference", 0))), weights)
        finding.figures["of key biases"] = max(float(str(finding.figures.get("of key biases", 0))), key_biases)
        finding.expect(weights <= 1e-4, f"{before} ranks, then {after}: the weights differ by {weights:.1e}")
        counted = same_order(before, after, steps=steps)
        finding.expect(counted, f"{before} ranks, then {after}: the images come in another order")
        finding.count("images in the same order", counted)
    return finding


def distances(ours: Path, theirs: Path) -> tuple[float, float]:
    """Return the largest difference of the weights in two files, without key biases, and of the key biases."""
    from safetensors.numpy import load_file  # noqa: PLC0415  not every guarantee needs it

    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    weights = key_biases = 0.0
    for name in one:
        difference = abs(one[name] - other[name])
        if name.endswith("qkv.bias"):
            third = len(difference) // 3
            key_biases = max(key_biases, float(difference[third : 2 * third].max()))
            difference[third : 2 * third] = 0.0
        weights = max(weights, float(difference.max()))
    return weights, key_biases


def same_order(before: int, after: int, *, steps: int, size: int = 1297, batch_size: int = 32) -> int:
    """Return the number of images if a change of ranks half-way keeps their order, else 0."""
    from vitkit.data.loader import BatchShard, SamplerState, TrainingSampler  # noqa: PLC0415

    def keys(start: SamplerState, count: int, ranks: int) -> list[tuple[int, int]]:
        shares = [BatchShard(batch_size=batch_size, rank=rank, world_size=ranks) for rank in range(ranks)]
        streams = [iter(TrainingSampler(size=size, start=start, shard=share)) for share in shares]
        return [key for _ in range(count) for stream in streams for key in next(stream)]

    start, half = SamplerState(3, 0, 0), steps // 2
    alone = keys(start, steps, 1)
    changed = keys(start, half, before) + keys(start.advance(half * batch_size, size=size), steps - half, after)
    return len(alone) if alone == changed else 0
