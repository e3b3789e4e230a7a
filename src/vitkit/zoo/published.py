"""A pattern goes in, the published weights that fit it come out: which model, how it is fed, what it scores, where.

A score is the top-1 on ImageNet's validation set that whoever published the weights states for them, measured with the
preprocessing of the row; None where nobody does, or where a file has no classes of ImageNet. They come from the README
files of google-research/vision_transformer, facebookresearch/deit and facebookresearch/mae, from timm's
results-imagenet.csv, and from torchvision's table of its weights. DeiT on the hub has the scores of the files it was
converted from.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from vitkit.data.geometry import Filter
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.zoo.lookup import configure
from vitkit.zoo.variants import ModelConfig

IMAGENET_21K = 21_843
"""Classes of ImageNet-21k as Google trained on them."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One file or repository of weights.

    `source` is a `hub:` name, or the address of a file. `format` is how it is written, in the words of
    `vitkit weights`; None where nothing here reads it yet. `settings` are what the file's model has beyond the zoo's.
    `classes` are 0 for a file without a classifier. `origin` names the preprocessing, which `crop_share`, `filter` and
    `input_size` change where this file's differ from the origin's habit. `top1` is a share, 0…1.
    """

    source: str
    model: str
    format: str | None
    image_size: int
    classes: int
    origin: str
    top1: float | None = None
    settings: tuple[str, ...] = ()
    crop_share: float | None = None
    filter: Filter | None = None
    input_size: int | None = None

    @property
    def config(self) -> ModelConfig:
        """The sizes of the model in the file; its GELU, eps and kernels are the format's to say."""
        other = configure(self.model, classes=self.classes, settings=self.settings)
        return configure(other, image_size=self.image_size)  # last, to fit the file's patches

    @property
    def preprocessing(self) -> Preprocessing:
        """What the file's publisher feeds it."""
        found = preprocessing(self.origin, image_size=self.input_size or self.image_size)
        return replace(
            found,
            crop_share=found.crop_share if self.crop_share is None else self.crop_share,
            filter=self.filter or found.filter,
        )


def published(pattern: str = "*") -> tuple[Published, ...]:
    """The published weights whose source, model or format fits a wildcard pattern, in any case.

    >>> [row.source for row in published("google/vit-base-patch16-384")]
    ['hub:google/vit-base-patch16-384']
    >>> {row.model for row in published("*mae*")} == {"B/16", "L/16", "H/14"}
    True
    """
    wanted = pattern.lower()
    return tuple(row for row in PUBLISHED if any(fnmatchcase(name.lower(), wanted) for name in _names(row)))


def published_file(name: str, *, format: str) -> Published | None:  # noqa: A002  the column's name
    """The published file of that name in a format, if there is one.

    >>> published_file("vit_b_16_swag-9ac1b537.pth", format="torchvision").image_size
    384
    """
    for row in PUBLISHED:
        if row.format == format and not row.source.startswith("hub:") and row.source.endswith(f"/{name}"):
            return row
    return None


def _names(row: Published) -> tuple[str, ...]:
    """What a user may type for a row: its source, with or without `hub:` and owner, its model and its format."""
    repository = row.source.removeprefix("hub:")
    return row.source, repository, repository.rpartition("/")[2], row.model, row.format or ""


def _share(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 5)


# Google's own files

_VIT_BUCKET, _BIT_BUCKET = "gs://vit_models", "gs://bit_models"
_WIDTHS = {"B/16": 768, "B/32": 768, "L/16": 1024, "L/32": 1024, "H/14": 1280, "R50+B/16": 768}
_FILES = {"B/16": "ViT-B_16", "B/32": "ViT-B_32", "L/16": "ViT-L_16", "L/32": "ViT-L_32", "H/14": "ViT-H_14"}
_FILES["R50+B/16"] = "R50+ViT-B_16"


def _google(source: str, model: str, *, image_size: int, classes: int = 1000, top1: float | None = None) -> Published:
    return Published(
        source=f"{_VIT_BUCKET}/{source}.npz",
        model=model,
        format="google",
        image_size=image_size,
        classes=classes,
        origin="paper",
        top1=_share(top1),
    )


def _original_21k(model: str) -> Published:
    """With the layer before the logits that fine-tuning throws away; the classifier behind it is zero."""
    row = _google(f"imagenet21k/{_FILES[model]}", model, image_size=224, classes=IMAGENET_21K)
    return replace(row, settings=(f"head.pre_logits={_WIDTHS[model]}",))


