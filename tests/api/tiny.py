"""Tiny models and images for tests of public functions."""

import numpy as np
import torch

import vitkit

SETTINGS = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 16}
CLASSES = ("cat", "dog", "owl")


def make_model(labels: tuple[str, ...] = CLASSES, seed: int = 0) -> vitkit.ViT:
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, num_classes=len(labels), settings=SETTINGS)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    model.labels = labels
    return model.eval()


def make_pairs(each: int = 4, classes: tuple[str, ...] = CLASSES, seed: int = 0) -> list[tuple[np.ndarray, str]]:
    rng = np.random.default_rng(seed)
    pairs = []
    for number, label in enumerate(classes):
        for _ in range(each):
            pixels = rng.integers(0, 120, (20, 20, 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            pairs.append((pixels, label))
    return pairs
