"""Published weights: source, model, preprocessing and score.

Scores are top-1 accuracies on ImageNet's validation set as published for the weights, measured with the preprocessing
of the entry. They come from the README files of google-research/vision_transformer, facebookresearch/deit and
facebookresearch/mae, from timm's results-imagenet.csv and from torchvision's table of weights. DeiT on the hub has the
scores of the files it was converted from.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal

from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.core.result import select
from vitkit.zoo.registry import configure, find_variant, get_model_name, parse_image_size
from vitkit.zoo.variants import ModelConfig

if TYPE_CHECKING:
    from vitkit.data.preprocessing import Preprocessing

IMAGENET_21K = 21_843
"""Number of classes of ImageNet-21k in Google's files."""
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class PretrainedWeights:
    """A published weight file or repository.

    Attributes:
        source: `hub:` name or URL.
        model: Variant whose dimensions the model has, before `settings`.
        format: Weight format, or None if vitkit cannot read the file.
        num_classes: Outputs of the classifier, 0 without one.
        origin: Preprocessing preset, which `crop_fraction`, `interpolation` and `input_size` modify.
        top1: Published accuracy (0 to 1), or None.
        settings: Differences from the variant, by dotted keys.
    """

    source: str
    model: str
    format: str | None
    origin: str
    _: KW_ONLY
    image_size: int = 224
    num_classes: int = 1000
    top1: float | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    crop_fraction: float | None = None
    interpolation: Interpolation | None = None
    input_size: int | None = None

    @property
    def config(self) -> ModelConfig:
        """Dimensions of the model. Its GELU, LayerNorm eps and position interpolation come from the format."""
        config = configure(self.model, num_classes=self.num_classes, settings=self.settings)
        return configure(config, image_size=self.image_size)  # last, because `settings` may change the patch size

    @property
    def preprocessing(self) -> "Preprocessing":
        """Preprocessing of the publisher."""
        from vitkit.data.preprocessing import get_preprocessing

        preset = get_preprocessing(self.origin, image_size=self.input_size or self.image_size)
        crop_fraction = preset.crop_fraction if self.crop_fraction is None else self.crop_fraction
        return replace(preset, crop_fraction=crop_fraction, interpolation=self.interpolation or preset.interpolation)

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit models --pretrained --json` prints."""
        names = ("format", "image_size", "num_classes", "origin", "preprocessing", "top1")
        return {"source": self.source, "model": get_model_name(self.config)} | select(self, *names)


def find_pretrained(pattern: str = "*") -> tuple[PretrainedWeights, ...]:
    """Return the published weights whose source, model or format matches a wildcard pattern, in any case.

    The source matches with or without `hub:` and owner.

    >>> [weights.source for weights in find_pretrained("google/vit-base-patch16-384")]
    ['hub:google/vit-base-patch16-384']
    >>> {weights.model for weights in find_pretrained("*mae*")} == {"B/16", "L/16", "H/14"}
    True
    """
    key = pattern.lower()
    matches = tuple(row for row in PRETRAINED if any(fnmatchcase(name.lower(), key) for name in _names(row)))
    if not matches:
        hint = did_you_mean(pattern, [row.source.removeprefix("hub:") for row in PRETRAINED])
        hint = hint or "vitkit models --pretrained lists all of them"
        raise UnknownNameError(f"no pretrained weights match {pattern}", hint=hint)
    return matches


@cache
def get_pretrained_names() -> dict[str, PretrainedWeights]:
    """Return the weights of every name that can be loaded: of models, of timm and on the hub.

    A name that several weights share stands for timm's default: pre-trained on ImageNet-21k and fine-tuned if possible.
    """
    on_hub = [row for row in PRETRAINED if row.source.startswith("hub:") and row.format]
    timm = {row.source.removeprefix("hub:timm/"): row for row in on_hub if row.format == "timm"}
    names: dict[str, PretrainedWeights] = {}
    for row in timm.values():
        names.setdefault(row.model, row)
    for name, row in timm.items():
        names.setdefault(name.partition(".")[0], row)
    return names | timm | {row.source.removeprefix("hub:"): row for row in on_hub}


def find_pretrained_name(name: str) -> PretrainedWeights | None:
    """Return the weights that a name stands for, in any case, or None.

    >>> find_pretrained_name("b/16").source
    'hub:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k'
    """
    return next((row for each, row in get_pretrained_names().items() if each.lower() == name.lower()), None)


def find_pretrained_names(pattern: str = "*") -> dict[str, PretrainedWeights]:
    """Return the names that match a wildcard pattern, else those of weights whose format matches it.

    >>> list(find_pretrained_names("ti/*"))
    ['Ti/16']
    """
    names, matches = get_pretrained_names(), find_pretrained(pattern)
    by_name = {name: row for name, row in names.items() if fnmatchcase(name.lower(), pattern.lower())}
    return by_name or {name: row for name, row in names.items() if row in matches}


def find_pretrained_file(name: str, *, format: str) -> PretrainedWeights | None:  # noqa: A002  the field's name
    """Return the published weights with this file name and format, if there are any.

    >>> find_pretrained_file("vit_b_16_swag-9ac1b537.pth", format="torchvision").image_size
    384
    """
    files = (row for row in PRETRAINED if row.format == format and not row.source.startswith("hub:"))
    return next((row for row in files if row.source.endswith(f"/{name}")), None)


def _names(row: PretrainedWeights) -> tuple[str, ...]:
    repository = row.source.removeprefix("hub:")
    file = repository.rpartition("/")[2]
    return row.source, repository, file, file.partition(".")[0], row.model, row.format or ""


# Google's files


def _google(name: str, model: str, *, image_size: int = 224, num_classes: int = 1000) -> PretrainedWeights:
    source = f"gs://vit_models/{name}.npz"
    return PretrainedWeights(source, model, "google", "paper", image_size=image_size, num_classes=num_classes)


def _file(model: str) -> str:
    return find_variant(model).aliases[0]  # the name in the released code, such as ViT-B_16


def _pre_logits(model: str) -> dict[str, object]:
    """Return the settings of the pre-training head, whose hidden layer is as wide as the model."""
    return {"head.pre_logits": find_variant(model).config.width}


def _original_21k(model: str) -> PretrainedWeights:
    """Return weights of ImageNet-21k: with the pre-logits layer, which fine-tuning removes, and a zero classifier."""
    row = _google(f"imagenet21k/{_file(model)}", model, num_classes=IMAGENET_21K)
    return replace(row, settings=_pre_logits(model))


def _augreg(
    model: str, data: str, run: str, rate: str, sizes: tuple[int, ...], *, pretrained: bool = False
) -> list[PretrainedWeights]:
    """Return weights fine-tuned at each of the sizes, and with `pretrained` those before fine-tuning first."""
    path = f"augreg/{model.translate(_SEPARATORS)}-{data}-300ep-lr_0.001-{run}"
    tuned = [_google(f"{path}--imagenet2012-steps_20k-lr_{rate}-res_{size}", model, image_size=size) for size in sizes]
    return [*([_google(path, model, num_classes=IMAGENET_21K)] if pretrained else []), *tuned]


def _bit(name: str, *, num_classes: int, image_size: int = 224) -> PretrainedWeights:
    source, model = f"gs://bit_models/{name}.npz", f"BiT-{name.split('-')[2]}"
    return PretrainedWeights(source, model, "bit", "bit", image_size=image_size, num_classes=num_classes)


_SEPARATORS = str.maketrans("/+", "__")
_BOTH = (224, 384)
_TUNED = "imagenet21k+imagenet2012"
_GOOGLE = (
    *(_original_21k(model) for model in ("B/16", "B/32", "L/16", "L/32", "H/14", "R50+B/16")),
    replace(_google(f"{_TUNED}/ViT-B_16-224", "B/16"), top1=0.812),
    replace(_google(f"{_TUNED}/ViT-L_16-224", "L/16"), top1=0.827),
    *(
        _google(f"{_TUNED}/{_file(name)}", name, image_size=384)
        for name in ("B/16", "B/32", "L/16", "L/32", "R50+B/16")
    ),
    *_augreg("Ti/16", "i21k", "aug_none-wd_0.03-do_0.0-sd_0.0", "0.03", _BOTH, pretrained=True),
    *_augreg("S/32", "i21k", "aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03", _BOTH, pretrained=True),
    *_augreg("S/16", "i21k", "aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03", _BOTH, pretrained=True),
    *_augreg("B/32", "i21k", "aug_medium1-wd_0.03-do_0.0-sd_0.0", "0.03", (224,), pretrained=True),
    *_augreg("B/32", "i21k", "aug_light1-wd_0.1-do_0.0-sd_0.0", "0.03", (384,)),
    *_augreg("B/16", "i21k", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.01", _BOTH, pretrained=True),
    *_augreg("B/8", "i21k", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.01", (224,), pretrained=True),
    *_augreg("L/16", "i21k", "aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01", _BOTH, pretrained=True),
    *_augreg("R+Ti/16", "i21k", "aug_none-wd_0.03-do_0.0-sd_0.0", "0.03", _BOTH, pretrained=True),
    *_augreg("R26+S/32", "i21k", "aug_medium2-wd_0.03-do_0.0-sd_0.0", "0.03", (384,), pretrained=True),
    *_augreg("R26+S/32", "i21k", "aug_light0-wd_0.03-do_0.1-sd_0.1", "0.03", (224,)),
    *_augreg("R50+L/32", "i21k", "aug_medium2-wd_0.1-do_0.0-sd_0.0", "0.01", (384,), pretrained=True),
    *_augreg("R50+L/32", "i21k", "aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01", (224,)),
    *_augreg("S/16", "i1k", "aug_medium2-wd_0.1-do_0.0-sd_0.0", "0.01", _BOTH),
    *_augreg("B/32", "i1k", "aug_medium2-wd_0.1-do_0.1-sd_0.1", "0.01", _BOTH),
    *_augreg("B/16", "i1k", "aug_strong2-wd_0.1-do_0.1-sd_0.1", "0.01", _BOTH),
    *(_google(f"sam/{_file(model)}", model) for model in ("B/32", "B/16")),
    *(_bit(f"BiT-M-{name}", num_classes=IMAGENET_21K) for name in ("R50x1", "R101x1", "R152x2")),
    *(_bit(f"BiT-M-{name}-ILSVRC2012", num_classes=1000, image_size=448) for name in ("R50x1", "R101x1", "R152x2")),
    *(_bit(f"BiT-S-{name}", num_classes=1000) for name in ("R50x1", "R101x1")),
)


# timm on the hub


def _timm(name: str, top1: float | None = None) -> PretrainedWeights:
    """Return the weights of a timm name; architecture and tag give model, image size and number of classes."""
    architecture, _, tag = name.partition(".")
    variant, image_size = find_variant(architecture), parse_image_size(architecture)
    num_classes = 0 if tag == "orig_in21k" else IMAGENET_21K if tag.endswith("in21k") else 1000
    row = PretrainedWeights(f"hub:timm/{name}", variant.name, "timm", "timm_augreg", image_size=image_size)
    row = replace(row, num_classes=num_classes, top1=top1)
    if variant.kind != "resnet":
        return row
    size, crop_fraction = (448, 1.0) if tag.endswith("in1k") else (row.image_size, 0.875)
    return replace(row, image_size=size, crop_fraction=crop_fraction, interpolation="bilinear")


_TIMM_SCORES = """
    vit_tiny_patch16_224.augreg_in21k_ft_in1k 0.75454 vit_tiny_patch16_384.augreg_in21k_ft_in1k 0.78424
    vit_small_patch32_224.augreg_in21k_ft_in1k 0.75994 vit_small_patch32_384.augreg_in21k_ft_in1k 0.80486
    vit_small_patch16_224.augreg_in21k_ft_in1k 0.81384 vit_small_patch16_384.augreg_in21k_ft_in1k 0.83802
    vit_base_patch32_224.augreg_in21k_ft_in1k 0.80716 vit_base_patch32_384.augreg_in21k_ft_in1k 0.8335
    vit_base_patch16_224.augreg2_in21k_ft_in1k 0.85096 vit_base_patch16_224.augreg_in21k_ft_in1k 0.84532
    vit_base_patch16_384.augreg_in21k_ft_in1k 0.85996 vit_base_patch8_224.augreg2_in21k_ft_in1k 0.86218
    vit_base_patch8_224.augreg_in21k_ft_in1k 0.85798 vit_large_patch16_224.augreg_in21k_ft_in1k 0.85834
    vit_large_patch16_384.augreg_in21k_ft_in1k 0.87084 vit_base_patch16_224.orig_in21k_ft_in1k 0.81786
    vit_base_patch16_384.orig_in21k_ft_in1k 0.842 vit_large_patch32_384.orig_in21k_ft_in1k 0.8151
    vit_small_patch16_224.augreg_in1k 0.78846 vit_small_patch16_384.augreg_in1k 0.81116
    vit_base_patch32_224.augreg_in1k 0.74894 vit_base_patch32_384.augreg_in1k 0.78752
    vit_base_patch16_224.augreg_in1k 0.79154 vit_base_patch16_384.augreg_in1k 0.81102
    vit_base_patch32_224.sam_in1k 0.73694 vit_base_patch16_224.sam_in1k 0.80244
    vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k 0.71798 vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k 0.75962
    vit_small_r26_s32_224.augreg_in21k_ft_in1k 0.81864 vit_small_r26_s32_384.augreg_in21k_ft_in1k 0.84048
    vit_base_r50_s16_384.orig_in21k_ft_in1k 0.84976 vit_large_r50_s32_224.augreg_in21k_ft_in1k 0.84422
    vit_large_r50_s32_384.augreg_in21k_ft_in1k 0.86182 resnetv2_50x1_bit.goog_in21k_ft_in1k 0.8034
    resnetv2_101x1_bit.goog_in21k_ft_in1k 0.82342 resnetv2_152x2_bit.goog_in21k_ft_in1k 0.8451
"""
_TIMM_PRETRAINED = """
    vit_base_patch32_224.orig_in21k vit_base_patch16_224.orig_in21k vit_large_patch32_224.orig_in21k
    vit_large_patch16_224.orig_in21k vit_huge_patch14_224.orig_in21k vit_tiny_patch16_224.augreg_in21k
    vit_small_patch32_224.augreg_in21k vit_small_patch16_224.augreg_in21k vit_base_patch32_224.augreg_in21k
    vit_base_patch16_224.augreg_in21k vit_base_patch8_224.augreg_in21k vit_large_patch16_224.augreg_in21k
    vit_tiny_r_s16_p8_224.augreg_in21k vit_small_r26_s32_224.augreg_in21k vit_base_r50_s16_224.orig_in21k
    vit_large_r50_s32_224.augreg_in21k resnetv2_50x1_bit.goog_in21k resnetv2_101x1_bit.goog_in21k
    resnetv2_152x2_bit.goog_in21k
"""
_SCORED = _TIMM_SCORES.split()
_TIMM = (
    *(_timm(name, float(top1)) for name, top1 in zip(_SCORED[::2], _SCORED[1::2], strict=True)),
    *map(_timm, _TIMM_PRETRAINED.split()),
)


# Hugging Face, Facebook and Meta

_VIT, _DEIT, _MAE, _DINOV2 = "huggingface", "huggingface-deit", "huggingface-mae", "huggingface-dinov2"
# Mean pooling before the last norm, in a model that keeps its class token.
_AVERAGED = {"pooling": "mean", "tokens.class_token": True, "head.norm": "after_pooling"}
_GIANT: dict[str, object] = {"width": 1536, "depth": 40, "heads": 24, "mlp_dim": 4096, "block.activation": "swiglu"}
_DINOV2_MODELS = {"small": "S/16", "base": "B/16", "large": "L/16", "giant": "H/14"}


def _dinov2(size: str, *, registers: bool) -> tuple[PretrainedWeights, ...]:
    """Return the repository on the hub and Meta's file: positions for 518 pixels, evaluated at 224."""
    model, letter, sizes = _DINOV2_MODELS[size], size[0], _GIANT if size == "giant" else {"patch_size": 14}
    settings = sizes | {"block.layer_scale": 1.0} | ({"tokens.registers": 4} if registers else {})
    hub = f"hub:facebook/dinov2-{'with-registers-' if registers else ''}{size}"
    folder = f"https://dl.fbaipublicfiles.com/dinov2/dinov2_vit{letter}14"
    file = f"{folder}/dinov2_vit{letter}14_{'reg4_' if registers else ''}pretrain.pth"
    rows = ((hub, _DINOV2, "huggingface_dinov2"), (file, "dinov2", "dinov2"))
    return tuple(
        PretrainedWeights(source, model, form, origin, image_size=518, input_size=224, num_classes=0, settings=settings)
        for source, form, origin in rows
    )


def _dinov3(file: str, model: str, *, origin: str = "dinov3") -> PretrainedWeights:
    """Return Meta's file, available after registration; rotary positions fit any image size."""
    settings = {"positions.kind": "rotary", "tokens.registers": 4, "block.layer_scale": 1.0}
    source = f"https://dinov3.llamameta.net/{file.partition('_pretrain')[0]}/{file}"
    return PretrainedWeights(source, model, "dinov3", origin, num_classes=0, settings=settings)


def _deit(name: str, digest: str, model: str, top1: float) -> tuple[PretrainedWeights, ...]:
    """Return the repository on the hub, where a DeiT without distillation token is a ViT, and Facebook's file."""
    distilled, image_size = "distilled" in name, int(name[-3:])
    settings = {"tokens.distillation": True} if distilled else {}
    file = f"https://dl.fbaipublicfiles.com/deit/deit_{name.replace('-', '_')}-{digest}.pth"
    hub = (f"hub:facebook/deit-{name}", _DEIT if distilled else _VIT, "huggingface_deit")
    return tuple(
        PretrainedWeights(source, model, form, origin, image_size=image_size, top1=top1, settings=settings)
        for source, form, origin in (hub, (file, "deit", "deit"))
    )


def _mae(size: str, model: str, top1: float) -> tuple[PretrainedWeights, ...]:
    folder = "https://dl.fbaipublicfiles.com/mae"
    tuned = f"{folder}/finetune/mae_finetuned_vit_{size}.pth"
    return (
        PretrainedWeights(f"hub:facebook/vit-mae-{size}", model, _MAE, "huggingface_mae", num_classes=0),
        PretrainedWeights(f"{folder}/pretrain/mae_pretrain_vit_{size}.pth", model, "mae", "mae", num_classes=0),
        PretrainedWeights(tuned, model, "mae", "mae", top1=top1, settings=_AVERAGED),
    )


def _google_hub(name: str) -> PretrainedWeights:
    """Return a ViT of Google's. Those of ImageNet-21k have no classifier; their pooler is the pre-logits layer."""
    model, image_size = find_variant(f"google/{name}").name, parse_image_size(name)
    row = PretrainedWeights(f"hub:google/{name}", model, _VIT, "huggingface", image_size=image_size)
    return replace(row, num_classes=0, settings=_pre_logits(model)) if name.endswith("-in21k") else row


_GOOGLE_HUB = """
    vit-base-patch16-224 vit-base-patch16-384 vit-base-patch32-384
    vit-large-patch16-224 vit-large-patch16-384 vit-large-patch32-384
    vit-base-patch16-224-in21k vit-base-patch32-224-in21k
    vit-large-patch16-224-in21k vit-large-patch32-224-in21k vit-huge-patch14-224-in21k
"""
_HUGGING_FACE = (
    *map(_google_hub, _GOOGLE_HUB.split()),
    PretrainedWeights("hub:google/vit-hybrid-base-bit-384", "R50+B/16", None, "paper", image_size=384),
    PretrainedWeights("hub:google/bit-50", "BiT-R50x1", None, "bit"),
)
_FACEBOOK = (
    *_deit("tiny-patch16-224", "a1311bcf", "Ti/16", 0.722),
    *_deit("small-patch16-224", "cd65a155", "S/16", 0.799),
    *_deit("base-patch16-224", "b5f2ef4d", "B/16", 0.818),
    *_deit("base-patch16-384", "8de9b5d1", "B/16", 0.829),
    *_deit("tiny-distilled-patch16-224", "b40b3cf7", "Ti/16", 0.745),
    *_deit("small-distilled-patch16-224", "649709d9", "S/16", 0.812),
    *_deit("base-distilled-patch16-224", "df68dfff", "B/16", 0.834),
    *_deit("base-distilled-patch16-384", "d0272ac0", "B/16", 0.852),
    *_mae("base", "B/16", 0.83664),
    *_mae("large", "L/16", 0.85952),
    *_mae("huge", "H/14", 0.86928),
    _dinov3("dinov3_vits16_pretrain_lvd1689m-08c60483.pth", "S/16"),
    _dinov3("dinov3_vitb16_pretrain_lvd1689m-73cec8be.pth", "B/16"),
    _dinov3("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", "L/16"),
    _dinov3("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "L/16", origin="dinov3_satellite"),
    *(row for size in _DINOV2_MODELS for registers in (False, True) for row in _dinov2(size, registers=registers)),
)


# torchvision


def _torchvision(file: str, model: str, top1: float, *, crop_fraction: float | None = None) -> PretrainedWeights:
    source = f"https://download.pytorch.org/models/{file}.pth"
    return PretrainedWeights(source, model, "torchvision", "torchvision", top1=top1, crop_fraction=crop_fraction)


def _swag(file: str, model: str, top1: float, *, image_size: int = 224) -> PretrainedWeights:
    """Return weights pre-trained on Instagram hashtags, which are evaluated without a crop margin."""
    row = _torchvision(file, model, top1, crop_fraction=1.0)
    return replace(row, image_size=image_size, interpolation="bicubic")


_TORCHVISION = (
    _torchvision("vit_b_16-c867db91", "B/16", 0.81072),
    _torchvision("vit_b_32-d86f8d99", "B/32", 0.75912),
    _torchvision("vit_l_16-852ce7e3", "L/16", 0.79662, crop_fraction=0.9255),  # crop of 224 from 242 pixels
    _torchvision("vit_l_32-c7638314", "L/32", 0.76972),
    _swag("vit_b_16_swag-9ac1b537", "B/16", 0.85304, image_size=384),
    _swag("vit_b_16_lc_swag-4e70ced5", "B/16", 0.81886),
    _swag("vit_l_16_swag-4f3808c9", "L/16", 0.88064, image_size=512),
    _swag("vit_l_16_lc_swag-4d563306", "L/16", 0.85146),
    _swag("vit_h_14_swag-80465313", "H/14", 0.88552, image_size=518),
    _swag("vit_h_14_lc_swag-c1eb923e", "H/14", 0.85708),
)

PRETRAINED: tuple[PretrainedWeights, ...] = (*_GOOGLE, *_HUGGING_FACE, *_TIMM, *_FACEBOOK, *_TORCHVISION)
"""All published weights, by publisher."""
