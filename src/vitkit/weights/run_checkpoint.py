"""Model of a run that is not finished: its best evaluated checkpoint, else its newest.

A run writes `model.json` before its first step. It describes the model, whose weights are in the checkpoints.
"""

from collections.abc import Mapping
from pathlib import Path

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import VitkitError, WeightsError, summarize
from vitkit.core.files import write_json
from vitkit.core.metrics_log import find_best
from vitkit.core.shapes import Tensor
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.pretraining import ENCODER_PREFIX
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.io.checks import check_config_limits, read_json
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig

DESCRIPTION, CHECKPOINTS, METRICS = "model.json", "checkpoints", "metrics.jsonl"
TENSORS, PROGRESS = "state.safetensors", "state.json"
LORA = ".parametrizations.weight."
"""Part of the names of a weight with a low-rank update."""


def write_description(directory: Path, bundle: ModelBundle) -> None:
    """Write everything of a model but its weights, which `bundle` need not have."""
    description = {
        "name": bundle.name,
        "kind": next(kind for kind, cls in artifact_io.KINDS.items() if isinstance(bundle.config, cls)),
        "model": to_mapping(bundle.config),
        "preprocessing": bundle.preprocessing.to_hub(),
        "labels": list(bundle.labels),
    }
    write_json(directory / DESCRIPTION, description)


def is_unfinished_run(path: Path) -> bool:
    """Return whether a directory is a run without a final model, and with a checkpoint."""
    is_run = (path / DESCRIPTION).is_file() and not (path / artifact_io.CHECKSUMS).is_file()
    return is_run and bool(find_checkpoints(path))


def find_checkpoints(path: Path) -> list[Path]:
    """List the checkpoints of a run: the best evaluated one first, then from the newest to the oldest."""
    newest_first = sorted((path / CHECKPOINTS).glob("step-*"), reverse=True)
    try:
        best = find_best(path / METRICS)
    except VitkitError:  # a damaged log: the newest checkpoint is still good
        best = None
    return sorted(newest_first, key=lambda each: each.name != f"step-{best[1]:08d}") if best else newest_first


def read_progress(checkpoint: Path) -> Mapping[str, object]:
    """Return the counters of an intact checkpoint; one that is damaged or has the name of another step is an error."""
    if (checkpoint / TENSORS).is_file():
        artifact_io.check_layout(checkpoint / TENSORS)  # before it is hashed: a sparse file may have any size
    artifact_io.check_checksums(checkpoint, (TENSORS, PROGRESS))
    counters = read_json(checkpoint / PROGRESS)
    step = counters.get("step")
    if not isinstance(step, int) or checkpoint.name != f"step-{step:08d}":
        raise WeightsError(f"{checkpoint}: its state is of step {step}, not of that in its name")
    return counters


def read_unfinished_run(path: Path) -> tuple[ModelBundle, str]:
    """Return the model of the first intact checkpoint, and the name of the checkpoint."""
    damaged: WeightsError | None = None
    for checkpoint in find_checkpoints(path):
        try:
            return read_checkpoint(path, checkpoint), checkpoint.name
        except WeightsError as error:
            damaged = damaged or error
    raise damaged or WeightsError(f"{path}: the run has no checkpoint", hint="start it again")


def read_checkpoint(path: Path, checkpoint: Path) -> ModelBundle:
    """Return the model of a checkpoint of the run at a path."""
    description = read_json(path / DESCRIPTION)
    try:
        fields, labels = description["model"], tuple(map(str, description["labels"]))
        check_config_limits(fields, where=path / DESCRIPTION)
        kind = artifact_io.KINDS[str(description["kind"])]
        config: ModelConfig = from_mapping(kind, fields, where=f"{path / DESCRIPTION}: model.")
        preprocessing = Preprocessing.from_hub(description["preprocessing"])
    except WeightsError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path / DESCRIPTION}: not the model of a run: {summarize(error)}") from error
    read_progress(checkpoint)
    state = select_weights(artifact_io.read_tensors(checkpoint / TENSORS), config)
    return ModelBundle(
        name=str(description["name"]), config=config, state=state, preprocessing=preprocessing, labels=labels
    )


def select_weights(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of the model: averaged ones where there are any, without a wrapper, with LoRA merged."""
    parts = {section: _section(tensors, section) for section in ("model.", "ema.")}
    values = parts["model."] | parts["ema."]
    if any(name.startswith(ENCODER_PREFIX) for name in values):
        values = {name.removeprefix(ENCODER_PREFIX): value for name, value in values.items()}
    state = {}
    for name in create(config, device="meta").state_dict():
        layer = name.removesuffix(".weight") + LORA
        if name in values:
            state[name] = values[name]
        elif f"{layer}original" in values:
            state[name] = values[f"{layer}original"].clone()
            queries, _, outputs = state[name].chunk(3)
            update = values[f"{layer}0.up"] @ values[f"{layer}0.down"]
            queries += update[0]
            outputs += update[1]
        else:
            raise WeightsError(f"the checkpoint is of another model: it has no {name}")
    return state


def _section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
