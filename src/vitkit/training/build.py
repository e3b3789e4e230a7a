"""Construction of the model, its preprocessing and its trainer from a run's configuration."""

import os
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from vitkit.core.config import parse_assignments
from vitkit.core.environment import usable_cores
from vitkit.core.errors import ConfigError
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.pretraining import ENCODER_PREFIX, get_encoder
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.objectives.config import get_builder
from vitkit.objectives.teacher import Teacher
from vitkit.training.callbacks import Callback
from vitkit.training.checkpoint import TrainState
from vitkit.training.config import RunConfig
from vitkit.training.distributed import Ranks, gather_full, parallelize
from vitkit.training.optim import EMA, build_optimizer, freeze_parameters, merge_lora, trainable_parameters
from vitkit.training.trainer import Trainer
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.adapt_state import adapt_state
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle, load_stored_bundle
from vitkit.zoo.registry import configure, create, find_variant
from vitkit.zoo.variants import ModelConfig


def resolve_model_config(config: RunConfig, *, num_classes: int, pretrained: ModelBundle | None) -> ModelConfig:
    """Return the model's configuration: that of the name or of the initial weights, with the run's changes."""
    choice = config.model
    source = pretrained.config if pretrained else choice.name
    if source is None:
        raise ConfigError("no model is set", hint="set model.name, such as Ti/16, or model.init")
    if isinstance(source, ViTConfig) and (choice.new_head or num_classes != source.num_classes):
        # Fine-tuning removes the whole pre-training head: its hidden layer and a sigmoid loss's bias too (section 3.2).
        source = replace(source, head=replace(source.head, pre_logits=None, bias=0.0))
    model = configure(
        source,
        image_size=choice.image_size,
        patch_size=choice.patch_size,
        channels=config.data.channels,
        num_classes=num_classes,
        settings=parse_assignments(choice.settings),
    )
    return get_builder(config.objective).configure_model(model)


def resolve_preprocessing(config: RunConfig, model: ModelConfig, pretrained: ModelBundle | None) -> Preprocessing:
    """Return the configured preprocessing, or that of the initial weights, or a squash to the image size."""
    size, channels = model.image_size, config.data.channels
    if config.data.preprocessing is not None:
        return get_preprocessing(config.data.preprocessing, image_size=size, channels=channels)
    if pretrained is not None:
        return replace(pretrained.preprocessing, image_size=size, channels=channels)
    return Preprocessing(image_size=size, channels=channels, mean=(0.5,), std=(0.5,))


def load_pretrained(config: RunConfig, *, callback: Callback) -> ModelBundle:
    """Load the initial weights, adapted to the channels of the run's images."""
    source = config.model.init or ""
    # If positions are resampled anyway, resample them once, from those that were learned.
    pretrained = load_bundle(source) if config.model.image_size is None else load_stored_bundle(source)
    return fit_channels(pretrained, config.data.channels, callback=callback)


def fit_channels(pretrained: ModelBundle, channels: int, *, callback: Callback) -> ModelBundle:
    """Adapt a trained model to another number of channels, and report what changed."""
    if pretrained.config.channels == channels:
        return pretrained
    adapted, changes = adapt_bundle(pretrained, AdaptRequest(channels=channels))
    for change in changes:
        callback.on_message(change)
    return adapted


def load_teacher(config: RunConfig, *, ranks: Ranks, callback: Callback) -> Teacher | None:
    """Load the teacher, if the objective has one, adapted to the channels of the run's images."""
    if (source := get_builder(config.objective).teacher()) is None:
        return None
    bundle = fit_channels(load_bundle(source), config.data.channels, callback=callback)
    parameters = sum(tensor.numel() for tensor in bundle.state.values())
    callback.on_message(f"teacher: {bundle.name}, {parameters:,} parameters")
    model = bundle.build_model().float().to(ranks.device)
    return Teacher(model=model, preprocessing=bundle.preprocessing, labels=bundle.labels)


