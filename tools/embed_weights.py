"""Write the weights of a finished run into the package as its embedded weights, in 16 bits.

    python tools/embed_weights.py RUN --names tiny-imagenet-200/words.txt --hours 1.1 --accuracy TEXT

The model is stored for images of 64 pixels.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from vitkit.core.files import write_text
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.artifact import FILES, MODEL_CARD, write_artifact, write_checksums
from vitkit.weights.load import load_bundle

IMAGE_SIZE = 64
EMBEDDED = Path(__file__).parent.parent / "src" / "vitkit" / "weights" / "embedded"
CARD = """---
library_name: vitkit
license: apache-2.0
pipeline_tag: image-classification
datasets:
- tiny-imagenet
---

# Embedded weights of vitkit

A hybrid Vision Transformer with {parameters:,} parameters, to fine-tune where no larger weights can be downloaded:
three 3×3 convolutions with residual units, then 7 blocks of width 192 on one token for 8 × 8 pixels. It takes images
of 64 to 160 pixels.

| | |
|---|---|
| images | Tiny-ImageNet, 64 pixels, 180 of its 200 classes, 90,000 training images |
| teacher | features of TinyViT-5M (MIT license, pre-trained on ImageNet-22k) for the whole image |
| training | recipes `embedded` and `embedded-continue`; core hours so far: {hours:g} |
| accuracy | {accuracy} |

## Terms

The weights are under the Apache-2.0 license. **Tiny-ImageNet's images come under terms for non-commercial research**,
as do those of ImageNet. If that matters for your use, train from scratch or from other weights.

## Limits

The model is small and has seen photos of 64 pixels only. It is bad at fine details, text, medical or aerial images, and
at anything that does not fill a good part of the photo. Its own 180 labels are those of Tiny-ImageNet and hardly useful
by themselves. Larger weights, such as `timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k`, give better classifiers.

## Reproduce

```sh
python tools/tiny_imagenet.py tiny-imagenet-200 tiny
python tools/teacher_targets.py tiny/learn --teacher tiny_vit_5m_22k.onnx --out targets
vitkit train embedded --out runs/embedded data=tiny/learn objective.feature_distillation.targets=targets
vitkit finetune runs/embedded tiny/learn --recipe embedded-continue --out runs/embedded-2 \\
    objective.feature_distillation.targets=targets
python tools/embed_weights.py runs/embedded-2 --names tiny-imagenet-200/words.txt --hours HOURS --accuracy TEXT
```

The stages so far had fewer steps than the recipes: `docs/experiments.md` has the settings of each.
"""


def main() -> None:
    """Write the artifact and its model card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="finished run of the recipe")
    parser.add_argument("--names", type=Path, required=True, help="words.txt: WordNet ids with their names")
    parser.add_argument("--hours", type=float, required=True, help="hours of training on one core, all stages")
    parser.add_argument("--accuracy", required=True, help="measured accuracy, for the model card")
    arguments = parser.parse_args()
    words = dict(line.split("\t") for line in arguments.names.read_text().splitlines())
    bundle, _ = adapt_bundle(load_bundle(arguments.run), AdaptRequest(image_size=IMAGE_SIZE))
    bundle = replace(
        bundle,
        name="embedded",
        labels=tuple(words[label].split(",")[0] for label in bundle.labels),
        state={name: tensor.to(torch.float16) for name, tensor in bundle.state.items()},
    )
    write_artifact(EMBEDDED, bundle)
    parameters = sum(tensor.numel() for tensor in bundle.state.values())
    card = CARD.format(parameters=parameters, hours=arguments.hours, accuracy=arguments.accuracy)
    write_text(EMBEDDED / MODEL_CARD, card)
    write_checksums(EMBEDDED, (*FILES, MODEL_CARD))
    print(f"{sum(path.stat().st_size for path in EMBEDDED.iterdir()):,} bytes in {EMBEDDED}")


if __name__ == "__main__":
    main()
