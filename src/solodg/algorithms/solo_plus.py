"""`solo_plus`, the default: a linear classifier on images that are read as each of them needs.

What adapts to the single image is how the backbone reads it: its rotation is undone
(`models/pose.py`), and its own statistics are mixed into every BatchNorm (`models/image_norm.py`).
Each of the two is used only if it helps on source domains that are held out (`runs/evidence.py`).
The classifier is the same for all images: one written for each image, as in `solo`, has gained
nothing over it (docs/adaptation.md).
"""

from typing import Any, ClassVar

from solodg.algorithms.erm import ERM


class SoloPlus(ERM):
    """ERM whose backbone adapts to each image, as far as held-out source domains say it helps."""

    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": ERM.recipes["random"] | {"image_norm": "auto", "pose": "auto"},
        "pretrained": {"image_norm": "auto", "pose": "off"},
    }
