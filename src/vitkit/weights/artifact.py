"""Artifact directories: a model with its configuration, preprocessing, labels and checksums.

An artifact has `model.safetensors`, `config.json`, `preprocessor_config.json`, `labels.json`, `reference.json` (logits
of a fixed image), a model card `README.md` and `checksums.json`. Nothing in it is pickled, and nothing is loaded whose
checksum does not match. If timm can compute the model, the weights have timm's names and `config.json` is timm's, so
that timm and transformers load the directory too; vitkit's configuration is under the key "vitkit".
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jinja2
import safetensors
import safetensors.torch

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import WeightsError, summarize
from vitkit.core.files import escape_surrogates, sha256, write_json, write_text
from vitkit.core.shapes import Tensor
from vitkit.core.sizes import format_size
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.weights.bundle import ModelBundle, reference_logits
from vitkit.weights.formats.timm import TIMM
from vitkit.weights.formats.timm.config import describe_preprocessing, make_timm_config
from vitkit.weights.io.checks import MAX_JSON_BYTES, check_config_limits, open_file, read_json, read_json_value
from vitkit.weights.io.readers import check_header
from vitkit.weights.io.writers import save_safetensors
from vitkit.weights.rules import IDENTITY, Rule, apply_rules, invert_rules
from vitkit.zoo.cost import count_parameters
from vitkit.zoo.variants import ModelConfig

WEIGHTS, CONFIG, PREPROCESSING = "model.safetensors", "config.json", "preprocessor_config.json"
LABELS, REFERENCE, MODEL_CARD, CHECKSUMS = "labels.json", "reference.json", "README.md", "checksums.json"
FILES = (WEIGHTS, CONFIG, PREPROCESSING, LABELS, REFERENCE)
"""Files that are not loaded if they have changed. The model card may be edited."""
ALL_FILES = (*FILES, MODEL_CARD, CHECKSUMS)
FORMAT_NAME, FORMAT_TITLE = "vitkit", "vitkit artifact"
FORMAT_VERSION = 3
"""Version 3 renamed configuration keys (`num_classes`, `crop_fraction`); earlier artifacts are refused."""
KINDS: dict[str, type[ModelConfig]] = {"vit": ViTConfig, "bit": BiTConfig}
RESIZE_MODES = {
    "squash": "resized to exactly this size, regardless of aspect ratio",
    "squash_crop": "resized to a larger size, regardless of aspect ratio, and center-cropped",
    "crop": "resized by the shorter side and center-cropped",
}


# Writing


def write_artifact(path: Path | str, bundle: ModelBundle) -> None:
    """Write an artifact into a directory. The checksums come last: without them the files are not an artifact."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / CHECKSUMS).unlink(missing_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in bundle.state.items()}
    bundle = replace(bundle, state=state)
    timm_json, unsupported = timm_config_json(bundle)
    rules = [] if unsupported else changing_rules(TIMM.rules(bundle.config, None))
    ours = {name for rule in rules for name in rule.ours}
    unchanged = {name: tensor for name, tensor in state.items() if name not in ours}
    _write_weights(path / WEIGHTS, dict(invert_rules(rules, state)) | unchanged)
    description = {
        "version": FORMAT_VERSION,
        "name": bundle.name,
        "kind": next(kind for kind, cls in KINDS.items() if isinstance(bundle.config, cls)),
        "names": "timm" if rules else "vitkit",
        "model": to_mapping(bundle.config),
    }
    write_json(path / CONFIG, timm_json | {"vitkit": description})
    write_json(path / PREPROCESSING, bundle.preprocessing.to_hub())
    write_json(path / LABELS, list(bundle.labels))
    logits = reference_logits(bundle.build_model().float())[0].tolist()
    is_finite = all(map(math.isfinite, logits))
    write_json(path / REFERENCE, {"image": "drawn, 1", "logits": logits if is_finite else None})
    write_text(path / MODEL_CARD, model_card(bundle, timm_unsupported=unsupported))
    write_checksums(path, (*FILES, MODEL_CARD))


def timm_config_json(bundle: ModelBundle) -> tuple[dict[str, object], str | None]:
    """Return the part of config.json that timm and transformers read, and the reason why timm cannot compute the model.

    Without an architecture, neither library loads the directory.
    """
    config = bundle.config
    labels: dict[str, object] = {"label_names": list(bundle.labels)}
    try:
        unsupported = TIMM.unsupported_reason(config)
        timm_json: dict[str, object] = {} if unsupported else make_timm_config(config)
    except WeightsError as error:
        unsupported, timm_json = error.message, {}
    if unsupported:
        return {"num_classes": config.num_classes} | labels, unsupported
    args, pretrained = timm_json["model_args"], timm_json["pretrained_cfg"]
    assert isinstance(args, dict)
    assert isinstance(pretrained, dict)
    # transformers passes num_classes to timm itself, and does not pass on null values.
    args = {key: 0.0 if value is None else value for key, value in args.items() if key != "num_classes"}
    return timm_json | {"model_args": args, "pretrained_cfg": pretrained | _timm_pretrained_cfg(bundle)} | labels, None


