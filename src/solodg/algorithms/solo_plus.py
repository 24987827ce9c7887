"""`solo_plus`, the default: a linear classifier on images that are read as each of them needs.

What adapts to the single image is how the backbone reads it: its rotation is undone
(`models/pose.py`), its own statistics are mixed into every BatchNorm (`models/image_norm.py`), and
it is read in several views (`models/views.py`). Each is used only if it helps on source domains
that are held out (`runs/evidence.py`). The classifier is the same for all images: one written for
each image, as in `solo`, has gained nothing over it (docs/adaptation.md). On a frozen backbone it
is solved in closed form (`ridge.py`).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from solodg.algorithms.erm import ERM
from solodg.algorithms.ridge import Ridge
from solodg.errors import UserError
from solodg.models.extractor import Extractor


class SoloPlus(Ridge):
    """A linear classifier on a backbone that adapts to each image, as far as this helps.

    Held-out source domains say whether it helps. `classifier` is trained by cross-entropy
    ("linear") or solved in closed form ("ridge"), the latter for frozen backbones. With ridge and
    `early_exit`, an image whose class is clear after some readings is not read again.
    """

    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": ERM.recipes["random"] | {"image_norm": "auto", "pose": "auto"},
        "pretrained": {"image_norm": "auto", "pose": "off"},
        "frozen": {
            "image_norm": "auto",
            "pose": "off",
            "arguments": {"classifier": "ridge", "early_exit": True},
        },
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        classifier: Literal["linear", "ridge"] = "linear",
        early_exit: bool = False,
    ) -> None:
        ERM.__init__(self, backbone, num_classes=num_classes)
        self.closed_form = classifier == "ridge"
        if early_exit and not self.closed_form:
            raise UserError(
                "--set early_exit=true: a trained classifier reads each image in all readings. Add "
                "--set classifier=ridge, with --freeze-backbone."
            )
        if self.closed_form:
            self._become_closed_form(early_exit)

    @classmethod
    def is_closed_form(cls, arguments: Mapping[str, Any]) -> bool:
        """Returns whether the classifier is solved and not trained."""
        return arguments.get("classifier") == "ridge"

    def embed(self, x: Tensor) -> Tensor:
        """Returns what is classified (B, D): the embedding, square-rooted for ridge."""
        return super().embed(x) if self.closed_form else ERM.embed(self, x)
