"""A run's configuration goes in; the model, and what trains it, come out."""

import os
from dataclasses import replace

import torch

from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Size
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT
from vitkit.objectives.supervised import Supervised
from vitkit.train.config import RunConfig
from vitkit.train.optim import Average, choose_what_learns, merge_low_rank, optimizer, trainable
from vitkit.train.parallel import Ranks, spread, whole
from vitkit.train.state import State
from vitkit.train.update import Trainer
from vitkit.train.watch import Watcher
from vitkit.zoo.lookup import Model, configure, create
from vitkit.zoo.variants import ModelConfig


def choose_model(config: RunConfig, *, classes: int, pretrained: Artefact | None) -> ModelConfig:
    """The model's configuration: by name, or that of the weights, changed where the run says so."""
    choice = config.model
    start = pretrained.config if pretrained else choice.name
    if start is None:
        raise ConfigError("no model is named", hint="set model.name, such as Ti/16, or model.weights")
    if isinstance(start, ViTConfig) and (choice.new_head or classes != start.classes):
        # Fine-tuning removes the whole pre-training head: its hidden layer and a sigmoid loss's bias too (section 3.2).
        start = replace(start, head=replace(start.head, pre_logits=None, bias=0.0))
    return configure(
        start,
        image_size=choice.image_size,
        patch_size=choice.patch_size,
        channels=config.data.channels,
        classes=classes,
        settings=choice.settings,
    )


def choose_preprocessing(config: RunConfig, model: ModelConfig, pretrained: Artefact | None) -> Preprocessing:
    """How images are brought to the model's size: as named, as the weights were, or squashed."""
    size: Size = model.image_size
    channels = config.data.channels
    if config.data.preprocessing is not None:
        return preprocessing(config.data.preprocessing, image_size=size, channels=channels)
    if pretrained is not None:
        return replace(pretrained.preprocessing, image_size=size, channels=channels)
    return Preprocessing(image_size=size, channels=channels, mean=(0.5,), deviation=(0.5,))


def make_model(
    config: RunConfig, model: ModelConfig, *, pretrained: Artefact | None, ranks: Ranks, watcher: Watcher
) -> Model:
    """The model with its first weights, the same on every rank."""
    generator = torch.Generator().manual_seed(config.seed)
    made = create(model, generator=generator)
    if pretrained:
        fitted = adapt(
            pretrained.state,
            old=pretrained.config,
            new=model,
            new_head=config.model.new_head,
            generator=generator,
        )
        for change in fitted.changes:
            watcher.say(change)
        made.load_state_dict(fitted.state)
    choose_what_learns(made, config.optimizer, generator=generator)
    return made.to(ranks.device)


def make_trainer(
    config: RunConfig, model: Model, *, preprocessing: Preprocessing, classes: int, steps: int, ranks: Ranks
) -> Trainer:
    """What makes updates: the model spread over ranks, its optimizer and its average."""
    if config.optimizer.tune == "lora" and config.parallel.mode == "fsdp2":
        raise ConfigError(
            "LoRA's small additions are not sharded", hint="use parallel.mode=ddp with optimizer.tune=lora"
        )
    called = spread(model, config.parallel, ranks)
    learning = trainable(model)
    depth = len(model.blocks if isinstance(model, ViT) else model.stages)
    state = State(
        parameters=dict(model.named_parameters()),
        optimizer=optimizer(learning, config.optimizer, depth=depth),
        average=None if config.optimizer.average is None else Average.of(learning, config.optimizer.average),
    )
    return Trainer(
        config=config,
        model=called,
        objective=Supervised(config.objective),
        state=state,
        ranks=ranks,
        preprocessing=preprocessing,
        classes=classes,
        steps=steps,
    )


def finished_weights(trainer: Trainer, model: Model) -> dict[str, torch.Tensor]:
    """The weights that a run ends with: the average where there is one, additions merged; every rank must ask.

    The trainer cannot go on afterwards.
    """
    if trainer.state.average:
        trainer.state.average.swap(trainer.state.parameters)
    merge_low_rank(model)
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def worker_count(config: RunConfig, ranks: Ranks) -> int:
    """Processes that prepare images for this rank: as asked, or the cores that are left to it, at most eight."""
    if config.data.workers is not None:
        return config.data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, cores // local_ranks))