def _timm_pretrained_cfg(bundle: ModelBundle) -> dict[str, object]:
    """Return timm's description of the preprocessing and of the layers that fine-tuning replaces."""
    config, values = bundle.config, describe_preprocessing(bundle.preprocessing)
    if isinstance(config, ViTConfig):
        values["fixed_input_size"] = config.positions.is_additive
    if config.num_classes:
        classifier = ["head", "head_dist"] if isinstance(config, ViTConfig) and config.tokens.distillation else "head"
        values["classifier"] = classifier if isinstance(config, ViTConfig) else "head.fc"
    if config.channels == 3 and isinstance(config, ViTConfig) and config.backbone is None:
        values["first_conv"] = "patch_embed.proj"  # otherwise timm assumes weights for three channels
    return values


def changing_rules(rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules that rename or rearrange a tensor. Most models have none: their names are timm's."""
    return [rule for rule in rules if rule.conversion is not IDENTITY or rule.ours != rule.theirs]


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_safetensors(path, tensors, {"format": "pt"})
    except WeightsError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # the caller, which chose the directory, explains a full disk
        raise


# Model card


def model_card(bundle: ModelBundle, *, timm_unsupported: str | None) -> str:
    """Return the model card of an artifact. The license is left to the user."""
    config, preprocessing = bundle.config, bundle.preprocessing
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    environment.filters |= {"escape_markdown": escape_markdown, "format_size": format_size}
    mean, std = (", ".join(f"{value:g}" for value in row) for row in (preprocessing.mean, preprocessing.std))
    template = environment.from_string(Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8"))
    return template.render(
        name=bundle.name,
        config=config,
        is_vit=isinstance(config, ViTConfig),
        parameters=count_parameters(config),
        preprocessing=preprocessing,
        resize=RESIZE_MODES[preprocessing.resize],
        mean=mean,
        std=std,
        labels=bundle.labels,
        timm_unsupported=timm_unsupported,
    )


def escape_markdown(text: str) -> str:
    """Return a text on one line without characters that Markdown or terminals interpret.

    >>> escape_markdown("<b>`cat`" + chr(10))
    "＜b＞'cat' "
    """
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", " ", text)
    return text.translate({ord("`"): "'", ord("<"): "＜", ord(">"): "＞"})


# Reading


def is_artifact(path: Path | str) -> bool:
    """Return whether a directory is an artifact or the remains of one, which no other format may read.

    Without checksums its weights may be of another model than its config.json, and timm's names would not show it.
    """
    path = Path(path)
    if (path / CHECKSUMS).is_file():
        return True
    if not (path / CONFIG).is_file():
        return False
    try:
        config = read_json(path / CONFIG)
    except WeightsError:  # reported when the file is read
        return False
    return "vitkit" in config or config.get("format") == "vitkit"


def read_artifact(path: Path | str) -> ModelBundle:
    """Read an artifact. A missing or changed file is an error that names it."""
    path = Path(path)
    if not (path / CHECKSUMS).is_file():
        raise WeightsError(
            f"{path}: no model in this directory",
            expected=f"a directory with {CHECKSUMS} and {WEIGHTS}",
            got=_list_entries(path),
            hint="name the --out directory of a finished run, or a weight file",
        )
    _check_version(path)
    check_checksums(path, FILES)
    try:
        description = read_json(path / CONFIG)["vitkit"]
        kind, name, names = (str(description[key]) for key in ("kind", "name", "names"))
        fields = description["model"]
        check_config_limits(fields, where=path / CONFIG)
        config: ModelConfig = from_mapping(KINDS[kind], fields, where=f"{path / CONFIG}: model.")
        labels = read_labels(path / LABELS, num_classes=config.num_classes)
        preprocessor = read_json(path / PREPROCESSING)
        check_config_limits(preprocessor, where=path / PREPROCESSING)
        preprocessing = Preprocessing.from_hub(preprocessor)
    except WeightsError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path / CONFIG}: not the configuration of a vitkit model: {summarize(error)}") from error
    state = _read_weights(path / WEIGHTS, config, names=names)
    return ModelBundle(name=name, config=config, state=state, preprocessing=preprocessing, labels=labels)


def _check_version(path: Path) -> None:
    """Raise an error if the artifact has another format version."""
    try:
        config = read_json(path / CONFIG)
    except WeightsError:  # the checksums name the damaged file
        return
    description = config.get("vitkit", config)  # at the top level in version 1
    version = description.get("version", 1) if isinstance(description, Mapping) else None
    if version is None or (type(version) is int and version == FORMAT_VERSION):
        return
    hint = "update vitkit" if type(version) is int else "the file is damaged; download or copy it again"
    if type(version) is int and version < FORMAT_VERSION:
        command = f"vitkit weights convert {shlex.quote(str(path))} OUT --to timm"
        hint = f"train again, or run `{command}` with the vitkit version that wrote it and load OUT"
    raise WeightsError(f"{path}: another artifact version", expected=FORMAT_VERSION, got=version, hint=hint)


def check_size(path: Path) -> None:
    """Validate the size of a JSON file, or size and header of a model's weights, before the file is hashed.

    A sparse file of any size costs nothing to make, and one made to do harm can have a matching checksum.
    """
    actual = path.stat().st_size
    if path.suffix == ".json":
        if actual > MAX_JSON_BYTES:
            raise WeightsError(f"{path}: is too large", expected=f"at most {MAX_JSON_BYTES:,} bytes", got=actual)
        return
    try:
        with open_file(path) as file:
            size = check_header(file, path=path)
    except WeightsError as error:
        reason = error.message.removeprefix(f"{path}: ")
        raise WeightsError(
            f"{path}: damaged: {reason}", expected=error.expected, got=error.got, hint=error.hint
        ) from error
    if actual > size:
        raise WeightsError(
            f"{path}: damaged: data after the last tensor",
            expected=f"{size:,} bytes",
            got=f"{actual:,}",
            hint="copy it again, or train again",
        )


def read_labels(path: Path, *, num_classes: int) -> tuple[str, ...]:
    """Read the class names."""
    labels = read_json_value(path)
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not is_list or len(labels) != num_classes:
        got = f"{len(labels):,}" if isinstance(labels, list) else type(labels).__name__
        raise WeightsError(f"{path}: not the labels of the model", expected=f"{num_classes:,} strings", got=got)
    return tuple(map(escape_surrogates, labels))


def read_reference_logits(path: Path | str) -> list[float] | None:
    """Read the reference logits saved with an artifact; None if they were not finite."""
    file = Path(path) / REFERENCE
    logits = read_json(file).get("logits")
    if logits is None:
        return None
    if not isinstance(logits, list) or not all(type(value) in (int, float) for value in logits):
        raise WeightsError(f"{file}: invalid reference logits", expected="a list of numbers under logits")
    return [float(value) for value in logits]


def _read_weights(path: Path, config: ModelConfig, *, names: str) -> dict[str, Tensor]:
    tensors = read_tensors(path)
    if missing := [name for name in _last_layers(config) if name not in tensors]:  # before all layers are built
        raise WeightsError(f"{path}: has no {missing[0]}", hint=f"{CONFIG} is of another model")
    if names != "timm":
        return tensors
    rules = changing_rules(TIMM.rules(config, None))
    try:
        renamed = dict(apply_rules(rules, tensors))
    except KeyError as error:
        raise WeightsError(f"{path}: has no {error.args[0]}", hint="it is of another model") from error
    theirs = {name for rule in rules for name in rule.theirs}
    return {name: tensor for name, tensor in tensors.items() if name not in theirs} | renamed


def _last_layers(config: ModelConfig) -> list[str]:
    """Return a tensor of the last layer, and of the last unit of each stage of a ResNet."""
    if isinstance(config, BiTConfig):
        return [f"stages.{stage}.blocks.{count - 1}.conv1.weight" for stage, count in enumerate(config.units)]
    units = enumerate(config.backbone.units if config.backbone else ())
    stages = [f"patch_embed.backbone.stages.{stage}.blocks.{count - 1}.conv1.weight" for stage, count in units]
    return [f"blocks.{config.depth * (1 + config.block.axial) - 1}.norm1.weight", *stages]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file."""
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error


def check_layout(path: Path) -> None:
    """Raise an error if the header of a safetensors file does not describe all of the file, which is not read."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: damaged: {summarize(error)}") from error


def write_checksums(path: Path, names: Sequence[str]) -> None:
    """Write the checksums of files, after all of them: their presence means that the files are complete."""
    write_json(path / CHECKSUMS, {name: sha256(path / name) for name in names})


def check_checksums(path: Path, names: Sequence[str]) -> None:
    """Raise an error if a file is missing or damaged, or its checksum does not match."""
    recorded = read_json(path / CHECKSUMS)
    for name in names:
        try:
            if (name == WEIGHTS or name.endswith(".json")) and (path / name).is_file():
                check_size(path / name)
            checksum = sha256(path / name)
        except OSError as error:
            raise WeightsError(f"{path / name}: missing or unreadable", hint="the directory is incomplete") from error
        if checksum != recorded.get(name):
            raise WeightsError(
                f"{path / name}: damaged",
                expected=f"SHA-256 {str(recorded.get(name))[:12]}…",
                got=f"{checksum[:12]}…",
                hint="copy it again, or train again",
            )


def _list_entries(path: Path) -> str:
    if not path.is_dir():
        return "a file" if path.exists() else "no such directory"
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "an empty directory"
