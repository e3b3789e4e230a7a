"""Configuration of a run: model, data, objective, optimizer, schedule and machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from vitkit.core.config import apply_settings, find_keys, flatten_settings, load_toml, to_toml
from vitkit.core.errors import ConfigError, check_fraction, check_not_negative, check_positive, did_you_mean
from vitkit.core.sizes import Size
from vitkit.data.config import AugmentConfig, FractalConfig
from vitkit.objectives.config import ObjectiveConfig as ObjectiveConfig  # noqa: PLC0414  a section of RunConfig

SHORT_KEYS = {
    "data": "data.path",
    "model": "model.name",
    "init": "model.init",
    "image_size": "model.image_size",
    "lr": "schedule.lr",
    "epochs": "schedule.epochs",
    "steps": "schedule.steps",
    "batch_size": "schedule.batch_size",
    "workers": "data.workers",
    "channels": "data.channels",
    "device": "parallel.device",
    "teacher": "objective.distillation.teacher",
    "trainable": "optimizer.trainable",
}
"""Keys that need no section."""
EXCLUSIVE_KEYS = {"schedule.epochs": "schedule.steps", "schedule.steps": "schedule.epochs"}
"""Keys that set another to none, unless that is set too."""
ARCHITECTURE_KEYS = ("width", "depth", "heads", "mlp_dim", "pooling", "block.activation")
"""Settings of a recipe's model that do not apply to another model."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model: a name with changes, or initial weights.

    Args:
        name: Name of the model; None if `init` decides it.
        settings: `section.key=value` overrides of the model's configuration.
        init: Run, artifact, weight file or hub name of the initial weights.
        new_head: Replace the head by a zero one even if the number of classes is the same.
        shrink: Fraction of the initial weights to keep; the rest is drawn anew (Ash and Adams, 2020). A small fraction
            is the better start if the weights were learned on something far from the task.
    """

    name: str | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    settings: tuple[str, ...] = ()
    init: str | None = None
    new_head: bool = False
    shrink: float = 1.0

    def __post_init__(self) -> None:
        check_fraction("model.shrink", self.shrink, allow_zero=False, allow_one=True)
        if self.name is not None and self.init is not None:
            raise ConfigError(
                "model.name and model.init are both set",
                got=f"model.name={self.name} and model.init={self.init}",
                hint="the initial weights decide the model: set model.name=none",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset and how its images are read.

    Args:
        layout: Name of the dataset's layout; None detects it.
        val_fraction: Fraction of each class to hold out for validation if the dataset has no validation split.
        train_on: "all" trains on the validation images too, as the final run of Table 4's protocol does.
        fraction: Fraction of each class's images to use for training and, if they are held out of these, for
            validation. Chosen by the run's seed; a smaller fraction is a subset of a larger one.
        label_fraction: Fraction of each class's training images to use, chosen by the run's seed. Objectives without
            labels use all images.
        preprocessing: Name of an origin; None uses the preprocessing of the initial weights, else squashes the image.
        exclude: CSV file with the columns file and reason, as bad_files.csv: images that are left out.
        add: Labeled datasets with the same splits, whose images and classes are added; classes of equal name are one.
        max_bad_fraction: Fraction of unreadable images above which the run fails.
        workers: Processes that load images; None uses the available cores.
    """

    path: str = "digits"
    layout: str | None = None
    val_fraction: float = 0.1
    train_on: Literal["train", "all"] = "train"
    fraction: float = 1.0
    label_fraction: float = 1.0
    channels: int = 3
    preprocessing: str | None = None
    verify: bool = True
    exclude: str | None = None
    add: tuple[str, ...] = ()
    max_bad_fraction: float = 0.2
    workers: int | None = None
    fractals: FractalConfig = FractalConfig()

    def __post_init__(self) -> None:
        check_fraction("data.val_fraction", self.val_fraction)
        check_fraction("data.max_bad_fraction", self.max_bad_fraction)
        check_positive("data.channels", self.channels)
        for name in ("fraction", "label_fraction"):
            check_fraction(f"data.{name}", getattr(self, name), allow_zero=False, allow_one=True)
        check_not_negative("data.workers", self.workers or 0)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Length, batch size and learning-rate schedule: linear warm-up over `warmup_steps`, then decay to `end_lr`.

    Args:
        accumulate: Micro-batches into which a rank divides its part of a batch; "auto" is as few as fit into the free
            memory of a GPU, and 1 on other devices. A resumed run keeps the number.
    """

    batch_size: int = 128
    accumulate: int | Literal["auto"] = "auto"
    epochs: float | None = 10.0
    steps: int | None = None
    lr: float = 1e-3
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    end_lr: float = 0.0

    def __post_init__(self) -> None:
        check_positive("schedule.accumulate", self.micro_batches)
        for name in ("batch_size", "lr"):
            check_positive(f"schedule.{name}", getattr(self, name))
        for name in ("lr", "end_lr", "warmup_steps"):
            check_not_negative(f"schedule.{name}", getattr(self, name))
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                "set either schedule.epochs or schedule.steps",
                got=f"epochs {self.epochs}, steps {self.steps}",
                hint="set the other to none",
            )
        length = self.steps if self.epochs is None else self.epochs
        check_positive("schedule.steps" if self.epochs is None else "schedule.epochs", length)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches; 1 as long as it is not determined."""
        return 1 if self.accumulate == "auto" else self.accumulate


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and trainable parameters.

    Args:
        weight_decay: Decoupled weight decay, of kernels only.
        adam_lr_scale: Learning rate of the parameters that Muon leaves to AdamW, relative to the schedule.
        clip: Limit of the global gradient norm.
        layer_decay: Factor by which the learning rate shrinks with each layer below the head.
        ema_decay: Decay of the exponential moving average of the weights, which is then evaluated and saved.
        trainable: All parameters, the head, or the head and low-rank updates of queries and values.
        max_skipped: Number of successive updates with a non-finite loss or gradient after which the run fails.
    """

    name: Literal["adam", "sgd", "muon"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0
    adam_lr_scale: float = 0.1
    clip: float | None = 1.0
    layer_decay: float = 1.0
    ema_decay: float | None = None
    trainable: Literal["all", "head", "lora"] = "all"
    lora_rank: int = 8
    max_skipped: int = 10

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "momentum"):
            check_fraction(f"optimizer.{name}", getattr(self, name))
        if self.ema_decay is not None:
            check_fraction("optimizer.ema_decay", self.ema_decay)
        check_fraction("optimizer.layer_decay", self.layer_decay, allow_zero=False, allow_one=True)
        check_not_negative("optimizer.weight_decay", self.weight_decay)
        for name in ("clip", "adam_lr_scale", "lora_rank", "max_skipped"):
            check_positive(f"optimizer.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Use of the machine, which changes results by rounding at most.

    Args:
        mode: "auto" is DDP under torchrun and a single process otherwise.
        precision: "auto" is bf16 on GPUs of compute capability 8 and higher, fp16 on older ones, and fp32 elsewhere.
            A resumed run keeps the precision.
        timeout: Seconds after which a rank stops waiting for the others.
        threads: Threads of each process; None is PyTorch's default.
    """

    mode: Literal["auto", "ddp", "fsdp2"] = "auto"
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool = False
    activation_checkpointing: bool = False
    timeout: float = 600.0
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out images during training.

    Args:
        every: Steps between evaluations; None is once an epoch, and at most 20 times a run.
        patience: Stop after this many evaluations without a better one, and use the best weights; None trains to
            the end.
    """

    every: int | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "patience"):
            check_positive(f"evaluation.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Steps and minutes between checkpoints, and how many to keep: the `last` few, and the `best`.

    `save_every` None saves after every evaluation.
    """

    save_every: int | None = None
    save_minutes: float = 5.0
    last: int = 2
    best: bool = True

    def __post_init__(self) -> None:
        for name in ("save_every", "save_minutes", "last"):
            check_positive(f"checkpoint.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Steps between log records, and whether to write TensorBoard files too."""

    log_every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_positive("logging.log_every", self.log_every)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Finished runs that the report compares with this one."""

    compare_with: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A complete run. Every random number in it is a function of `seed`."""

    seed: int = 0
    model: ModelChoice = ModelChoice()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    report: ReportConfig = ReportConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed is out of range", expected="0 ≤ seed < 2^63", got=self.seed)
        if not self.objective.needs_labels and (self.augment.mixup or self.augment.cutmix):
            raise ConfigError(
                f"mixup and cutmix mix labels, which objective.name={self.objective.name} does not use",
                expected="augment.mixup=0 and augment.cutmix=0",
                got=f"{self.augment.mixup} and {self.augment.cutmix}",
            )
        if self.evaluation.patience is not None and not self.checkpoint.best:
            raise ConfigError(
                "evaluation.patience uses the best weights, which are not saved", expected="checkpoint.best=true"
            )
        if not self.objective.needs_labels and self.optimizer.trainable != "all":
            raise ConfigError(
                f"objective.name={self.objective.name} has no head to train alone",
                expected="optimizer.trainable=all",
                got=self.optimizer.trainable,
            )

    def override(self, settings: Mapping[str, object]) -> "RunConfig":
        """Return the configuration with settings by dotted, nested or short keys.

        Setting one of steps and epochs clears the other; another model name drops the architecture settings of the
        model before.

        >>> RunConfig().override({"steps": 5, "optimizer.weight_decay": 0.1}).schedule.epochs is None
        True
        """
        expanded, config = expand_settings(settings), self
        if "model.name" in expanded:
            remaining = tuple(each for each in self.model.settings if each.partition("=")[0] not in ARCHITECTURE_KEYS)
            config = replace(self, model=replace(self.model, patch_size=None, settings=remaining))
        return apply_settings(config, expanded)

    def to_toml(self) -> str:
        """Return all settings as TOML, which `from_toml` reads."""
        return to_toml(self)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "RunConfig":
        """Read a TOML file; its key `base` may name a recipe or another file, whose settings it changes."""
        from vitkit.recipes.registry import RECIPES  # noqa: PLC0415  recipes are made of configurations

        return load_toml(os.fspath(path), cls, recipes={name: recipe.make for name, recipe in RECIPES.items()})


def expand_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by full keys, with those that exclude others; a key that is set twice is an error.

    >>> expand_settings({"lr": 0.1, "schedule": {"steps": 5}})
    {'schedule.lr': 0.1, 'schedule.steps': 5, 'schedule.epochs': None}
    """
    sections = [field.name for field in fields(RunConfig)]
    expanded: dict[str, object] = {}
    for key, value in flatten_settings(settings).items():
        if "." not in key and key not in (*SHORT_KEYS, *sections):
            below = find_keys(RunConfig, key)
            hint = (
                (below and f"did you mean {' or '.join(below)}?")
                or did_you_mean(key, [*SHORT_KEYS, *sections])
                or f"{', '.join(SHORT_KEYS)}; or section.key, as printed by vitkit recipes NAME"
            )
            raise ConfigError(f"{key} is not a known key", hint=hint)
        full = SHORT_KEYS.get(key, key)
        if full in expanded:
            raise ConfigError(f"{full} is assigned twice", got=f"{expanded[full]} and {value}")
        expanded[full] = value
    return expanded | {
        other: None for key, other in EXCLUSIVE_KEYS.items() if key in expanded and other not in expanded
    }