def model_name(config: RunConfig, model: ModelConfig, pretrained: ModelBundle | None) -> str:
    """Return the name of the model for reports; a changed architecture is marked as such."""
    if pretrained:
        return pretrained.name
    variant = find_variant(config.model.name or "")
    data_dependent = {"image_size", "num_classes", "channels"}
    is_unchanged = all(
        getattr(variant.config, key) == value for key, value in vars(model).items() if key not in data_dependent
    )
    return variant.name if is_unchanged else f"{variant.name} (changed)"


def build_model(
    config: RunConfig, model_config: ModelConfig, *, pretrained: ModelBundle | None, ranks: Ranks, callback: Callback
) -> nn.Module:
    """Build the model with its initial weights, equal on every rank, in the wrapper that the objective needs."""
    generator = torch.Generator().manual_seed(config.seed)
    model = create(model_config, generator=generator)
    if pretrained:
        adapted = adapt_state(
            pretrained.state,
            old=pretrained.config,
            new=model_config,
            new_head=config.model.new_head,
            generator=generator,
        )
        for change in adapted.changes:
            callback.on_message(change)
        model.load_state_dict(adapted.state)
        if config.model.shrink < 1:
            fresh = create(model_config, generator=generator)
            with torch.no_grad():
                for parameter, other in zip(model.parameters(), fresh.parameters(), strict=True):
                    parameter.lerp_(other, 1 - config.model.shrink)
            callback.on_message(f"weights: {config.model.shrink:g} of the initial weights, the rest drawn anew")
    freeze_parameters(model, config.optimizer, generator=generator)
    return get_builder(config.objective).wrap(model, generator=generator).to(ranks.device)


def build_trainer(
    config: RunConfig,
    model: nn.Module,
    *,
    preprocessing: Preprocessing,
    num_classes: int,
    total_steps: int,
    ranks: Ranks,
    teacher: Teacher | None = None,
) -> Trainer:
    """Build the trainer: the parallelized model with objective, optimizer and moving average."""
    if config.optimizer.trainable == "lora" and config.parallel.mode == "fsdp2":
        raise ConfigError(
            "LoRA parameters cannot be sharded", hint="use parallel.mode=ddp with optimizer.trainable=lora"
        )
    parallel_model = parallelize(model, config.parallel, ranks)
    trainable, encoder = trainable_parameters(model), get_encoder(model)
    depth = len(encoder.blocks if isinstance(encoder, ViT) else cast("BiT", encoder).stages)
    ema_decay = config.optimizer.ema_decay
    return Trainer(
        config=config,
        model=parallel_model,
        objective=get_builder(config.objective).build(model, preprocessing=preprocessing, teacher=teacher),
        state=TrainState(
            parameters=dict(model.named_parameters()),
            optimizer=build_optimizer(trainable, config.optimizer, depth=depth),
            ema=None if ema_decay is None else EMA.of(trainable, ema_decay),
            scaler=torch.amp.GradScaler(ranks.device.type) if config.parallel.precision == "fp16" else None,
        ),
        ranks=ranks,
        preprocessing=preprocessing,
        num_classes=num_classes,
        total_steps=total_steps,
    )


def final_weights(trainer: Trainer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the final weights of the model, and of its pre-training wrapper; collective over all ranks.

    These are the moving average if there is one, with LoRA merged. The trainer cannot be used afterwards.
    """
    if trainer.state.ema:
        trainer.state.ema.swap(trainer.state.parameters)
    merge_lora(model)
    weights = {name: gather_full(parameter).clone() for name, parameter in model.named_parameters()}
    if get_encoder(model) is model:
        return weights, {}
    encoder = {
        name.removeprefix(ENCODER_PREFIX): value for name, value in weights.items() if name.startswith(ENCODER_PREFIX)
    }
    return encoder, {name: value for name, value in weights.items() if not name.startswith(ENCODER_PREFIX)}


def resolve_workers(config: RunConfig) -> int:
    """Return the number of loader processes of this rank: as configured, or its part of the cores but one."""
    if config.data.workers is not None:
        return config.data.workers
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, usable_cores() // local_ranks - 1)
