"""Several models and data sets go in; each model is fine-tuned on each and judged, and every accuracy comes out.

A part is one model on one data set: a sweep and a final run, or the judgement of a model that another part has made.
Each part has a folder of its own, so a suite goes on where it stopped, and what is finished is not run again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.checkpoints.foreign import load
from vitkit.checkpoints.native import Artefact, write_json
from vitkit.core.config import load_toml
from vitkit.core.errors import ConfigError, DataError, TrainingError
from vitkit.core.stopping import Stop, Stopped
from vitkit.data.source import Source
from vitkit.data.sources.detect import EMBEDDED, open_data
from vitkit.data.verify import verify, without
from vitkit.evaluate.judging import choose_split
from vitkit.evaluate.protocols import Protocol, judge_by, prepare
from vitkit.evaluate.standings import Score
from vitkit.train.config import ParallelConfig, RunConfig
from vitkit.train.folder import RunFolder
from vitkit.train.make import worker_count
from vitkit.train.parallel import Ranks, joined, on_leader
from vitkit.train.run import Result, run
from vitkit.train.sweep import TRIALS, sweep, with_rate
from vitkit.train.watch import Watcher, on_the_clock

JUDGE_AS_TEST = "val-as-test"
SWEPT = "sweep.json"
"""What a sweep writes last, in the folder of its final run."""
USUAL_STEPS = 1000
"""What a run of so many epochs counts for when the time left is estimated: its steps are not known before."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One model on one data set. With `judge`, nothing learns: the model that it names is judged by `protocol`.

    `judge` is the name of another part's data set, or "weights" for the model as it came. Of `rates`, several are
    tried on held-out images first; the final run is on all images to learn from.
    """

    set: str
    model: str
    config: RunConfig
    rates: tuple[float, ...] = ()
    judge: str | None = None
    protocol: Protocol = Protocol()

    @property
    def steps(self) -> int:
        """How much there is to do, to estimate the time that is left."""
        runs = len(self.rates) + 1 if len(self.rates) > 1 else 1
        return 0 if self.judge else runs * (self.config.schedule.steps or USUAL_STEPS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Every accuracy so far, by data set and model, and whether that is all."""

    scores: Mapping[tuple[str, str], Score]
    finished: bool


def folder_of(part: Part, out: Path) -> Path:
    """The part's folder: of its run, or with its judgement in it."""
    return out / "runs" / part.model / part.set


def missing(parts: Sequence[Part]) -> dict[str, str]:
    """The data sets that are not there, with where they should be."""
    places = {part.set: part.config.data.path for part in parts}
    return {name: path for name, path in places.items() if path not in EMBEDDED and not Path(path).exists()}


def checked(parts: Sequence[Part], out: Path) -> list[Part]:
    """The parts, each with images to be judged by; what would fail after hours fails here."""
    trained = {(part.set, part.model) for part in parts if part.judge is None}
    kinds: dict[str, str | None] = {}
    for part in parts:
        if part.judge is None:
            if part.set not in kinds:
                kinds[part.set] = judged_kind(part, out)
            folder = folder_of(part, out)
            if len(part.rates) > 1 and RunFolder(folder).config.exists() and not (folder / TRIALS).exists():
                raise ConfigError(
                    f"{folder} holds a run at one rate",
                    got=f"rates to try: {', '.join(f'{rate:g}' for rate in part.rates)}",
                    hint="name another folder with --out, or give that rate alone to go on with this one",
                )
        elif part.judge != "weights" and (part.judge, part.model) not in trained and not is_made(part, out):
            raise ConfigError(
                f"{part.set} judges the model of {part.judge}, which is not made here",
                expected=" or ".join(sorted({name for name, _ in trained} | {"weights"})),
            )
    return [
        replace(part, config=replace(part.config, data=replace(part.config.data, kind=kinds[part.set])))
        if part.judge is None
        else part
        for part in parts
    ]


def is_made(part: Part, out: Path) -> bool:
    """Whether the model that a part judges was made before, by this suite with other data sets chosen."""
    return RunFolder(folder_of(replace(part, set=part.judge or ""), out)).result() is not None


