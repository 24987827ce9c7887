"""Episodes: at every step one source domain is the meta-target, the others the meta-sources.

What a step draws depends only on the data, the seed and the number of the step, so a resumed run
sees the same episodes as an uninterrupted one.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from solodg.data.labelled_images import LabelledImages
from solodg.data.splits import Ints
from solodg.errors import UserError
from solodg.seeding import numpy_generator
from solodg.types import Episode


class EpisodeIndices(NamedTuple):
    """The images of an episode, as positions in the training images."""

    source: Ints  # context of the meta-source domains
    target: Ints  # context of the meta-target domain, then queries
    num_context: int


class EpisodeSampler:
    """Draws `context` images per class and domain, and `queries` more of the meta-target."""

    def __init__(
        self,
        data: LabelledImages,
        *,
        context: int,
        queries: int,
        seed: int,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        if context < 1 or queries < 1:
            raise UserError("an episode needs at least one context image and one query.")
        if len(np.unique(data.domains)) < 2:
            raise UserError(
                f"an episode needs at least two source domains, and there is "
                f"{len(np.unique(data.domains))} ({', '.join(data.domain_names)}). "
                "Make some with --pseudo-domains random or --pseudo-domains clusters."
            )
        self.context, self.queries, self.seed = context, queries, seed
        self._labels = data.labels
        self._members: dict[int, Ints] = {}
        self._cells: dict[int, list[Ints]] = {}
        for domain in np.unique(data.domains).tolist():
            members = np.flatnonzero(data.domains == domain)
            labels = data.labels[members]
            self._members[domain] = members
            self._cells[domain] = [members[labels == c] for c in np.unique(labels)]
            for cell in self._cells[domain]:
                if len(cell) < context:
                    label = int(data.labels[cell[0]])
                    name = classes[label] if classes else str(label)
                    raise UserError(
                        f"class {name!r} has {len(cell)} training image(s) in domain "
                        f"{data.domain_names[domain]!r}, fewer than the context of {context}. "
                        f"Try --context-images {len(cell)}, or add images."
                    )

        classes_of = {d: set(data.labels[self._members[d]].tolist()) for d in self._members}
        # Queries of a domain are of classes that another domain has too.
        self._query_classes = {
            d: np.array(sorted(own & set().union(*(classes_of[o] for o in classes_of if o != d))))
            for d, own in classes_of.items()
        }
        self._targets = [d for d in sorted(classes_of) if len(self._query_classes[d])]
        if not self._targets:
            raise UserError(
                "no two source domains have a class in common, so nothing can be learned across "
                f"domains ({', '.join(data.domain_names)})."
            )

    def __call__(self, step: int, rank: int = 0) -> EpisodeIndices:
        """Draws the episode of a step; each process of a distributed run has a `rank`."""
        generator = numpy_generator(self.seed, "episode", step, rank)
        meta_target = self._targets[int(generator.integers(len(self._targets)))]
        context = {
            domain: np.concatenate([_draw(generator, cell, self.context) for cell in cells])
            for domain, cells in self._cells.items()
        }
        source = np.concatenate([context[d] for d in sorted(context) if d != meta_target])
        members = self._members[meta_target]
        classes = self._query_classes[meta_target]
        members = members[np.isin(self._labels[members], classes)]
        rest = np.setdiff1d(members, context[meta_target])
        # In a domain with no more images than its context, queries are context images.
        pool = rest if len(rest) else members
        queries = _draw(generator, pool, min(self.queries, len(pool)))
        target = np.concatenate([context[meta_target], queries])
        return EpisodeIndices(source, target, len(context[meta_target]))


class EpisodeLoader:
    """Reads episodes ahead in threads, so that the model does not wait for images.

    Threads suffice: decoding and tensor work release the interpreter lock. They share the cache of
    decoded images without copies, and nothing is forked or pickled.
    """

    def __init__(
        self, data: LabelledImages, sampler: EpisodeSampler, *, workers: int = 2, ahead: int = 4
    ) -> None:
        self.data, self.sampler = data, sampler
        self.workers, self.ahead = workers, ahead

    def load(self, step: int, rank: int = 0) -> Episode:
        """Reads the images of one step."""
        drawn = self.sampler(step, rank)
        generator = numpy_generator(self.sampler.seed, "copies", step, rank)
        source, target = (self.data.drawn_batch(i, generator) for i in drawn[:2])
        return Episode(source, target, drawn.num_context)

    def episodes(self, start: int, stop: int, rank: int = 0) -> Iterator[Episode]:
        """Yields the episodes of the steps from `start` up to, not including, `stop`."""
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="episodes")
        try:
            waiting = deque(
                pool.submit(self.load, step, rank)
                for step in range(start, min(start + self.ahead, stop))
            )
            for step in range(start + self.ahead, stop + self.ahead):
                if not waiting:
                    return
                episode = waiting.popleft().result()
                if step < stop:
                    waiting.append(pool.submit(self.load, step, rank))
                yield episode
        finally:
            pool.shutdown(cancel_futures=True)


def _draw(generator: np.random.Generator, pool: Ints, count: int) -> Ints:
    return pool[generator.permutation(len(pool))[:count]]
