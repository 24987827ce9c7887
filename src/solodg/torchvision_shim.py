"""Lets ``import torchvision`` succeed beside a torch build whose operators it cannot load.

A torchvision wheel built for CUDA finds no compiled operators next to a CPU build of torch, and
its import then fails on two operator names. This project uses only its Python parts (models,
transforms, datasets), so declaring those names is enough.
"""

import torch

_MISSING = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # its operators vanish when it is freed


def make_torchvision_importable() -> None:
    """Declares torchvision's missing operators, if its import fails without them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _MISSING:
            library.define(name + _SCHEMA)
        _libraries.append(library)
