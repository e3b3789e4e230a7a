"""VTAB-1k's 19 tasks: what they are called, which of three groups they are in, what training may do to their images.

Facts of "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark" (arXiv:1910.04867)
and, for crops and flips, of BiT (arXiv:1912.11370), whose pre-processing the paper follows. The score is the mean over
the tasks: `vitkit.evaluate.standings` computes it, and that of each group.
"""

from typing import Literal, NamedTuple

Group = Literal["Natural", "Specialized", "Structured"]
GROUPS: tuple[Group, ...] = ("Natural", "Specialized", "Structured")


class Task(NamedTuple):
    """One task. `folders` are the names that releases give its folder, the commonest first.

    Flips and crops are left out where they would change the label (BiT, supplement F).
    """

    name: str
    title: str
    group: Group
    classes: int
    folders: tuple[str, ...]
    flip: bool = True
    crop: bool = True


TASKS = (
    Task("caltech101", "Caltech101", "Natural", 102, ("caltech101",)),
    Task("cifar100", "CIFAR-100", "Natural", 100, ("cifar", "cifar100")),
    Task("dtd", "DTD", "Natural", 47, ("dtd",)),
    Task("flowers102", "Flowers102", "Natural", 102, ("oxford_flowers102", "flowers102")),
    Task("pets", "Pets", "Natural", 37, ("oxford_iiit_pet", "oxford_pet", "pets")),
    Task("svhn", "SVHN", "Natural", 10, ("svhn", "svhn_cropped")),
    Task("sun397", "Sun397", "Natural", 397, ("sun397",)),
    Task("patch-camelyon", "Patch Camelyon", "Specialized", 2, ("patch_camelyon", "pcam")),
    Task("eurosat", "EuroSAT", "Specialized", 10, ("eurosat",)),
    Task("resisc45", "Resisc45", "Specialized", 45, ("resisc45",)),
    Task("retinopathy", "Retinopathy", "Specialized", 5, ("diabetic_retinopathy", "retinopathy")),
    Task("clevr-count", "Clevr count", "Structured", 8, ("clevr_count",), crop=False),
    Task("clevr-distance", "Clevr distance", "Structured", 6, ("clevr_dist", "clevr_distance"), crop=False),
    Task("dmlab", "DMLab", "Structured", 6, ("dmlab",), crop=False),
    Task(
        "dsprites-location", "dSprites location", "Structured", 16, ("dsprites_loc", "dsprites_location"),
        flip=False, crop=False,
    ),
    Task(
        "dsprites-orientation", "dSprites orientation", "Structured", 16, ("dsprites_ori", "dsprites_orientation"),
        flip=False,
    ),
    Task("kitti-distance", "KITTI distance", "Structured", 4, ("kitti", "kitti_distance"), crop=False),
    Task(
        "smallnorb-azimuth", "SmallNORB azimuth", "Structured", 18, ("smallnorb_azi", "smallnorb_azimuth"), flip=False
    ),
    Task("smallnorb-elevation", "SmallNORB elevation", "Structured", 9, ("smallnorb_ele", "smallnorb_elevation")),
)  # fmt: skip
