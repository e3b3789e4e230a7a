"""What a run can be: one configuration for the model, the data, the objective, the steps and the machine."""

from dataclasses import dataclass
from typing import Literal

from vitkit.core.errors import ConfigError, check_not_negative, check_positive, check_share
from vitkit.core.shapes import Size
from vitkit.data.augment import AugmentConfig
from vitkit.data.fractals import FractalConfig
from vitkit.model.masked import AutoencoderConfig, MaskedConfig
from vitkit.objectives.distillation import DistillationConfig
from vitkit.objectives.supervised import SupervisedConfig


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model, by name, and what is changed of it: `settings` are `section.key=value` of its configuration.

    `weights` is the folder of a trained model to start from, which then also says what model it is. The head is new,
    and zero, where the classes are others, or where `new_head` asks for it. `shrink` keeps this share of the weights
    and fills up with a fresh draw (Ash and Adams, 2020): of weights that learned something far from the task, a little
    is a better start than all.
    """

    name: str | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    settings: tuple[str, ...] = ()
    weights: str | None = None
    new_head: bool = False
    shrink: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.shrink <= 1.0:
            raise ConfigError("model.shrink is not a share", expected="0 < share ≤ 1", got=self.shrink)
        if self.name is not None and self.weights is not None:
            raise ConfigError(
                "model.weights already say which model it is",
                got=f"model.name={self.name} and model.weights={self.weights}",
                hint="set model.name=none",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images are, and how they are read.

    Where there is no validation split, `val_share` of each class is held out of training for one; with 0 there is none.
    `train_on` "all" learns from the validation images too, as the last run of Table 4's protocol does.
    `label_share` is the share of each class's training images that are learned from, as if only they had labels; which
    they are follows from the run's seed. An objective that needs no labels learns from all.
    `preprocessing` is an origin's name; None takes the one stored with the weights, or else squashes to the image size.
    """

    path: str = "digits"
    kind: str | None = None
    val_share: float = 0.1
    train_on: Literal["train", "all"] = "train"
    label_share: float = 1.0
    channels: int = 3
    preprocessing: str | None = None
    verify: bool = True
    max_bad_share: float = 0.2
    workers: int | None = None
    fractals: FractalConfig = FractalConfig()

    def __post_init__(self) -> None:
        check_share("data.val_share", self.val_share)
        check_share("data.max_bad_share", self.max_bad_share)
        check_positive("data.channels", self.channels)
        if not 0.0 < self.label_share <= 1.0:
            raise ConfigError("data.label_share is not a share", expected="0 < share ≤ 1", got=self.label_share)
        check_not_negative("data.workers", self.workers or 0)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(SupervisedConfig):
    """What is learned: labels, what hidden patches were, hidden patches themselves, or what a teacher says.

    `loss` and `smoothing` are those of labels; each of the others has a section of its own.
    """

    name: Literal["supervised", "masked", "autoencoder", "distillation"] = "supervised"
    masked: MaskedConfig = MaskedConfig()
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    distillation: DistillationConfig = DistillationConfig()

    @property
    def labelled(self) -> bool:
        """Whether it needs labels, and is judged by how often it is right about them."""
        return self.name in ("supervised", "distillation")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long, in what batches, and how the learning rate moves: up over `warmup_steps`, then down to `end_lr`."""

    batch_size: int = 128
    accumulate: int = 1
    epochs: float | None = 10.0
    steps: int | None = None
    lr: float = 1e-3
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    end_lr: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "lr"):
            check_positive(f"schedule.{name}", getattr(self, name))
        for name in ("lr", "end_lr"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"schedule.{name} is not a rate", expected="0 ≤ rate", got=getattr(self, name))
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                "a run's length is either schedule.epochs or schedule.steps",
                got=f"epochs {self.epochs}, steps {self.steps}",
                hint="set the other to none",
            )
        length = self.steps if self.epochs is None else self.epochs
        check_positive("schedule.steps" if self.epochs is None else "schedule.epochs", length or 0)
        check_not_negative("schedule.warmup_steps", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become steps.

    Weight decay is decoupled and touches kernels only. `layer_decay` multiplies the learning rate once for each layer
    below the head. `average` is the decay of the Polyak average of the weights, which is then what is judged and kept.
    `tune` says what learns: everything, the head alone, or low-rank additions to queries and values.
    """

    name: Literal["adam", "sgd"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = 1.0
    layer_decay: float = 1.0
    average: float | None = None
    tune: Literal["full", "head", "lora"] = "full"
    lora_rank: int = 8

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "momentum"):
            check_share(f"optimizer.{name}", getattr(self, name))
        if self.average is not None:
            check_share("optimizer.average", self.average)
        if self.clip is not None:
            check_positive("optimizer.clip", self.clip)
        if not 0.0 < self.layer_decay <= 1.0:
            raise ConfigError("optimizer.layer_decay is not a factor", expected="0 < factor ≤ 1", got=self.layer_decay)
        check_not_negative("optimizer.weight_decay", self.weight_decay)
        check_positive("optimizer.lora_rank", self.lora_rank)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The machine: nothing here changes what is learned beyond rounding.

    `mode` auto is DDP under torchrun and one process elsewhere. `timeout` is how long ranks wait, in seconds.
    """

    mode: Literal["auto", "ddp", "fsdp2"] = "auto"
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    activation_checkpointing: bool = False
    timeout: float = 600.0
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """What is written, and how often, in steps; None for `evaluate_every` is once an epoch, and at most 20 times a run.

    A checkpoint is also written when `save_minutes` have passed. The last `last` checkpoints are kept, and the best.
    `compare_with` names finished runs that the report sets beside this one.
    """

    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    save_minutes: float = 5.0
    last: int = 2
    best: bool = True
    tensorboard: bool = False
    max_skipped: int = 10
    compare_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("log_every", "save_minutes", "last", "max_skipped"):
            check_positive(f"keep.{name}", getattr(self, name))
        for name in ("evaluate_every", "save_every"):
            if getattr(self, name) is not None:
                check_positive(f"keep.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Everything random in it follows from `seed`."""

    seed: int = 0
    model: ModelChoice = ModelChoice()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    keep: KeepConfig = KeepConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed is out of range", expected="0 ≤ seed < 2^63", got=self.seed)
        if not self.objective.labelled and (self.augment.mixup or self.augment.cutmix):
            raise ConfigError(
                "mixup and cutmix mix labels, of which this objective has none",
                expected="augment.mixup=0 and augment.cutmix=0",
                got=f"{self.augment.mixup} and {self.augment.cutmix}",
            )
        if not self.objective.labelled and self.optimizer.tune != "full":
            raise ConfigError(
                "what is learned without labels has no head to be tuned alone",
                expected="optimizer.tune=full",
                got=self.optimizer.tune,
            )
