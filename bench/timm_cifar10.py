"""timm's ViT of the size of cifar10-small's, trained on CIFAR-10 by the defaults of timm's training script.

python bench/timm_cifar10.py CIFAR10 --epochs 15 --out runs/timm-cifar10.jsonl

The defaults are those of timm 1.0: SGD with momentum 0.9 and weight decay 2e-5; 0.1 · batch/256 for a learning rate,
five epochs of warm-up and a cosine to zero, set once an epoch; crops of 8 to 100 % of the area, mirroring, color
jitter of 0.4; label smoothing of 0.1; no clipping. Only the number of epochs is chosen, to fill the time.
"""

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from peers import import_peer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.layouts.registry import open_dataset
from vitkit.model.config import ViTConfig
from vitkit.recipes.small import cifar10_small
from vitkit.training.build import resolve_model_config

SIZE, BATCH, LR, WARM_UP = 32, 128, 0.1 * 128 / 256, 5


class Examples(Dataset[tuple[Tensor, int]]):
    """Images of a source, transformed by timm."""

    def __init__(self, source: ImageSource, transform: Any) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = decode(self.source.read(index), channels=3)
        image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
        return self.transform(image), int(self.source.labels[index])


def make_model() -> nn.Module:
    """Build timm's ViT with its defaults and the size of cifar10-small."""
    ours = resolve_model_config(cifar10_small(), num_classes=10, pretrained=None)
    if not isinstance(ours, ViTConfig):
        raise TypeError("cifar10-small is not a ViT")
    return import_peer("timm").models.VisionTransformer(
        img_size=SIZE,
        patch_size=SIZE // ours.grid[0],
        embed_dim=ours.width,
        depth=ours.depth,
        num_heads=ours.heads,
        mlp_ratio=ours.mlp_dim / ours.width,
        num_classes=10,
    )


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the top-1 accuracy on the test images."""
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    model.train()
    return right / len(loader.dataset)  # type: ignore[arg-type]


@click.command()
@click.argument("cifar10")
@click.option("--epochs", default=15, show_default=True)
@click.option("--out", type=Path, required=True, help="File to which each epoch appends a line of JSON.")
@click.option("--workers", default=2, show_default=True)
@click.option("--limit", type=int, help="Use this many training images only, to try the script.")
def main(cifar10: str, epochs: int, out: Path, workers: int, limit: int | None) -> None:
    """Train, and write the accuracy and the seconds of training after each epoch."""
    torch.manual_seed(42)
    data = open_dataset(cifar10)
    settings = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    train = import_peer("timm.data").create_transform(
        **settings, is_training=True, color_jitter=0.4, interpolation="random"
    )
    test = import_peer("timm.data").create_transform(
        **settings, is_training=False, interpolation="bicubic", crop_pct=0.9
    )
    examples = Examples(data.splits["train"], train)
    chosen = torch.utils.data.Subset(examples, range(limit or len(examples)))
    loader = DataLoader(
        chosen, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    test_loader = DataLoader(Examples(data.splits["test"], test), 250)
    model = make_model()
    optimizer = import_peer("timm.optim").create_optimizer_v2(model, opt="sgd", lr=LR, momentum=0.9, weight_decay=2e-5)
    schedule = import_peer("timm.scheduler").CosineLRScheduler(
        optimizer, t_initial=epochs, warmup_t=min(WARM_UP, epochs - 1), warmup_lr_init=1e-5, warmup_prefix=False
    )
    objective = import_peer("timm.loss").LabelSmoothingCrossEntropy(smoothing=0.1)
    seconds = 0.0
    for epoch in range(epochs):
        schedule.step(epoch)
        total, start = 0.0, time.perf_counter()
        for images, labels in loader:
            loss = objective(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds += time.perf_counter() - start
        row = {
            "epoch": epoch + 1,
            "lr": optimizer.param_groups[0]["lr"],
            "loss": total / len(loader),
            "top1": accuracy(model, test_loader),
            "seconds": round(seconds, 1),
            "images_per_second": round((epoch + 1) * len(loader) * BATCH / seconds, 1),
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
