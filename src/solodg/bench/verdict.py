"""Says whether a record and its repetition agree: to the last bit, within seeds, or not at all."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from solodg.bench.verify import recorded_config
from solodg.types import Record

_MADE_BY_FLOATS = ("rotated-mnist", "rotated-fashion-mnist", "svhn-mnist")


class Agreement(StrEnum):
    """How a repetition agrees with its record."""

    EQUAL = "equal to the last bit"
    OTHER_MACHINE = "the same data on another kind of machine"
    OTHER_DATA_OR_CODE = "other data or code"


@dataclass(frozen=True)
class Verdict:
    """How a repetition agrees with its record, why, and whether that is good enough."""

    agreement: Agreement
    reason: str
    ok: bool
    spread: dict[str, float] = field(default_factory=dict)  # of seeds, by metric, where known

    def __str__(self) -> str:
        text = f"{self.agreement}: {self.reason}" if self.reason else f"{self.agreement}."
        return text[0].upper() + text[1:]


def compare(record: Record, repeated: Record, recorded: Iterable[Record]) -> Verdict:
    """Compares a record with its repetition.

    `recorded` are the records of the same file. Those that differ from the record in the seed alone
    say by how much seeds differ.
    """
    before, now = record.data.get("fingerprint"), repeated.data.get("fingerprint")
    if before != now:
        hint = ""
        if record.dataset in _MADE_BY_FLOATS and "capability" not in record.machine:
            hint = " The record is older than images that every processor makes alike."
        reason = f"the fingerprint of the images was {before}, is {now}.{hint}"
        return Verdict(Agreement.OTHER_DATA_OR_CODE, reason, ok=False)
    differing = differences(record, repeated)
    if not differing:
        return Verdict(Agreement.EQUAL, "", ok=True)
    if record.versions.get("solodg") != repeated.versions.get("solodg"):
        reason = "the version of solodg is another, and so are the numbers."
        return Verdict(Agreement.OTHER_DATA_OR_CODE, reason, ok=False)
    if not _known_changes(record, repeated):
        reason = "data, versions and kind of machine are the same, but the numbers differ."
        if "capability" not in record.machine:
            reason = (
                "data and versions are the same, and the record does not say what its processor "
                "can do, but the numbers differ."
            )
        return Verdict(Agreement.OTHER_DATA_OR_CODE, reason, ok=False)
    return _beside_seeds(differing, _by_seed(record, recorded))


def _beside_seeds(differing: dict[str, float], seeds: dict[int, dict[str, float]]) -> Verdict:
    """Compares what another kind of machine changed with how far seeds lie apart."""
    by = ", ".join(f"{name} by {abs(value):.2g}" for name, value in differing.items())
    if len(seeds) < 3:
        reason = (
            f"the numbers differ ({by}). Whether this is inside the spread of seeds is unknown: "
            f"the file has {len(seeds) - 1} other seed(s) of this run, and two are needed."
        )
        return Verdict(Agreement.OTHER_MACHINE, reason, ok=False)
    shared = set[str].intersection(*(set(metrics) for metrics in seeds.values()))
    values = {name: [metrics[name] for metrics in seeds.values()] for name in shared}
    spread = {name: max(found) - min(found) for name, found in values.items()}
    # Written so that NaN is outside.
    outside = [n for n, value in differing.items() if not abs(value) <= spread.get(n, 0.0)]
    side = "outside" if outside else "inside"
    metrics_outside = f" ({', '.join(outside)})" if outside else ""
    apart = ", ".join(f"{spread.get(name, 0.0):.2g} in {name}" for name in differing)
    reason = (
        f"the numbers differ ({by}). This is {side} the spread of seeds{metrics_outside}: "
        f"{len(seeds)} seeds differ by up to {apart}."
    )
    return Verdict(Agreement.OTHER_MACHINE, reason, ok=not outside, spread=spread)


def differences(record: Record, repeated: Record) -> dict[str, float]:
    """Returns by how much the metrics changed: those that did, NaN for one that is missing now."""
    now = {name: repeated.metrics.get(name, float("nan")) for name in record.metrics}
    return {name: now[name] - value for name, value in record.metrics.items() if now[name] != value}


def environment_changes(record: Record, repeated: Record) -> list[str]:
    """Returns what changed in the versions and in the kind of machine, a sentence for each."""
    changes = []
    for part in ("versions", "machine"):
        before: dict[str, Any] = getattr(record, part)
        now: dict[str, Any] = getattr(repeated, part)
        for key in dict.fromkeys([*before, *now]):
            if before.get(key) != now.get(key):
                was, is_now = (x.get(key, "not recorded") for x in (before, now))
                changes.append(f"{part}: {key} was {was}, is {is_now}")
    return changes


def _known_changes(record: Record, repeated: Record) -> bool:
    """Returns whether a version or a fact about the machine that the record holds has changed."""
    return any(
        now.get(key) != value
        for before, now in (
            (record.versions, repeated.versions),
            (record.machine, repeated.machine),
        )
        for key, value in before.items()
    )


def _by_seed(record: Record, recorded: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Returns the metrics of the record and of the runs that differ from it in the seed alone."""
    same = _but_for_seed(record)
    found = {other.seed: other.metrics for other in recorded if _but_for_seed(other) == same}
    return found | {record.seed: record.metrics}


def _but_for_seed(record: Record) -> dict[str, Any]:
    """Returns the settings of a record without what the seed decides."""
    config = {k: v for k, v in recorded_config(record).items() if k != "seed"}
    stream = {k: v for k, v in record.stream.items() if k != "order_seed"}
    scored = {"adapter": record.adapter, "domain": record.domain, "role": record.role}
    return scored | {"config": config, "stream": stream}
