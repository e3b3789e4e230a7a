"""A run's configuration goes in; the model, and what trains it, come out."""

import os
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Size
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.distilled import Distilled, as_student
from vitkit.model.masked import ENCODER, MaskedAutoencoder, MaskedPatches, encoder_of
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.objectives.autoencoder import FillingIn
from vitkit.objectives.distillation import Distillation, Teacher
from vitkit.objectives.masked import MaskedPrediction
from vitkit.objectives.objective import Objective
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
    made = configure(
        start,
        image_size=choice.image_size,
        patch_size=choice.patch_size,
        channels=config.data.channels,
        classes=classes,
        settings=choice.settings,
    )
    objective = config.objective
    if not objective.labelled and isinstance(made, ViTConfig):  # there is no head, and nothing before one
        return replace(made, head=replace(made.head, pre_logits=None, bias=0.0))
    return as_student(made, token=objective.distillation.token) if objective.name == "distillation" else made


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
) -> nn.Module:
    """The model with its first weights, the same on every rank, and around it what the objective needs."""
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
        if config.model.shrink < 1:
            shrink(made, create(model, generator=generator), share=config.model.shrink)
            watcher.say(f"weights: {config.model.shrink:g} of what was learned, the rest drawn anew")
    choose_what_learns(made, config.optimizer, generator=generator)
    return around(made, config, generator=generator).to(ranks.device)


@torch.no_grad()
def shrink(model: nn.Module, fresh: nn.Module, *, share: float) -> None:
    """Keep a share of a model's weights, and take the rest from one that has learned nothing.

    >>> trained, fresh = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> _ = nn.init.constant_(trained.weight, 1.0), nn.init.constant_(fresh.weight, 2.0)
    >>> shrink(trained, fresh, share=0.25)
    >>> trained.weight.item()
    1.75
    """
    for learned, drawn in zip(model.parameters(), fresh.parameters(), strict=True):
        learned.lerp_(drawn, 1 - share)


def around(model: Model, config: RunConfig, *, generator: torch.Generator | None = None) -> nn.Module:
    """The module whose forward gives what the objective needs: the model, or one of pre-training around it.

    `encoder_of` finds the model in it again.
    """
    objective = config.objective
    if objective.name == "distillation" and isinstance(model, ViT) and model.config.tokens.distillation:
        return Distilled(model)
    if objective.labelled:
        return model
    if not isinstance(model, ViT):
        raise ConfigError(
            "hiding patches needs a Vision Transformer", expected="a ViT", got="a ResNet", hint="set model.name=B/16"
        )
    if objective.name == "masked":
        return MaskedPatches(model, objective.masked, generator=generator)
    return MaskedAutoencoder(model, objective.autoencoder, generator=generator)


def make_objective(
    config: RunConfig, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None = None
) -> Objective[Any]:
    """What the run descends."""
    objective, about = config.objective, encoder_of(model)
    if objective.name == "masked" and isinstance(about, ViT):
        return MaskedPrediction(objective.masked, about.config)
    if objective.name == "autoencoder" and isinstance(about, ViT):
        return FillingIn(objective.autoencoder, about.config, fed=preprocessing)
    if teacher is not None:
        return Distillation(objective.distillation, supervised=objective, teacher=teacher, fed=preprocessing)
    return Supervised(objective)


def make_trainer(
    config: RunConfig,
    model: nn.Module,
    *,
    preprocessing: Preprocessing,
    classes: int,
    steps: int,
    ranks: Ranks,
    teacher: Teacher | None = None,
) -> Trainer:
    """What makes updates: the model spread over ranks, its optimizer and its average."""
    if config.optimizer.tune == "lora" and config.parallel.mode == "fsdp2":
        raise ConfigError(
            "LoRA's small additions are not sharded", hint="use parallel.mode=ddp with optimizer.tune=lora"
        )
    called = spread(model, config.parallel, ranks)
    learning = trainable(model)
    about = encoder_of(model)
    depth = len(about.blocks if isinstance(about, ViT) else cast("BiT", about).stages)
    state = State(
        parameters=dict(model.named_parameters()),
        optimizer=optimizer(learning, config.optimizer, depth=depth),
        average=None if config.optimizer.average is None else Average.of(learning, config.optimizer.average),
    )
    return Trainer(
        config=config,
        model=called,
        objective=make_objective(config, model, preprocessing=preprocessing, teacher=teacher),
        state=state,
        ranks=ranks,
        preprocessing=preprocessing,
        classes=classes,
        steps=steps,
    )


def finished_weights(trainer: Trainer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that a run ends with, and those of what was around the model to pre-train it; every rank must ask.

    They are the average where there is one, additions merged. The trainer cannot go on afterwards.
    """
    if trainer.state.average:
        trainer.state.average.swap(trainer.state.parameters)
    merge_low_rank(model)
    weights = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    if encoder_of(model) is model:
        return weights, {}
    inside = {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
    return inside, {name: value for name, value in weights.items() if not name.startswith(ENCODER)}


def worker_count(config: RunConfig, ranks: Ranks) -> int:
    """Processes that prepare images for this rank: as asked, or the cores that are left to it, at most eight."""
    if config.data.workers is not None:
        return config.data.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, cores // local_ranks))