def judged_kind(part: Part, out: Path) -> str | None:
    """The kind by which the data set is read: where it has val and no test, val is the test, as papers do."""
    data, before = part.config.data, RunFolder(folder_of(part, out)).config
    if before.exists() and data.kind is None and load_toml(before, RunConfig, recipes={}).data.kind == JUDGE_AS_TEST:
        return JUDGE_AS_TEST
    if before.exists():
        return data.kind  # where it was another, `check_same` and the run say so
    found = open_data(data.path, kind=data.kind, fractals=data.fractals)
    if "test" in found.splits:
        return data.kind
    if "val" in found.splits and data.kind is None:
        return JUDGE_AS_TEST
    raise DataError(
        f"{part.set}: {data.path} has no images to judge by",
        expected="a split called test, or val",
        got=", ".join(found.splits),
        hint="put some images of each class in a folder called test",
    )


def carry_out(
    parts: Sequence[Part],
    out: Path | str,
    *,
    parallel: ParallelConfig,
    watcher: Watcher | None = None,
    stop: Stop | None = None,
) -> Outcome:
    """Carry out every part that is not finished, one after the other; asked to stop, it saves and can go on."""
    out, stop = Path(out), Stop() if stop is None else stop
    scores: dict[tuple[str, str], Score] = {}
    with joined(parallel) as ranks:
        watcher = watcher if watcher and ranks.leads else Watcher()
        parts = checked(parts, out)
        done, began = 0, time.monotonic()
        left = sum(part.steps for part in parts if score_of(part, out) is None)
        for number, part in enumerate(parts, start=1):
            score = score_of(part, out)
            if score is None:
                pace = (time.monotonic() - began) / done if done else 0.0
                time_left = f"; about {on_the_clock(pace * left)} left for all" if pace and left else ""
                watcher.say(f"part {number} of {len(parts)}: {part.set} with {part.model}{time_left}")
                if not one(part, out, ranks=ranks, watcher=watcher, stop=stop):
                    return Outcome(scores=scores, finished=False)
                score = score_of(part, out)
                done, left = done + part.steps, left - part.steps
            else:
                check_same(part, out)
            if score is None:
                raise TrainingError(f"{folder_of(part, out)}: the run was not judged", hint="it had no test images")
            scores[part.set, part.model] = score
    return Outcome(scores=scores, finished=True)


def one(part: Part, out: Path, *, ranks: Ranks, watcher: Watcher, stop: Stop) -> bool:
    """Carry out a part; False where someone asked to stop."""
    if part.judge is None:
        result = learn(part, out, watcher=watcher, stop=stop)
        return result is not None and result.summary is not None
    try:
        on_leader(ranks, lambda alive: judge(part, out, ranks=ranks, watcher=watcher, stop=stop, alive=alive))
    except Stopped:
        return False
    return True


def learn(part: Part, out: Path, *, watcher: Watcher, stop: Stop) -> Result | None:
    """The sweep where there are rates to choose from, and the final run on all images to learn from."""
    folder = folder_of(part, out)
    if len(part.rates) > 1:
        return sweep(part.config, part.rates, folder, watcher=watcher, stop=stop).final
    return run(final_config(part, *part.rates), folder, watcher=watcher, stop=stop)


def final_config(part: Part, rate: float | None = None) -> RunConfig:
    """The run on all images to learn from, at the rate that was chosen."""
    config = part.config if rate is None else with_rate(part.config, rate)
    return replace(config, data=replace(config.data, train_on="all"))


def check_same(part: Part, out: Path) -> None:
    """Refuse to take the result of another run, with other settings or rates, for that of this part."""
    folder = RunFolder(folder_of(part, out))
    if part.judge is not None:
        return  # `score_of` has looked
    rates = part.rates
    if len(rates) > 1:
        swept = json.loads((folder.path / SWEPT).read_bytes())
        if (tried := [trial["lr"] for trial in swept["trials"]]) != list(rates):
            raise ConfigError(
                f"{folder.path} holds a sweep of other rates",
                expected=tried,
                got=list(rates),
                hint="name another folder with --out, or give the same rates to go on with this one",
            )
        rates = (swept["chosen"],)
    folder.claim(final_config(part, *rates))


