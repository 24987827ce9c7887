"""Training-time methods by name. To add one: a file, an entry here, a row in docs/algorithms.md."""

import inspect
from typing import Any

from solodg.algorithms.base import Algorithm
from solodg.algorithms.coral import CORAL
from solodg.algorithms.csd import CSD
from solodg.algorithms.da_erm import DAERM
from solodg.algorithms.dson import DSON
from solodg.algorithms.entropy_regularisation import EntropyRegularisation
from solodg.algorithms.erm import ERM
from solodg.algorithms.fishr import Fishr
from solodg.algorithms.group_dro import GroupDRO
from solodg.algorithms.jigen import JiGen
from solodg.algorithms.l2a_ot import L2AOT
from solodg.algorithms.masf import MASF
from solodg.algorithms.miro import MIRO
from solodg.algorithms.mixstyle import MixStyle
from solodg.algorithms.mldg import MLDG
from solodg.algorithms.ridge import Ridge
from solodg.algorithms.rsc import RSC
from solodg.algorithms.solo import Solo
from solodg.algorithms.solo_code import SoloCode
from solodg.algorithms.solo_plus import SoloPlus
from solodg.algorithms.ttt import TTT
from solodg.algorithms.vrex import VREx
from solodg.models.extractor import Extractor

ALGORITHMS: dict[str, type[Algorithm]] = {
    "erm": ERM,
    "coral": CORAL,
    "csd": CSD,
    "jigen": JiGen,
    "mixstyle": MixStyle,
    "mldg": MLDG,
    "ridge": Ridge,
    "rsc": RSC,
    "solo": Solo,
    "solo_code": SoloCode,
    "solo_plus": SoloPlus,
    "ttt": TTT,
    "masf": MASF,
    "entropy_regularisation": EntropyRegularisation,
    "dson": DSON,
    "da_erm": DAERM,
    "l2a_ot": L2AOT,
    "miro": MIRO,
    "group_dro": GroupDRO,
    "vrex": VREx,
    "fishr": Fishr,
}


def build_algorithm(
    name: str, backbone: Extractor, *, num_classes: int, num_domains: int, **arguments: Any
) -> Algorithm:
    """Builds an algorithm by name.

    `num_domains` goes to those that have parameters for each source domain.
    """
    kind = ALGORITHMS[name]
    if "num_domains" in inspect.signature(kind).parameters:
        arguments["num_domains"] = num_domains
    return kind(backbone, num_classes=num_classes, **arguments)


__all__ = ["ALGORITHMS", "Algorithm", "build_algorithm"]