def _augreg(model: str, trained: str, *, rate: str, sizes: tuple[int, ...], before: bool = True) -> list[Published]:
    """Fine-tuned at each of the sizes, and with `before` also as it was, with the classes of ImageNet-21k."""
    run = f"augreg/{trained}"
    tuned = [_google(f"{run}--imagenet2012-steps_20k-lr_{rate}-res_{size}", model, image_size=size) for size in sizes]
    return ([_google(run, model, image_size=224, classes=IMAGENET_21K)] if before else []) + tuned


def _bit(name: str, *, classes: int, image_size: int = 224) -> Published:
    """ResNets have no positions: the size is only what they are fed."""
    return Published(
        source=f"{_BIT_BUCKET}/{name}.npz",
        model=f"BiT-{name.split('-')[2]}",
        format="bit",
        image_size=image_size,
        classes=classes,
        origin="bit",
    )


_GOOGLE = (
    *(_original_21k(model) for model in _FILES),
    _google("imagenet21k+imagenet2012/ViT-B_16-224", "B/16", image_size=224, top1=81.2),
    _google("imagenet21k+imagenet2012/ViT-L_16-224", "L/16", image_size=224, top1=82.7),
    *(
        _google(f"imagenet21k+imagenet2012/{_FILES[model]}", model, image_size=384)
        for model in ("B/16", "B/32", "L/16", "L/32", "R50+B/16")
    ),
    *_augreg("Ti/16", "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(224, 384)),
    *_augreg("S/32", "S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(224, 384)),
    *_augreg("S/16", "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(224, 384)),
    *_augreg("B/32", "B_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(224,)),
    *_augreg(
        "B/32", "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", rate="0.03", sizes=(384,), before=False
    ),
    *_augreg("B/16", "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", rate="0.01", sizes=(224, 384)),
    *_augreg("B/8", "B_8-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", rate="0.01", sizes=(224,)),
    *_augreg("L/16", "L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", rate="0.01", sizes=(224, 384)),
    *_augreg("R+Ti/16", "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(224, 384)),
    *_augreg("R26+S/32", "R26_S_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.03-do_0.0-sd_0.0", rate="0.03", sizes=(384,)),
    *_augreg(
        "R26+S/32",
        "R26_S_32-i21k-300ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1",
        rate="0.03",
        sizes=(224,),
        before=False,
    ),
    *_augreg("R50+L/32", "R50_L_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0", rate="0.01", sizes=(384,)),
    *_augreg(
        "R50+L/32",
        "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1",
        rate="0.01",
        sizes=(224,),
        before=False,
    ),
    *_augreg(
        "S/16", "S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0", rate="0.01", sizes=(224, 384), before=False
    ),
    *_augreg(
        "B/32", "B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1", rate="0.01", sizes=(224, 384), before=False
    ),
    *_augreg(
        "B/16", "B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1", rate="0.01", sizes=(224, 384), before=False
    ),
    *(_google(f"sam/{_FILES[model]}", model, image_size=224) for model in ("B/32", "B/16")),
    *(_bit(f"BiT-M-{name}", classes=IMAGENET_21K) for name in ("R50x1", "R101x1", "R152x2")),
    *(_bit(f"BiT-M-{name}-ILSVRC2012", classes=1000, image_size=448) for name in ("R50x1", "R101x1", "R152x2")),
    *(_bit(f"BiT-S-{name}", classes=1000) for name in ("R50x1", "R101x1")),
)


# timm's repositories on the hub


def _timm(model: str, name: str, top1: float | None = None, *, image_size: int | None = None) -> Published:
    """A row for a name of timm: its number is the image size, and its tag says what it was trained on."""
    architecture, _, tag = name.partition(".")
    return Published(
        source=f"hub:timm/{name}",
        model=model,
        format="timm",
        image_size=image_size or int(architecture[-3:]),
        classes=0 if tag == "orig_in21k" else IMAGENET_21K if tag.endswith("in21k") else 1000,
        origin="timm_augreg",
        top1=_share(top1),
    )


def _timm_bit(model: str, name: str, top1: float | None = None, *, image_size: int) -> Published:
    row = _timm(model, name, top1, image_size=image_size)
    return replace(row, crop_share=0.875 if image_size == 224 else 1.0, filter="bilinear")


_TIMM = (
    _timm("Ti/16", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", 75.454),
    _timm("Ti/16", "vit_tiny_patch16_384.augreg_in21k_ft_in1k", 78.424),
    _timm("S/32", "vit_small_patch32_224.augreg_in21k_ft_in1k", 75.994),
    _timm("S/32", "vit_small_patch32_384.augreg_in21k_ft_in1k", 80.486),
    _timm("S/16", "vit_small_patch16_224.augreg_in21k_ft_in1k", 81.384),
    _timm("S/16", "vit_small_patch16_384.augreg_in21k_ft_in1k", 83.802),
    _timm("B/32", "vit_base_patch32_224.augreg_in21k_ft_in1k", 80.716),
    _timm("B/32", "vit_base_patch32_384.augreg_in21k_ft_in1k", 83.350),
    _timm("B/16", "vit_base_patch16_224.augreg2_in21k_ft_in1k", 85.096),
    _timm("B/16", "vit_base_patch16_224.augreg_in21k_ft_in1k", 84.532),
    _timm("B/16", "vit_base_patch16_384.augreg_in21k_ft_in1k", 85.996),
    _timm("B/8", "vit_base_patch8_224.augreg2_in21k_ft_in1k", 86.218),
    _timm("B/8", "vit_base_patch8_224.augreg_in21k_ft_in1k", 85.798),
    _timm("L/16", "vit_large_patch16_224.augreg_in21k_ft_in1k", 85.834),
    _timm("L/16", "vit_large_patch16_384.augreg_in21k_ft_in1k", 87.084),
    _timm("B/16", "vit_base_patch16_224.orig_in21k_ft_in1k", 81.786),
    _timm("B/16", "vit_base_patch16_384.orig_in21k_ft_in1k", 84.200),
    _timm("L/32", "vit_large_patch32_384.orig_in21k_ft_in1k", 81.510),
    _timm("S/16", "vit_small_patch16_224.augreg_in1k", 78.846),
    _timm("S/16", "vit_small_patch16_384.augreg_in1k", 81.116),
    _timm("B/32", "vit_base_patch32_224.augreg_in1k", 74.894),
    _timm("B/32", "vit_base_patch32_384.augreg_in1k", 78.752),
    _timm("B/16", "vit_base_patch16_224.augreg_in1k", 79.154),
    _timm("B/16", "vit_base_patch16_384.augreg_in1k", 81.102),
    _timm("B/32", "vit_base_patch32_224.sam_in1k", 73.694),
    _timm("B/16", "vit_base_patch16_224.sam_in1k", 80.244),
    _timm("B/32", "vit_base_patch32_224.orig_in21k"),
    _timm("B/16", "vit_base_patch16_224.orig_in21k"),
    _timm("L/32", "vit_large_patch32_224.orig_in21k"),
    _timm("L/16", "vit_large_patch16_224.orig_in21k"),
    _timm("H/14", "vit_huge_patch14_224.orig_in21k"),
    _timm("Ti/16", "vit_tiny_patch16_224.augreg_in21k"),
    _timm("S/32", "vit_small_patch32_224.augreg_in21k"),
    _timm("S/16", "vit_small_patch16_224.augreg_in21k"),
    _timm("B/32", "vit_base_patch32_224.augreg_in21k"),
    _timm("B/16", "vit_base_patch16_224.augreg_in21k"),
    _timm("B/8", "vit_base_patch8_224.augreg_in21k"),
    _timm("L/16", "vit_large_patch16_224.augreg_in21k"),
    _timm("R+Ti/16", "vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k", 71.798),
    _timm("R+Ti/16", "vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k", 75.962),
    _timm("R26+S/32", "vit_small_r26_s32_224.augreg_in21k_ft_in1k", 81.864),
    _timm("R26+S/32", "vit_small_r26_s32_384.augreg_in21k_ft_in1k", 84.048),
    _timm("R50+B/16", "vit_base_r50_s16_384.orig_in21k_ft_in1k", 84.976),
    _timm("R50+L/32", "vit_large_r50_s32_224.augreg_in21k_ft_in1k", 84.422),
    _timm("R50+L/32", "vit_large_r50_s32_384.augreg_in21k_ft_in1k", 86.182),
    _timm("R+Ti/16", "vit_tiny_r_s16_p8_224.augreg_in21k"),
    _timm("R26+S/32", "vit_small_r26_s32_224.augreg_in21k"),
    _timm("R50+B/16", "vit_base_r50_s16_224.orig_in21k"),
    _timm("R50+L/32", "vit_large_r50_s32_224.augreg_in21k"),
    _timm_bit("BiT-R50x1", "resnetv2_50x1_bit.goog_in21k_ft_in1k", 80.340, image_size=448),
    _timm_bit("BiT-R101x1", "resnetv2_101x1_bit.goog_in21k_ft_in1k", 82.342, image_size=448),
    _timm_bit("BiT-R152x2", "resnetv2_152x2_bit.goog_in21k_ft_in1k", 84.510, image_size=448),
    _timm_bit("BiT-R50x1", "resnetv2_50x1_bit.goog_in21k", image_size=224),
    _timm_bit("BiT-R101x1", "resnetv2_101x1_bit.goog_in21k", image_size=224),
    _timm_bit("BiT-R152x2", "resnetv2_152x2_bit.goog_in21k", image_size=224),
)


# Hugging Face's own conversions, and Facebook's


def _hub(
    source: str,
    model: str,
    format: str | None,  # noqa: A002  the column's name
    origin: str,
    *,
    image_size: int = 224,
    classes: int = 1000,
    top1: float | None = None,
    settings: tuple[str, ...] = (),
    input_size: int | None = None,
) -> Published:
    return Published(
        source=source,
        model=model,
        format=format,
        image_size=image_size,
        classes=classes,
        origin=origin,
        top1=_share(top1),
        settings=settings,
        input_size=input_size,
    )


_VIT, _DEIT, _MAE, _DINOV2 = "huggingface", "huggingface-deit", "huggingface-mae", "huggingface-dinov2"
_DISTILLED = ("tokens.distillation=true",)
# The mean of the patches, normed after it, in a model that keeps its class token.
_AVERAGED = ("pooling=mean", "tokens.class_token=true", "head.norm=after_pooling")
_GIANT = ("width=1536", "depth=40", "heads=24", "mlp_dim=4096", "block.activation=swiglu")
_DINOV2_SIZES = {
    "small": ("S/16", "s", ("patch_size=14",)),
    "base": ("B/16", "b", ("patch_size=14",)),
    "large": ("L/16", "l", ("patch_size=14",)),
    "giant": ("H/14", "g", _GIANT),
}


def _google_21k(name: str, model: str) -> Published:
    """Without a classifier; the layer before the logits is there, as the pooler."""
    settings = (f"head.pre_logits={_WIDTHS[model]}",)
    return _hub(f"hub:google/{name}-in21k", model, _VIT, "huggingface", classes=0, settings=settings)


def _dinov2(size: str, *, registers: bool) -> tuple[Published, Published]:
    """The repository on the hub and Facebook's file: positions for 518 pixels, evaluated at 224."""
    model, letter, sizes = _DINOV2_SIZES[size]
    settings = (*sizes, "block.layer_scale=1.0", *(["tokens.registers=4"] if registers else []))
    hub = f"hub:facebook/dinov2-{'with-registers-' if registers else ''}{size}"
    folder = f"https://dl.fbaipublicfiles.com/dinov2/dinov2_vit{letter}14"
    file = f"{folder}/dinov2_vit{letter}14_{'reg4_' if registers else ''}pretrain.pth"
    return (
        _hub(hub, model, _DINOV2, "huggingface_dinov2", image_size=518, classes=0, settings=settings, input_size=224),
        _hub(file, model, "dinov2", "dinov2", image_size=518, classes=0, settings=settings, input_size=224),
    )


def _dinov3(file: str, model: str, *, origin: str = "dinov3") -> Published:
    """Meta's file, behind a form; positions are rotary, so that any size fits."""
    settings = ("positions.kind=rotary", "tokens.registers=4", "block.layer_scale=1.0")
    place = "https://dinov3.llamameta.net"
    return _hub(
        f"{place}/{file.partition('_pretrain')[0]}/{file}", model, "dinov3", origin, classes=0, settings=settings
    )


def _deit(name: str, digest: str, model: str, top1: float) -> tuple[Published, Published]:
    """The repository on the hub and Facebook's file. On the hub a DeiT without a distillation token is a plain ViT."""
    distilled, image_size = "distilled" in name, int(name[-3:])
    settings = _DISTILLED if distilled else ()
    file = f"https://dl.fbaipublicfiles.com/deit/deit_{name.replace('-', '_')}-{digest}.pth"
    as_there = _DEIT if distilled else _VIT
    on_hub = _hub(f"hub:facebook/deit-{name}", model, as_there, "huggingface_deit", image_size=image_size)
    return (
        replace(on_hub, top1=_share(top1), settings=settings),
        _hub(file, model, "deit", "deit", image_size=image_size, top1=top1, settings=settings),
    )


def _mae(size: str, model: str, top1: float) -> tuple[Published, ...]:
    folder = "https://dl.fbaipublicfiles.com/mae"
    tuned = f"{folder}/finetune/mae_finetuned_vit_{size}.pth"
    return (
        _hub(f"hub:facebook/vit-mae-{size}", model, _MAE, "huggingface_mae", classes=0),
        _hub(f"{folder}/pretrain/mae_pretrain_vit_{size}.pth", model, "mae", "mae", classes=0),
        _hub(tuned, model, "mae", "mae", top1=top1, settings=_AVERAGED),
    )


_HUGGING_FACE = (
    _hub("hub:google/vit-base-patch16-224", "B/16", _VIT, "huggingface"),
    _hub("hub:google/vit-base-patch16-384", "B/16", _VIT, "huggingface", image_size=384),
    _hub("hub:google/vit-base-patch32-384", "B/32", _VIT, "huggingface", image_size=384),
    _hub("hub:google/vit-large-patch16-224", "L/16", _VIT, "huggingface"),
    _hub("hub:google/vit-large-patch16-384", "L/16", _VIT, "huggingface", image_size=384),
    _hub("hub:google/vit-large-patch32-384", "L/32", _VIT, "huggingface", image_size=384),
    _google_21k("vit-base-patch16-224", "B/16"),
    _google_21k("vit-base-patch32-224", "B/32"),
    _google_21k("vit-large-patch16-224", "L/16"),
    _google_21k("vit-large-patch32-224", "L/32"),
    _google_21k("vit-huge-patch14-224", "H/14"),
    _hub("hub:google/vit-hybrid-base-bit-384", "R50+B/16", None, "paper", image_size=384),
    _hub("hub:google/bit-50", "BiT-R50x1", None, "bit"),
)

_FACEBOOK = (
    *_deit("tiny-patch16-224", "a1311bcf", "Ti/16", 72.2),
    *_deit("small-patch16-224", "cd65a155", "S/16", 79.9),
    *_deit("base-patch16-224", "b5f2ef4d", "B/16", 81.8),
    *_deit("base-patch16-384", "8de9b5d1", "B/16", 82.9),
    *_deit("tiny-distilled-patch16-224", "b40b3cf7", "Ti/16", 74.5),
    *_deit("small-distilled-patch16-224", "649709d9", "S/16", 81.2),
    *_deit("base-distilled-patch16-224", "df68dfff", "B/16", 83.4),
    *_deit("base-distilled-patch16-384", "d0272ac0", "B/16", 85.2),
    *_mae("base", "B/16", 83.664),
    *_mae("large", "L/16", 85.952),
    *_mae("huge", "H/14", 86.928),
    _dinov3("dinov3_vits16_pretrain_lvd1689m-08c60483.pth", "S/16"),
    _dinov3("dinov3_vitb16_pretrain_lvd1689m-73cec8be.pth", "B/16"),
    _dinov3("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", "L/16"),
    _dinov3("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "L/16", origin="dinov3_satellite"),
    *(row for size in _DINOV2_SIZES for registers in (False, True) for row in _dinov2(size, registers=registers)),
)


# torchvision's files


def _torchvision(
    file: str,
    model: str,
    top1: float,
    *,
    image_size: int = 224,
    crop_share: float | None = None,
    filter: Filter | None = None,  # noqa: A002  the column's name
) -> Published:
    row = _hub(f"https://download.pytorch.org/models/{file}.pth", model, "torchvision", "torchvision", top1=top1)
    return replace(row, image_size=image_size, crop_share=crop_share, filter=filter)


def _swag(file: str, model: str, top1: float, *, image_size: int = 224) -> Published:
    """Pre-trained on Instagram's hashtags; fed without a margin."""
    return _torchvision(file, model, top1, image_size=image_size, crop_share=1.0, filter="bicubic")


_TORCHVISION = (
    _torchvision("vit_b_16-c867db91", "B/16", 81.072),
    _torchvision("vit_b_32-d86f8d99", "B/32", 75.912),
    _torchvision("vit_l_16-852ce7e3", "L/16", 79.662, crop_share=0.9255),  # of 242 pixels
    _torchvision("vit_l_32-c7638314", "L/32", 76.972),
    _swag("vit_b_16_swag-9ac1b537", "B/16", 85.304, image_size=384),
    _swag("vit_b_16_lc_swag-4e70ced5", "B/16", 81.886),
    _swag("vit_l_16_swag-4f3808c9", "L/16", 88.064, image_size=512),
    _swag("vit_l_16_lc_swag-4d563306", "L/16", 85.146),
    _swag("vit_h_14_swag-80465313", "H/14", 88.552, image_size=518),
    _swag("vit_h_14_lc_swag-c1eb923e", "H/14", 85.708),
)

PUBLISHED: tuple[Published, ...] = (*_GOOGLE, *_HUGGING_FACE, *_TIMM, *_FACEBOOK, *_TORCHVISION)
"""The weights that people use, by publisher."""
