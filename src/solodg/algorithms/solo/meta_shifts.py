"""Meta-target shifts inside an episode: which images are queries, and which centres they get.

A shift names a meta-target domain T' and meta-source domains S'. The classifier of a query is
written from the class centres of S' and compared with the one that is written from those of T'.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from solodg.algorithms.centres import Centres, CentreSums
from solodg.types import Batch, Episode


class MetaShift(NamedTuple):
    """Queries of a meta-target domain, with the class centres of meta-source and meta-target."""

    queries: Tensor  # (Q,) positions in the merged episode
    source: Centres  # of S'
    target: Centres  # of T'


def episode_shift(episode: Episode, merged: Batch, z: Tensor, num_classes: int) -> MetaShift:
    """Returns the paper's shift: the episode's target is T', its source is S'.

    `z` (B, D) are the embeddings of the merged episode. The first `num_context` target images are
    context, the others queries; without that number all of them are both.
    """
    start, end = len(episode.source.y), len(merged.y)
    context_end = end if episode.num_context is None else start + episode.num_context
    positions = torch.arange(end, device=z.device)
    queries = positions[start:] if context_end == end else positions[context_end:]
    source = CentreSums(num_classes).add(z[:start], *episode.source[1:])
    context = slice(start, context_end)
    target = CentreSums(num_classes)
    target.add(z[context], merged.y[context], merged.domain[context])
    return MetaShift(queries, source.over(source.domains), target.over(target.domains))


def shift_to_each_domain(merged: Batch, z: Tensor, num_classes: int) -> list[MetaShift]:
    """Returns one shift for each domain as T', with the others as S'; all images are queries."""
    positions = torch.arange(len(merged.y), device=z.device)
    sums = CentreSums(num_classes).add(z, merged.y, merged.domain)
    return [
        MetaShift(
            positions[merged.domain == domain],
            sums.over([other for other in sums.domains if other != domain]),
            sums.over([domain]),
        )
        for domain in sums.domains
    ]


def no_shift(merged: Batch, z: Tensor, num_classes: int) -> MetaShift:
    """Returns the case without meta-learning: S' and T' are both all domains."""
    sums = CentreSums(num_classes).add(z, merged.y, merged.domain)
    centres = sums.over(sums.domains)
    return MetaShift(torch.arange(len(merged.y), device=z.device), centres, centres)
