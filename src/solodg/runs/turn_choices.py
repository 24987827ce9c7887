"""What the runs that leave one domain out each choose for the final model: steps and parts."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from solodg.readings import ImageNorm, readings_of
from solodg.runs.evidence import Evidence
from solodg.runs.open_parts import PartDecision


def chosen_steps(selected: Sequence[int]) -> int:
    """Returns the median of the selected steps, rounded up between two."""
    return int(statistics.median(selected) + 0.5)


def evidence_of_turns(turns: Mapping[str, Evidence]) -> Evidence:
    """Returns the evidence of the final model from that of the turns, by the domain left out.

    A part of the adaptation is on if it is in more than half of the turns. Of several settings of
    image norm, the one that most of these turns use is taken; of equally many, the one with fewer
    readings.
    """
    names = dict.fromkeys(part.part for found in turns.values() for part in found.parts)
    parts = [_decision(name, turns) for name in names]
    on = {part.part: part.on for part in parts}
    # A part that was given, and not open, is the same in all turns.
    poses = [found.pose for found in turns.values()]
    norms = [found.image_norm or None for found in turns.values()]
    return Evidence(
        rests_on=_basis(turns),
        parts=parts,
        accuracy={
            f"{held} (without {left_out})": accuracies
            for left_out, found in turns.items()
            for held, accuracies in found.accuracy.items()
        },
        image_norm=_most_used(norms) if on.get("image norm", any(norms)) else None,
        pose=on.get("pose", any(poses)),
        seconds=0.0,  # of this run: the turns have their own
    )


def _decision(name: str, turns: Mapping[str, Evidence]) -> PartDecision:
    """Decides about one part: it is on if it is in more than half of the turns."""
    found = [part for each in turns.values() for part in each.parts if part.part == name]
    count = sum(part.on for part in found)
    gains = [part.gain for part in found if part.gain is not None]
    why = f"as it was on in {count} of {len(turns)} turns, each without one domain"
    gain = None
    if gains:
        gain = round(statistics.mean(gains), 2)
        why += f" (mean gain on held-out source domains {gain:+.1f} points)"
    else:
        why += f" ({found[0].why})"
    return PartDecision(part=name, on=2 * count > len(turns), why=why, gain=gain)


def _basis(turns: Mapping[str, Evidence]) -> str:
    """Says what the evidence rests on."""
    first = next(iter(turns.values()))
    return (
        f"{len(turns)} turns, each without one of {', '.join(turns)}, decided by majority; in "
        f"each: {first.rests_on}"
    )


def _most_used(settings: Sequence[ImageNorm]) -> ImageNorm:
    counts = Counter(setting for setting in settings if setting is not None)
    order = sorted(counts, key=lambda each: (-counts[each], len(readings_of(each)), str(each)))
    return order[0]
