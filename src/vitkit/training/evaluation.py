"""Evaluation during training: accuracy on labels, or the loss of a self-supervised objective with reconstructions."""

from collections.abc import Callable

import torch
from PIL import Image

from vitkit.core.files import atomic_write
from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.loader import BatchLoader, make_evaluation_loader
from vitkit.evaluation.logits import pad_to_equal_batches, sum_metrics
from vitkit.objectives.base import EVALUATION_USE, PerImageRNG, Reconstruction, SelfSupervised
from vitkit.training.loop import Evaluator
from vitkit.training.run_dir import RunContext
from vitkit.training.trainer import Trainer, autocast, autocast_dtype

NUM_RECONSTRUCTIONS = 8
"""Number of images whose reconstructions are drawn at every evaluation."""
TILE_SIZE, GAP = 112, 4
"""Minimal side of an image in the picture of reconstructions, and the gap between images, in pixels."""


def make_evaluator(trainer: Trainer, source: ImageSource, context: RunContext) -> Evaluator:
    """Return the function that evaluates the model on the validation images, divided among the ranks."""
    if not isinstance(trainer.objective, SelfSupervised):
        return make_accuracy_evaluator(trainer, source, workers=context.workers)
    return make_loss_evaluator(trainer, trainer.objective, source, context)


def make_accuracy_evaluator(trainer: Trainer, source: ImageSource, *, workers: int) -> Evaluator:
    """Return a function that measures the loss and the top-1 and top-5 accuracy."""
    config, ranks = trainer.config, trainer.ranks
    _, rounds = plan_batches(trainer, len(source))

    def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
        with open_batches(trainer, source, workers=workers) as batches, trainer.evaluation_mode():
            sums = sum_metrics(
                trainer.model,
                batches,
                preprocessing=trainer.preprocessing,
                device=ranks.device,
                rounds=rounds,
                autocast=autocast_dtype(config),
                stop=stop,
            )
        loss, first, five, count = ranks.all_reduce_sum([sums.loss, sums.top1, sums.top5, sums.count])
        return {"val_loss": loss / count, "val_top1": first / count, "val_top5": five / count}

    return evaluate


def make_loss_evaluator(
    trainer: Trainer, objective: "SelfSupervised[object]", source: ImageSource, context: RunContext
) -> Evaluator:
    """Return a function that measures the objective's loss and metrics, with the same targets at every evaluation.

    The main rank draws the reconstruction of the first images.
    """
    ranks = trainer.ranks

    def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
        with open_batches(trainer, source, workers=context.workers) as batches, trainer.evaluation_mode():
            loss, count, sums = sum_losses(trainer, objective, batches, images=len(source), stop=stop)
            examples = Subset(source, range(min(NUM_RECONSTRUCTIONS, len(source))))
            reconstruction = reconstruct(trainer, objective, examples)
        if ranks.is_main:
            write_reconstructions(reconstruction, context)
        loss, images, *totals = ranks.all_reduce_sum([loss, count, *sums.values()])
        return {"val_loss": loss / images} | {
            f"val_{name}": total / images for name, total in zip(sums, totals, strict=True)
        }

    return evaluate


@torch.no_grad()
def sum_losses(
    trainer: Trainer,
    objective: "SelfSupervised[object]",
    batches: BatchLoader,
    *,
    images: int,
    stop: Callable[[], bool],
) -> tuple[float, int, dict[str, float]]:
    """Return sums over this rank's images: loss, count and metrics; collective over all ranks."""
    batch_size, rounds = plan_batches(trainer, images)
    config, ranks = trainer.config, trainer.ranks
    loss, count, sums = 0.0, 0, dict[str, float]()
    padded = pad_to_equal_batches(batches, rounds=rounds, preprocessing=trainer.preprocessing, stop=stop)
    for index, (batch, counts) in enumerate(padded):
        first = (index * ranks.world_size + ranks.rank) * batch_size
        pixels = batch.pixels.to(ranks.device)
        normalized = trainer.preprocessing.normalize(pixels)
        rng = PerImageRNG(seed=config.seed, use=EVALUATION_USE, first=first)
        targets = objective.make_targets(normalized, pixels, rng=rng)
        with autocast(config, ranks.device):
            output = objective(trainer.model, normalized, targets)
        counted = len(pixels) if counts else 0
        loss += output.loss.item() * counted
        count += counted
        for name, value in output.metrics.items():
            sums[name] = sums.get(name, 0.0) + (value.item() if counted else 0.0)
    return loss, count, sums


@torch.no_grad()
def reconstruct(trainer: Trainer, objective: "SelfSupervised[object]", source: ImageSource) -> Reconstruction:
    """Return the model's reconstruction of the images of a source; collective over all ranks."""
    device, preprocessing = trainer.ranks.device, trainer.preprocessing
    with make_evaluation_loader(source, preprocessing=preprocessing, batch_size=len(source)) as batches:
        pixels = next(batches).pixels.to(device)
    images = preprocessing.normalize(pixels)
    rng = PerImageRNG(seed=trainer.config.seed, use=EVALUATION_USE)
    targets = objective.make_targets(images, pixels, rng=rng)
    with autocast(trainer.config, device):
        return objective.reconstruct(trainer.model, images, pixels, targets)


def plan_batches(trainer: Trainer, images: int) -> tuple[int, int]:
    """Return the batch size of a rank, and the largest number of batches that a rank has."""
    schedule, ranks = trainer.config.schedule, trainer.ranks.world_size
    batch_size = max(1, schedule.batch_size // (ranks * schedule.micro_batches))
    return batch_size, -(-images // (batch_size * ranks))


def open_batches(trainer: Trainer, source: ImageSource, *, workers: int) -> BatchLoader:
    """Open this rank's batches of the validation images."""
    batch_size, _ = plan_batches(trainer, len(source))
    return make_evaluation_loader(
        source,
        preprocessing=trainer.preprocessing,
        batch_size=batch_size,
        rank=trainer.ranks.rank,
        world_size=trainer.ranks.world_size,
        workers=workers,
        device=trainer.ranks.device,
    )


def write_reconstructions(reconstruction: Reconstruction, context: RunContext) -> None:
    """Write the picture of reconstructions. A full disk is a warning and does not end the run."""
    file = context.run_dir.reconstructions
    try:
        with atomic_write(file) as temporary:
            draw_reconstructions(reconstruction).save(temporary, "PNG")
    except OSError as error:
        context.callback.on_warning(f"cannot write {file.name}: {error.strerror or error}")


def draw_reconstructions(reconstruction: Reconstruction) -> Image.Image:
    """Draw one column per image: the image, its visible part, and the prediction; small images are enlarged."""
    rows = (reconstruction.images, reconstruction.visible, reconstruction.predicted)
    height, width = reconstruction.images.shape[2:]
    factor = max(1, -(-TILE_SIZE // max(height, width)))
    tile_height, tile_width = height * factor, width * factor
    size = (len(rows[0]) * (tile_width + GAP) - GAP, len(rows) * (tile_height + GAP) - GAP)
    canvas = Image.new("RGBA", size, (0, 0, 0, 0))
    for row, images in enumerate(rows):
        for column, image in enumerate(to_rgb(images)):
            tile = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).resize(
                (tile_width, tile_height), Image.Resampling.NEAREST
            )
            canvas.paste(tile, (column * (tile_width + GAP), row * (tile_height + GAP)))
    return canvas


def to_rgb(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Convert pixels to uint8 RGB: gray is repeated, and of more than three channels the first three are used."""
    three = images if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    return three[:, :3].round().clamp(0, 255).to(torch.uint8).cpu()
