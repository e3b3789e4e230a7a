"""Facts of the 19 VTAB-1k tasks: names, groups, class counts, and the augmentation that keeps their labels.

From "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark" (arXiv:1910.04867) and,
for crops and flips, from BiT (arXiv:1912.11370), whose preprocessing the paper follows.
"""

from typing import Literal, NamedTuple

Group = Literal["Natural", "Specialized", "Structured"]


class VtabTask(NamedTuple):
    """A task; `folders` are directory names in public releases, most common first.

    `flip` and `crop` are False where they would change the label (BiT, supplement F).
    """

    name: str
    title: str
    group: Group
    num_classes: int
    folders: tuple[str, ...]
    flip: bool = True
    crop: bool = True


TASKS = (
    VtabTask("caltech101", "Caltech101", "Natural", 102, ("caltech101",)),
    VtabTask("cifar100", "CIFAR-100", "Natural", 100, ("cifar", "cifar100")),
    VtabTask("dtd", "DTD", "Natural", 47, ("dtd",)),
    VtabTask("flowers102", "Flowers102", "Natural", 102, ("oxford_flowers102", "flowers102")),
    VtabTask("pets", "Pets", "Natural", 37, ("oxford_iiit_pet", "oxford_pet", "pets")),
    VtabTask("svhn", "SVHN", "Natural", 10, ("svhn", "svhn_cropped")),
    VtabTask("sun397", "Sun397", "Natural", 397, ("sun397",)),
    VtabTask("patch-camelyon", "Patch Camelyon", "Specialized", 2, ("patch_camelyon", "pcam")),
    VtabTask("eurosat", "EuroSAT", "Specialized", 10, ("eurosat",)),
    VtabTask("resisc45", "Resisc45", "Specialized", 45, ("resisc45",)),
    VtabTask("retinopathy", "Retinopathy", "Specialized", 5, ("diabetic_retinopathy", "retinopathy")),
    VtabTask("clevr-count", "Clevr count", "Structured", 8, ("clevr_count",), crop=False),
    VtabTask("clevr-distance", "Clevr distance", "Structured", 6, ("clevr_dist", "clevr_distance"), crop=False),
    VtabTask("dmlab", "DMLab", "Structured", 6, ("dmlab",), crop=False),
    VtabTask(
        "dsprites-location", "dSprites location", "Structured", 16, ("dsprites_loc", "dsprites_location"),
        flip=False, crop=False,
    ),
    VtabTask(
        "dsprites-orientation", "dSprites orientation", "Structured", 16, ("dsprites_ori", "dsprites_orientation"),
        flip=False,
    ),
    VtabTask("kitti-distance", "KITTI distance", "Structured", 4, ("kitti", "kitti_distance"), crop=False),
    VtabTask(
        "smallnorb-azimuth", "SmallNORB azimuth", "Structured", 18, ("smallnorb_azi", "smallnorb_azimuth"), flip=False
    ),
    VtabTask("smallnorb-elevation", "SmallNORB elevation", "Structured", 9, ("smallnorb_ele", "smallnorb_elevation")),
)  # fmt: skip