def finished(parts: Sequence[Part], out: Path | str) -> tuple[dict[tuple[str, str], Score], list[str]]:
    """The accuracies of parts that were carried out before; and what was carried out with other settings, in words."""
    out, scores, others = Path(out), {}, []
    for part in parts:
        try:
            score = score_of(part, out)
            if score is not None:
                kind = part.config.data.kind if part.judge else judged_kind(part, out)
                check_same(replace(part, config=replace(part.config, data=replace(part.config.data, kind=kind))), out)
                scores[part.set, part.model] = score
        except ConfigError as error:
            others.append(str(error))
    return scores, others


def judge(part: Part, out: Path, *, ranks: Ranks, watcher: Watcher, stop: Stop, alive: Callable[[], None]) -> None:
    """Judge a model as the protocol says, and write down how good it is."""
    artefact, data = model_of(part, out), part.config.data
    name, source = choose_split(open_data(data.path, kind=data.kind, fractals=data.fractals))
    prepared = prepare(part.protocol, source, labels=artefact.labels, place=data.path)
    workers = worker_count(part.config, ranks)

    def advance(images: int) -> None:
        watcher.advance(images)
        alive()
        stop.check()

    sound = readable(prepared.source, artefact=artefact, workers=workers, watcher=watcher, advance=advance)
    watcher.work(f"judging on {part.set}", len(sound))
    judged = judge_by(artefact, replace(prepared, source=sound), workers=workers, device=ranks.device, progress=advance)
    folder = folder_of(part, out)
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, object] = {"judged": asked(part), "judged_on": name, "left_out": prepared.left_out}
    said |= {"result": judged.judgement.to_json()}
    said |= {} if judged.real is None else {"real": judged.real.to_json()}
    write_json(folder / "judgement.json", said)


def readable(
    source: Source, *, artefact: Artefact, workers: int, watcher: Watcher, advance: Callable[[int], None]
) -> Source:
    """The images that can be read; the others are named."""
    if source.is_sound:
        return source
    watcher.work("checking images", len(source))
    bad = verify(source, channels=artefact.preprocessing.channels, workers=workers, progress=lambda done: advance(1))
    for file in bad[:20]:
        watcher.warn(f"left out {file.name}: {file.reason}")
    if len(bad) > 20:
        watcher.warn(f"left out {len(bad) - 20:,} more that cannot be read")
    return without(source, bad)


def model_of(part: Part, out: Path) -> Artefact:
    """The model that a part judges."""
    if part.judge == "weights":
        return load(part.config.model.weights or "")
    return load(folder_of(replace(part, set=part.judge or ""), out))


def asked(part: Part) -> dict[str, object]:
    """What decides a judgement; another one is not taken for it."""
    weights = {"weights": part.config.model.weights} if part.judge == "weights" else {}
    data = {"data": part.config.data.path, "kind": part.config.data.kind}
    return {"model_of": part.judge} | weights | data | vars(part.protocol)


def score_of(part: Part, out: Path) -> Score | None:
    """How good the model of a finished part is; None where it is not finished."""
    folder = folder_of(part, out)
    if part.judge is None:
        if len(part.rates) > 1 and not (folder / SWEPT).exists():
            return None
        return score_in((RunFolder(folder).result() or {}).get("result"))
    path = folder / "judgement.json"
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TrainingError(f"{path}: damaged", hint="delete the file and run again") from error
    if not isinstance(said, dict) or not {"judged", "result"} <= said.keys():
        raise TrainingError(f"{path}: no judgement of a suite", hint="delete the file and run again")
    if said["judged"] != asked(part):
        raise ConfigError(
            f"{folder} holds another judgement", expected=said["judged"], got=asked(part), hint="name another --out"
        )
    return score_in(said.get("real") or said["result"])


def score_in(result: object) -> Score | None:
    """The accuracy in a judgement's JSON, or in ReaL's."""
    if not isinstance(result, Mapping):
        return None
    low, high = result["interval"] if "interval" in result else result["intervals"]["top1"]
    return Score(top1=result["top1"], interval=(low, high), count=result["count"])
