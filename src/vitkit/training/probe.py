"""Closed-form probe: a ridge classifier on the features of pretrained weights, ready within seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.data.dataset import ImageSource, subsample
from vitkit.data.loader import make_evaluation_loader
from vitkit.evaluation.features import LabeledFeatures, compute_features
from vitkit.evaluation.fewshot import L2_GRID, replace_head, solve_ridge, temperature_scaled
from vitkit.model.config import ViTConfig
from vitkit.training.budget import standard_error
from vitkit.training.data import RunData
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import EMBEDDED
from vitkit.zoo.variants import ModelConfig

EMBEDDED_SIZES = (64, 96, 128)
"""Image sizes to try with the embedded weights."""
SMALL_SIZE = 4 / 7
"""Fraction of the image size of other weights that is tried as well: three times as fast."""
MAX_FLIPPED = 300
"""Number of images that decide whether training may flip images."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A model with a ridge classifier, and its scores on held-out images."""

    bundle: ModelBundle
    top1: float
    loss: float
    all_top1: float
    """Accuracy on all these images: the held-out ones, and leave-one-out on the others."""
    all_error: float
    """Standard error of `all_top1`."""


@dataclass(frozen=True, kw_only=True)
class Prober:
    """Source of probes that are fitted to the training images of a run and evaluated on its held-out images."""

    data: RunData
    workers: int
    device: torch.device
    progress: Callable[[int], None] = lambda images: None

    def features(self, bundle: ModelBundle, source: ImageSource) -> LabeledFeatures:
        """Return the features of all images of a source."""
        features = compute_features(bundle, source, workers=self.workers, device=self.device, progress=self.progress)
        return LabeledFeatures.from_arrays(features, source.labels)

    def held_out(self) -> ImageSource:
        """Return the images that probes are evaluated on."""
        assert self.data.val is not None
        return self.data.val

    def fit(self, bundle: ModelBundle, *, images: int) -> Probe:
        """Fit a probe to at most this many training images."""
        source = self.data.train
        if images < len(source):
            source = subsample(source, fraction=images / len(source), salt="probe ")
        train, held_out = self.features(bundle, source), self.features(bundle, self.held_out())
        num_classes = len(self.data.classes)
        solution = solve_ridge(train.features, train.targets, num_classes=num_classes)
        choices = [solution.leave_one_out_logits(train.features, train.targets, l2=l2) for l2 in L2_GRID]
        scores = [accuracy(logits, train.targets) for logits in choices]
        error = standard_error(max(scores), images=len(source))
        # The strongest penalty that is as good: small weights, which training does not destroy in its first steps.
        chosen = max(index for index, score in enumerate(scores) if score >= max(scores) - 0.5 * error)
        # A few images may all be recognized by chance: the smoothing leaves each some probability of another class.
        head = temperature_scaled(
            solution.head(L2_GRID[chosen]), choices[chosen], train.targets, smoothing=1 / (len(source) + 2)
        )
        logits = head(held_out.features)
        top1, count = accuracy(logits, held_out.targets), len(source) + len(held_out.targets)
        all_top1 = (scores[chosen] * len(source) + top1 * len(held_out.targets)) / count
        return Probe(
            bundle=replace_head(bundle, head, labels=self.data.classes, preprocessing=bundle.preprocessing),
            top1=top1,
            loss=float(functional.cross_entropy(logits, held_out.targets)),
            all_top1=all_top1,
            all_error=standard_error(all_top1, images=count),
        )

    @torch.no_grad()
    def recognizes_flipped_images(self, probe: Probe) -> bool:
        """Return whether flipped images are recognized as well, so that training may flip them."""
        source = self.held_out()
        if len(source) > MAX_FLIPPED:
            source = subsample(source, fraction=MAX_FLIPPED / len(source), salt="mirror ")
        model, preprocessing = probe.bundle.build_model().to(self.device), probe.bundle.preprocessing
        batches = make_evaluation_loader(
            source, preprocessing=preprocessing, batch_size=64, workers=self.workers, device=self.device
        )
        correct = np.zeros(2)
        targets, done = torch.tensor(np.asarray(source.labels)), 0
        with batches:
            for batch in batches:
                pixels = preprocessing.normalize(batch.pixels.to(self.device))
                expected = targets[done : done + len(pixels)]
                done += len(pixels)
                for index, images in enumerate((pixels, pixels.flip(-1))):
                    correct[index] += float((model(images).argmax(dim=1).cpu() == expected).sum())
        original, flipped = correct / max(done, 1)
        return bool(flipped >= original - max(0.05, 2 * np.sqrt(0.25 / max(done, 1)) * 0.7))


def accuracy(logits: Float[Tensor, "N Y"], targets: Tensor) -> float:
    """Return the fraction of correct predictions."""
    return float((logits.argmax(dim=1) == targets).double().mean())


def resize_bundle(bundle: ModelBundle, size: int) -> ModelBundle:
    """Return the weights for another image size."""
    if bundle.config.image_size == size:
        return bundle
    resized = adapt_bundle(bundle, AdaptRequest(image_size=size))[0]
    return replace(resized, preprocessing=replace(bundle.preprocessing, image_size=size))


def choose_probe(fitted: Sequence[tuple[str, Probe]]) -> tuple[str, Probe]:
    """Return the first probe whose accuracy is within a standard error of the best: earlier ones train faster."""
    best = max((probe for _, probe in fitted), key=lambda probe: probe.all_top1)
    return next(each for each in fitted if each[1].all_top1 >= best.all_top1 - best.all_error)


def probe_sizes(source: str, model: ModelConfig, image_size: Size | None) -> tuple[int, ...]:
    """Return the image sizes to try: those of the settings, of the embedded weights, or two of other weights."""
    if image_size is not None:
        return (max(pair(image_size)),)
    if source == EMBEDDED:
        return EMBEDDED_SIZES
    native = max(pair(model.image_size))
    if not isinstance(model, ViTConfig) or model.backbone is not None:
        return (native,)
    patch = max(pair(model.patch_size))
    small = max(patch, round(SMALL_SIZE * native / patch) * patch)
    return (native,) if small == native else (small, native)
