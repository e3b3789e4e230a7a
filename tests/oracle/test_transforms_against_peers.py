"""Evaluation's pixels and batches against timm's and torchvision's, pixel for pixel, on photos and on made images."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_timm, import_torchvision, import_transformers
from PIL import Image

from vitkit.checkpoints.formats.timm_config import preprocessing_told
from vitkit.core.errors import WeightsError
from vitkit.data.transforms import ORIGINS, Preprocessing, preprocessing
from vitkit.zoo.published import published_file

Pictures = Callable[[], Iterator[Image.Image]]
PHOTOS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "photos"
MADE_SIDES = [(1, 1), (7, 500), (224, 224), (225, 257), (256, 256), (333, 251), (500, 375), (301, 299), (1000, 667)]


@cache
def made(height: int, width: int) -> Image.Image:
    """Edges at every scale, smooth parts and noise."""
    rng = np.random.default_rng(height * 10_000 + width)
    coarse = rng.integers(0, 256, size=(height // 9 + 1, width // 7 + 1, 3), dtype=np.uint8)
    picture = np.kron(coarse, np.ones((9, 7, 1), dtype=np.uint8))[:height, :width]
    picture[: height // 3] = rng.integers(0, 256, size=(height // 3, width, 3), dtype=np.uint8)
    return Image.fromarray(picture)


def made_pictures() -> Iterator[Image.Image]:
    for height, width in MADE_SIDES:
        yield made(height, width)


def photos() -> Iterator[Image.Image]:
    if not PHOTOS.is_dir():
        pytest.skip("the photos are not there")
    for path in sorted(PHOTOS.glob("*.jpg"))[:8]:
        with Image.open(path) as file:
            yield file.convert("RGB")


SETS = pytest.mark.parametrize("pictures", [made_pictures, photos], ids=["made", "photos"])


@SETS
@pytest.mark.parametrize("origin", ["timm_augreg", "deit", "torchvision"])
@pytest.mark.parametrize("size", [224, 196, 97])
def test_crop_has_timms_pixels(origin: str, size: int, pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    ours = preprocessing(origin, image_size=size)
    theirs = create_transform(
        input_size=(3, size, size), interpolation=ours.filter, crop_pct=ours.crop_share, normalize=False
    )
    for picture in pictures():
        np.testing.assert_array_equal(ours.pixels(picture), theirs(picture).numpy())


@SETS
def test_crop_that_is_not_square_has_timms_pixels(pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    size = (160, 272)
    ours = preprocessing("torchvision", image_size=size)
    theirs = create_transform(input_size=(3, *size), interpolation="bilinear", crop_pct=0.875, normalize=False)
    for picture in pictures():
        np.testing.assert_array_equal(ours.pixels(picture), theirs(picture).numpy())


@SETS
@pytest.mark.parametrize("share", [1.0, 0.875])
def test_squash_has_timms_pixels(share: float, pictures: Pictures) -> None:
    import_timm()
    from timm.data import create_transform  # noqa: PLC0415

    ours = Preprocessing(resize="squash" if share == 1.0 else "squash_crop", crop_share=share)
    theirs = create_transform(
        input_size=(3, 224, 224), interpolation="bilinear", crop_pct=share, crop_mode="squash", normalize=False
    )
    for picture in pictures():
        np.testing.assert_array_equal(ours.pixels(picture), theirs(picture).numpy())


@SETS
def test_batch_is_torchvisions(pictures: Pictures) -> None:
    import_torchvision()
    from torchvision.transforms._presets import ImageClassification  # noqa: PLC0415

    theirs = ImageClassification(crop_size=224, resize_size=256)
    ours = ORIGINS["torchvision"]
    for picture in pictures():
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
        # The pixels are the same; torchvision divides by 255 first, which rounds once more, at numbers up to 2.7.
        torch.testing.assert_close(batch[0], theirs(picture), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [224, 384])
def test_augreg_is_configured_as_timm_configures_its_weights(size: int) -> None:
    timm = import_timm()
    names = timm.list_models("vit_*_patch*.augreg_*", pretrained=True)
    configs = [config for config in map(timm.models.get_pretrained_cfg, names) if config.input_size[-1] == size]
    assert configs
    ours = preprocessing("timm_augreg", image_size=size)
    for config in configs:
        theirs = (config.crop_pct, config.interpolation, config.mean, config.std)
        assert theirs == (ours.crop_share, ours.filter, ours.mean, ours.deviation), config.architecture


@pytest.mark.parametrize("origin", ["deit", "torchvision", "timm_augreg"])
def test_hub_form_of_a_crop_means_the_same_to_transformers(origin: str) -> None:
    transformers = import_transformers()
    try:
        processor = transformers.models.bit.image_processing_pil_bit.BitImageProcessorPil
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = ORIGINS[origin]
    theirs = processor(**{key: value for key, value in ours.to_hub().items() if key != "vitkit"})
    # Where the border to crop is odd, transformers may cut one pixel beside timm and torchvision: squares have none.
    for side in (1, 97, 224, 256, 333):
        picture = made(side, side)
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
        found = theirs(picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(batch, found, atol=1e-5, rtol=0)  # float32 arithmetic in another order


def test_hub_form_of_a_squash_means_the_same_to_transformers() -> None:
    transformers = import_transformers()
    try:
        processor = transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = Preprocessing(image_size=(96, 128), filter="bicubic")
    theirs = processor(**{key: value for key, value in ours.to_hub().items() if key != "vitkit"})
    for picture in made_pictures():
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
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
def test_timms_folder_is_fed_as_timm_feeds_it(name: str) -> None:
    timm = import_timm()
    from timm.data import create_transform, resolve_data_config  # noqa: PLC0415

    written = timm.get_pretrained_cfg(name).to_dict(remove_source=True, remove_null=True)
    ours = preprocessing_told({"architecture": name.partition(".")[0], "pretrained_cfg": written})
    theirs = create_transform(**resolve_data_config(pretrained_cfg=written))
    assert ours is not None
    for picture in (made(333, 251), made(256, 256), made(225, 700)):
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
        # The pixels are the same; timm divides by 255 first, which rounds once more, at numbers up to 4.8.
        torch.testing.assert_close(batch[0], theirs(picture), atol=2e-6, rtol=0)


def test_timms_padding_is_refused() -> None:
    timm = import_timm()
    names = [name for name in timm.list_pretrained() if timm.get_pretrained_cfg(name).crop_mode == "border"]
    assert names
    written = timm.get_pretrained_cfg(names[0]).to_dict(remove_source=True, remove_null=True)
    with pytest.raises(WeightsError, match="crop_mode is border"):
        preprocessing_told({"pretrained_cfg": written})


def test_what_timms_folder_leaves_out_is_timms_default() -> None:
    import_timm()
    from timm.data import create_transform, resolve_data_config  # noqa: PLC0415

    ours = preprocessing_told({"architecture": "vit_base_patch16_224", "input_size": [3, 96, 96]})
    theirs = create_transform(**resolve_data_config(pretrained_cfg={"input_size": (3, 96, 96)}))
    assert ours is not None
    batch = ours.normalise(torch.from_numpy(ours.pixels(made(500, 375)))[None])
    torch.testing.assert_close(batch[0], theirs(made(500, 375)), atol=2e-6, rtol=0)


NORMALISED = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HUB_FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "ViT": ("vit", {"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    "ViT, silent": ("vit", {}),
    "ViT, sides": ("vit", {"size": {"height": 96, "width": 160}, "resample": 3}),
    "MAE": ("vit", {"size": 224, "resample": 2, **NORMALISED}),
    "not scaled": ("vit", {"size": 96, "do_rescale": False, "image_mean": [127.0] * 3, "image_std": [64.0] * 3}),
    "otherwise scaled": ("vit", {"size": 96, "rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}),
    "not normalised": ("vit", {"size": 96, "do_normalize": False}),
    "DeiT": ("deit", {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3, **NORMALISED}),
    "DeiT, silent": ("deit", {}),
    "DINOv2": ("bit", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, **NORMALISED}),
    "DINOv2, odd": ("bit", {"size": {"shortest_edge": 101}, "crop_size": 90, "resample": 2, **NORMALISED}),
    "Bit, silent": ("bit", {}),
    "ConvNeXt": ("convnext", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}),
    "ConvNeXt, large": ("convnext", {"size": 384}),
    "SigLIP": ("siglip", {"size": {"height": 160, "width": 160}}),
}
KINDS = {"vit": "ViT", "deit": "DeiT", "bit": "Bit", "convnext": "ConvNext", "siglip": "Siglip"}


@SETS
@pytest.mark.parametrize(("module", "data"), HUB_FORMS.values(), ids=HUB_FORMS)
def test_hub_form_has_transformers_pixels(module: str, data: dict[str, object], pictures: Pictures) -> None:
    transformers = import_transformers()
    try:
        code = getattr(getattr(transformers.models, module), f"image_processing_pil_{module}")
        theirs = getattr(code, f"{KINDS[module]}ImageProcessorPil")(**data)
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no image processor that needs only Pillow: {error}")
    ours = Preprocessing.from_hub(data | {"image_processor_type": f"{KINDS[module]}ImageProcessor"})
    for picture in pictures():
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
        found = theirs(picture, return_tensors="pt")["pixel_values"]
        # float32 arithmetic in another order, at numbers up to 255
        torch.testing.assert_close(batch, found, atol=1e-5, rtol=1e-6)


def test_dinov3_is_fed_as_its_readme_says() -> None:
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
    for picture in (made(333, 251), made(500, 375)):
        batch = ours.normalise(torch.from_numpy(ours.pixels(picture))[None])
        # torch rounds to levels of 1/255 at other places than Pillow: one level, at a deviation of 0.224
        torch.testing.assert_close(batch[0], theirs(picture), atol=1.01 / 255 / 0.224, rtol=0)


def torchvisions_weights() -> list[tuple[str, str]]:
    models = ("ViT_B_16", "ViT_B_32", "ViT_L_16", "ViT_L_32", "ViT_H_14")
    names = ("IMAGENET1K_V1", "IMAGENET1K_SWAG_E2E_V1", "IMAGENET1K_SWAG_LINEAR_V1")
    missing = {("ViT_B_32", 1), ("ViT_B_32", 2), ("ViT_L_32", 1), ("ViT_L_32", 2), ("ViT_H_14", 0)}
    return [(model, name) for model in models for at, name in enumerate(names) if (model, at) not in missing]


@pytest.mark.parametrize(("model", "weights"), torchvisions_weights())
def test_every_file_of_torchvision_is_fed_torchvisions_pixels(model: str, weights: str) -> None:
    torchvision = import_torchvision()
    published = getattr(torchvision.models, f"{model}_Weights")[weights]
    row = published_file(published.url.rpartition("/")[2], format="torchvision")
    assert row is not None
    transforms = published.transforms()
    theirs = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize(transforms.resize_size, interpolation=transforms.interpolation),
            torchvision.transforms.CenterCrop(transforms.crop_size),
            torchvision.transforms.PILToTensor(),
        ]
    )
    assert (list(row.preprocessing.mean), list(row.preprocessing.deviation)) == (transforms.mean, transforms.std)
    for picture in (made(333, 251), made(500, 375)):
        np.testing.assert_array_equal(row.preprocessing.pixels(picture), theirs(picture).numpy())
