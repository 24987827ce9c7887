"""Domain shifts inside an episode: who is asked, and what is known to whom."""

from typing import NamedTuple

import torch
from torch import Tensor

from solodg.algorithms.centres import Centres, CentreSums
from solodg.types import Batch, Episode


class Turn(NamedTuple):
    """One shift: queries of a domain T' that the source S' does not hold."""

    queries: Tensor  # (Q,) positions in the merged episode
    source: Centres  # of S'
    target: Centres  # of T'


def the_episodes_own(episode: Episode, merged: Batch, z: Tensor, num_classes: int) -> Turn:
    """The paper's: the episode's target domain is asked; its context comes first, if it has one."""
    start, end = len(episode.source.y), len(merged.y)
    context_end = end if episode.num_context is None else start + episode.num_context
    everyone = torch.arange(end, device=z.device)
    queries = everyone[start:] if context_end == end else everyone[context_end:]
    source = CentreSums(num_classes).add(z[:start], *episode.source[1:])
    context = slice(start, context_end)
    target = CentreSums(num_classes)
    target.add(z[context], merged.y[context], merged.domain[context])
    return Turn(queries, source.over(source.domains), target.over(target.domains))


def every_domain_in_turn(merged: Batch, z: Tensor, num_classes: int) -> list[Turn]:
    """Each domain once as T', the others being S': all images are queries."""
    everyone = torch.arange(len(merged.y), device=z.device)
    sums = CentreSums(num_classes).add(z, merged.y, merged.domain)
    return [
        Turn(
            everyone[merged.domain == domain],
            sums.over([other for other in sums.domains if other != domain]),
            sums.over([domain]),
        )
        for domain in sums.domains
    ]


def without_shift(merged: Batch, z: Tensor, num_classes: int) -> Turn:
    """Without meta-learning: S' and T' are both all domains."""
    sums = CentreSums(num_classes).add(z, merged.y, merged.domain)
    centres = sums.over(sums.domains)
    return Turn(torch.arange(len(merged.y), device=z.device), centres, centres)
