"""Test-time methods by name. To add one: a file, an entry here, a row in docs/algorithms.md."""

from solodg.adapters.base import Adapter
from solodg.adapters.bn import BatchStatistics
from solodg.adapters.lame import Lame
from solodg.adapters.memo import Memo
from solodg.adapters.none import NoAdapter
from solodg.adapters.shot import Shot
from solodg.adapters.t3a import T3A
from solodg.adapters.tent import Tent
from solodg.adapters.ttt import TestTimeTraining

ADAPTERS: dict[str, type[Adapter]] = {
    "none": NoAdapter,
    "bn": BatchStatistics,
    "tent": Tent,
    "t3a": T3A,
    "memo": Memo,
    "ttt": TestTimeTraining,
    "shot": Shot,
    "lame": Lame,
}

__all__ = ["ADAPTERS", "Adapter"]
