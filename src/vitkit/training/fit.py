"""Settings that fit a run to its devices: precision, TF32, the micro-batch, and what to do if memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import torch

from vitkit.core.errors import TrainingError
from vitkit.core.formatting import format_bytes, format_plural
from vitkit.inference.engine import TRAINING_DTYPES, TrainingPrecision, choose_training_precision
from vitkit.model.config import ViTConfig
from vitkit.training.config import RunConfig
from vitkit.training.distributed import Ranks, run_on_main
from vitkit.training.run_dir import RunDir
from vitkit.zoo.cost import count_activation_bytes, count_parameters
from vitkit.zoo.variants import ModelConfig

USABLE_FRACTION = 0.9
"""Fraction of the free memory of a GPU that a run plans to use; the rest is for workspaces and fragmentation."""


def resolve_precision(config: RunConfig, run_dir: RunDir, ranks: Ranks) -> RunConfig:
    """Replace `auto` by the precision and accumulation that the run began with, or by the precision of its device.

    The main rank decides, so that all ranks compute alike.
    """
    parallel, schedule, names = config.parallel, config.schedule, get_args(TrainingPrecision)

    def decide(_: object) -> tuple[int, int]:
        stored = run_dir.read_config() if run_dir.config.exists() else config
        precision, accumulate = parallel.precision, schedule.accumulate
        if precision == "auto":
            precision = stored.parallel.precision
        if precision == "auto":
            precision = choose_training_precision(ranks.device)
        if accumulate == "auto" and schedule.batch_size % (ranks.world_size * stored.schedule.micro_batches) == 0:
            accumulate = stored.schedule.accumulate
        return names.index(precision), 0 if accumulate == "auto" else accumulate

    index, accumulate = map(ranks.broadcast_int, run_on_main(ranks, decide) or (0, 0))
    return replace(
        config,
        parallel=replace(parallel, precision=names[index]),
        schedule=replace(schedule, accumulate=accumulate or "auto"),
    )


def resolve_accumulate(config: RunConfig, model: ModelConfig, ranks: Ranks) -> tuple[RunConfig, str | None]:
    """Replace `auto` by the fewest micro-batches that fit into the free memory of a GPU, or 1; return the reason too.

    The memory of weights, gradients and optimizer is counted, and what autograd saves for each image.
    """
    schedule = config.schedule
    if schedule.accumulate != "auto":
        return config, None
    accumulate, reason = 1, None
    if ranks.device.type == "cuda":
        images = schedule.batch_size // ranks.world_size
        free = int(torch.cuda.mem_get_info(ranks.device)[0] * USABLE_FRACTION)
        fixed, per_image = estimate_memory(config, model, world_size=ranks.world_size)
        divisors = [parts for parts in range(1, images + 1) if images % parts == 0]
        fitting = (parts for parts in divisors if fixed + images // parts * per_image <= free)
        accumulate = ranks.broadcast_int(next(fitting, images))
        need = format_bytes(fixed + images // accumulate * per_image)
        if accumulate > 1:
            reason = (
                f"accumulate={accumulate}: {images // accumulate} images at a time need about {need} "
                f"of {format_bytes(free)} of GPU memory"
            )
    return replace(config, schedule=replace(schedule, accumulate=accumulate)), reason


def estimate_memory(config: RunConfig, model: ModelConfig, *, world_size: int = 1) -> tuple[int, int]:
    """Return the bytes that training needs on each rank: independent of the batch, and for each image."""
    copies = 4 + (config.optimizer.ema_decay is not None)  # weights, gradients, Adam's two moments, moving average
    dtype = TRAINING_DTYPES[config.parallel.precision]
    fixed = 4 * copies * count_parameters(model) // (world_size if config.parallel.mode == "fsdp2" else 1)
    if dtype is not None:
        fixed += 2 * count_parameters(model)  # autocast keeps the weights in half precision during a step
    if config.optimizer.trainable == "head":
        return fixed, 0
    per_image = count_activation_bytes(model, is_half=dtype is not None)
    if config.parallel.activation_checkpointing and isinstance(model, ViTConfig):
        # The input of every block is kept, and everything of the one block that is computed again.
        inputs = 4 * model.depth * model.width * (model.prefix + model.patches)
        per_image = min(per_image, inputs + per_image // model.depth)
    return fixed, per_image


@contextmanager
def tf32_products(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Compute what autocast leaves in fp32 with TF32 on a GPU; `precision=fp32` stays exact."""
    if ranks.device.type != "cuda" or config.parallel.precision == "fp32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def explain_out_of_memory(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Turn an out-of-memory error of torch into one that names the settings that need less."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        parts = config.schedule.micro_batches
        images = config.schedule.batch_size // (ranks.world_size * parts)
        options = [f"schedule.accumulate={2 * parts} (half as many images at a time)"] if images > 1 else []
        if not config.parallel.activation_checkpointing:
            options.append("parallel.activation_checkpointing=true")
        options.append("a smaller image_size or model")
        count = format_plural(images, "image")
        message = f"out of memory on {ranks.device} with {count} at a time"
        raise TrainingError(message, hint=f"run again with {', or '.join(options)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: torch has a class for GPUs, but only a message for CPUs."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
