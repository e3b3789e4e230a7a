"""Preprocessing against timm, torchvision and transformers, pixel by pixel."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_timm, import_torchvision, import_transformers
from PIL import Image

from vitkit.core.errors import WeightsError
from vitkit.data.preprocessing import ORIGINS, Preprocessing, get_preprocessing
from vitkit.weights.formats.timm.config import read_preprocessing
from vitkit.zoo.pretrained import find_pretrained_file

Pictures = Callable[[], Iterable[Image.Image]]
PHOTOS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "photos"
MADE_SIDES = [(1, 1), (7, 500), (224, 224), (225, 257), (256, 256), (333, 251), (500, 375), (301, 299), (640, 427)]


@cache
def make_picture(height: int, width: int) -> Image.Image:
    """Draw edges at every scale, smooth parts and noise."""
    rng = np.random.default_rng(height * 10_000 + width)
    coarse = rng.integers(0, 256, size=(height // 9 + 1, width // 7 + 1, 3), dtype=np.uint8)
    picture = np.kron(coarse, np.ones((9, 7, 1), dtype=np.uint8))[:height, :width]
    picture[: height // 3] = rng.integers(0, 256, size=(height // 3, width, 3), dtype=np.uint8)
    return Image.fromarray(picture)


def synthetic_pictures() -> Iterator[Image.Image]:
    for height, width in MADE_SIDES:
        yield make_picture(height, width)


@cache
def photos() -> list[Image.Image]:
    if not PHOTOS.is_dir():
        pytest.skip("the photos are not there")
    return [Image.open(path).convert("RGB") for path in sorted(PHOTOS.glob("*.jpg"))[:3]]


SETS = pytest.mark.parametrize("pictures", [synthetic_pictures, photos], ids=["synthetic", "photos"])


@SETS
@pytest.mark.parametrize("origin", ["timm_augreg", "deit", "torchvision"])
@pytest.mark.parametrize("size", [224, 196, 97])
def test_crop_equals_timm(origin: str, size: int, pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    ours = get_preprocessing(origin, image_size=size)
    theirs = create_transform(
        input_size=(3, size, size), interpolation=ours.interpolation, crop_pct=ours.crop_fraction, normalize=False
    )
    for picture in pictures():
        np.testing.assert_array_equal(ours.to_pixels(picture), theirs(picture).numpy())


@SETS
def test_non_square_crop_equals_timm(pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    size = (160, 272)
    ours = get_preprocessing("torchvision", image_size=size)
    theirs = create_transform(input_size=(3, *size), interpolation="bilinear", crop_pct=0.875, normalize=False)
    for picture in pictures():
        np.testing.assert_array_equal(ours.to_pixels(picture), theirs(picture).numpy())


@SETS
@pytest.mark.parametrize("share", [1.0, 0.875])
def test_squash_equals_timm(share: float, pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    ours = Preprocessing(resize="squash" if share == 1.0 else "squash_crop", crop_fraction=share)
    theirs = create_transform(
        input_size=(3, 224, 224), interpolation="bilinear", crop_pct=share, crop_mode="squash", normalize=False
    )
    for picture in pictures():
        np.testing.assert_array_equal(ours.to_pixels(picture), theirs(picture).numpy())


@SETS
def test_batch_equals_torchvision(pictures: Pictures) -> None:
    import_torchvision()
    from torchvision.transforms._presets import ImageClassification  # noqa: PLC0415

    theirs = ImageClassification(crop_size=224, resize_size=256)
    ours = ORIGINS["torchvision"]
    for picture in pictures():
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        # The pixels are the same; torchvision divides by 255 first, which rounds once more, at numbers up to 2.7.
        torch.testing.assert_close(batch[0], theirs(picture), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [224, 384])
def test_augreg_preset_equals_timm(size: int) -> None:
    timm = import_timm()
    names = timm.list_models("vit_*_patch*.augreg_*", pretrained=True)
    configs = [config for config in map(timm.models.get_pretrained_cfg, names) if config.input_size[-1] == size]
    assert configs
    ours = get_preprocessing("timm_augreg", image_size=size)
    for config in configs:
        theirs = (config.crop_pct, config.interpolation, config.mean, config.std)
        assert theirs == (ours.crop_fraction, ours.interpolation, ours.mean, ours.std), config.architecture


@pytest.mark.parametrize("origin", ["deit", "torchvision", "timm_augreg"])
def test_crop_config_equals_transformers(origin: str) -> None:
    transformers = import_transformers()
    try:
        processor = transformers.models.bit.image_processing_pil_bit.BitImageProcessorPil
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = ORIGINS[origin]
    theirs = processor(**{key: value for key, value in ours.to_hub().items() if key != "vitkit"})
    # Where the border to crop is odd, transformers may cut one pixel beside timm and torchvision: squares have none.
    for side in (1, 97, 224, 256, 333):
        picture = make_picture(side, side)
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        found = theirs(picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(batch, found, atol=1e-5, rtol=0)  # float32 arithmetic in another order


def test_squash_config_equals_transformers() -> None:
    transformers = import_transformers()
    try:
        processor = transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = Preprocessing(image_size=(96, 128), interpolation="bicubic")
    theirs = processor(**{key: value for key, value in ours.to_hub().items() if key != "vitkit"})
    for picture in synthetic_pictures():
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        found = theirs(picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(batch, found, atol=1e-5, rtol=0)  # float32 arithmetic in another order


# What other libraries' files say

TIMM_NAMES = [
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_base_patch16_384.augreg_in21k_ft_in1k",
    "deit3_small_patch16_224.fb_in1k",
    "vit_base_patch16_siglip_256.webli",
    "vit_small_patch14_dinov2.lvd142m",
    "vit_large_patch16_dinov3.sat493m",
    "resnetv2_50x1_bit.goog_in21k_ft_in1k",
]


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_preprocessing_of_timm_directory_equals_timm(name: str) -> None:
    timm = import_timm()
    from timm.data import create_transform, resolve_data_config  # noqa: PLC0415

    cfg = timm.get_pretrained_cfg(name).to_dict(remove_source=True, remove_null=True)
    ours = read_preprocessing({"architecture": name.partition(".")[0], "pretrained_cfg": cfg})
    theirs = create_transform(**resolve_data_config(pretrained_cfg=cfg))
    assert ours is not None
    for picture in (make_picture(333, 251), make_picture(256, 256), make_picture(225, 700)):
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        # The pixels are the same; timm divides by 255 first, which rounds once more, at numbers up to 4.8.
        torch.testing.assert_close(batch[0], theirs(picture), atol=2e-6, rtol=0)


def test_timm_padding_is_rejected() -> None:
    timm = import_timm()
    cfg = timm.get_pretrained_cfg("vit_base_patch16_224").to_dict(remove_source=True, remove_null=True)
    assert read_preprocessing({"pretrained_cfg": cfg}) is not None
    with pytest.raises(WeightsError, match="crop_mode border"):  # timm 1.0.28 lists no weights with it, later ones do
        read_preprocessing({"pretrained_cfg": cfg | {"crop_mode": "border"}})


def test_missing_timm_settings_have_timm_defaults() -> None:
    import_timm()
    from timm.data import create_transform, resolve_data_config  # noqa: PLC0415

    ours = read_preprocessing({"architecture": "vit_base_patch16_224", "input_size": [3, 96, 96]})
    theirs = create_transform(**resolve_data_config(pretrained_cfg={"input_size": (3, 96, 96)}))
    assert ours is not None
    batch = ours.normalize(torch.from_numpy(ours.to_pixels(make_picture(500, 375)))[None])
    torch.testing.assert_close(batch[0], theirs(make_picture(500, 375)), atol=2e-6, rtol=0)


NORMALIZED = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HUB_FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "ViT": ("vit", {"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    "ViT, silent": ("vit", {}),
    "ViT, sides": ("vit", {"size": {"height": 96, "width": 160}, "resample": 3}),
    "MAE": ("vit", {"size": 224, "resample": 2, **NORMALIZED}),
    "not scaled": ("vit", {"size": 96, "do_rescale": False, "image_mean": [127.0] * 3, "image_std": [64.0] * 3}),
    "otherwise scaled": ("vit", {"size": 96, "rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}),
    "not normalized": ("vit", {"size": 96, "do_normalize": False}),
    "DeiT": ("deit", {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3, **NORMALIZED}),
    "DeiT, silent": ("deit", {}),
    "DINOv2": ("bit", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, **NORMALIZED}),
    "DINOv2, odd": ("bit", {"size": {"shortest_edge": 101}, "crop_size": 90, "resample": 2, **NORMALIZED}),
    "Bit, silent": ("bit", {}),
    "ConvNeXt": ("convnext", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}),
    "ConvNeXt, large": ("convnext", {"size": 384}),
    "SigLIP": ("siglip", {"size": {"height": 160, "width": 160}}),
}
KINDS = {"vit": "ViT", "deit": "DeiT", "bit": "Bit", "convnext": "ConvNext", "siglip": "Siglip"}


@SETS
@pytest.mark.parametrize(("module", "data"), HUB_FORMS.values(), ids=HUB_FORMS)
def test_image_processor_equals_transformers(module: str, data: dict[str, object], pictures: Pictures) -> None:
    transformers = import_transformers()
    try:
        code = getattr(getattr(transformers.models, module), f"image_processing_pil_{module}")
        theirs = getattr(code, f"{KINDS[module]}ImageProcessorPil")(**data)
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = Preprocessing.from_hub(data | {"image_processor_type": f"{KINDS[module]}ImageProcessor"})
    for picture in pictures():
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        found = theirs(picture, return_tensors="pt")["pixel_values"]
        # float32 arithmetic in another order, at numbers up to 255
        torch.testing.assert_close(batch, found, atol=1e-5, rtol=1e-6)


def test_dinov3_preprocessing_equals_its_readme() -> None:
    import_torchvision()
    from torchvision.transforms import v2  # noqa: PLC0415

    theirs = v2.Compose(
        [
            v2.ToImage(),
            v2.Resize((224, 224), antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    ours = ORIGINS["dinov3"]
    for picture in (make_picture(333, 251), make_picture(500, 375)):
        batch = ours.normalize(torch.from_numpy(ours.to_pixels(picture))[None])
        # torch rounds to levels of 1/255 at other places than Pillow: one level, at a deviation of 0.224
        torch.testing.assert_close(batch[0], theirs(picture), atol=1.01 / 255 / 0.224, rtol=0)


def torchvisions_weights() -> list[tuple[str, str]]:
    models = ("ViT_B_16", "ViT_B_32", "ViT_L_16", "ViT_L_32", "ViT_H_14")
    names = ("IMAGENET1K_V1", "IMAGENET1K_SWAG_E2E_V1", "IMAGENET1K_SWAG_LINEAR_V1")
    missing = {("ViT_B_32", 1), ("ViT_B_32", 2), ("ViT_L_32", 1), ("ViT_L_32", 2), ("ViT_H_14", 0)}
    return [(model, name) for model in models for at, name in enumerate(names) if (model, at) not in missing]


@pytest.mark.parametrize(("model", "weights"), torchvisions_weights())
def test_torchvision_weights_preprocessing_equals_torchvision(model: str, weights: str) -> None:
    torchvision = import_torchvision()
    published = getattr(torchvision.models, f"{model}_Weights")[weights]
    row = find_pretrained_file(published.url.rpartition("/")[2], format="torchvision")
    assert row is not None
    transforms = published.transforms()
    theirs = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(transforms.resize_size, interpolation=transforms.interpolation),
            torchvision.transforms.CenterCrop(transforms.crop_size),
            torchvision.transforms.PILToTensor(),
        ]
    )
    assert (list(row.preprocessing.mean), list(row.preprocessing.std)) == (transforms.mean, transforms.std)
    for picture in (make_picture(333, 251), make_picture(500, 375)):
        np.testing.assert_array_equal(row.preprocessing.to_pixels(picture), theirs(picture).numpy())
