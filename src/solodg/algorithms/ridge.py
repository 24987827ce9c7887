"""Ridge regression on the features of a frozen backbone, in closed form: no steps, no step size.

The embedding of every reading is square-rooted (with its sign), which brings out the many small
features. In training each reading is an image of its own; at test the readings of an image are
averaged. How much the weights shrink is chosen by leaving each source domain out. Regression gives
scores and no probabilities: one factor, chosen on source validation images that are classified
without their own domain, makes logits of them.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.base import Batches, Outputs
from solodg.algorithms.early_exit import (
    LARGEST,
    NEVER,
    MarginChoice,
    mean_until_clear,
    read_until_clear,
)
from solodg.algorithms.erm import ERM
from solodg.algorithms.ridge_sums import RidgeSums, total
from solodg.models.extractor import Extractor, ReadRows

SHRINKAGES = (0.1, 0.3, 1.0, 3.0, 10.0)
DEFAULT_SHRINKAGE = 1.0  # where there is no second domain to choose it on
DomainSums = dict[int, list[RidgeSums]]  # source domain -> sums of each reading


class Ridge(ERM):
    """A linear classifier on square-rooted embeddings, solved and not trained.

    With `early_exit`, an image whose class is clear after some readings is not read again.
    """

    closed_form = True

    def __init__(self, backbone: Extractor, *, num_classes: int, early_exit: bool = False) -> None:
        super().__init__(backbone, num_classes=num_classes)
        self._become_closed_form(early_exit)

    def _become_closed_form(self, early_exit: bool) -> None:
        self.requires_grad_(False)
        self.early_exit = early_exit
        if early_exit:
            self.register_buffer("margin", torch.tensor(NEVER))
        self.margin: Tensor  # the gap between logits from which on an image is not read again

    @property
    def exits_early(self) -> bool:  # type: ignore[override]
        """Returns whether some images are not read in every reading."""
        return self.closed_form and self.early_exit and float(self.margin) < LARGEST

    def embed(self, x: Tensor) -> Tensor:
        """Returns the square-rooted embedding (B, D), averaged over the readings that it needs."""
        return self._read(x)[0] if self.exits_early else self._mean(x)

    def _mean(self, x: Tensor) -> Tensor:
        """Returns the mean (B, D) over all readings."""
        return square_rooted(self.backbone.embed_each(x)).mean(0)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean (B, D) over the readings that each image needs, and how many (B,)."""
        readings = [partial(_square_rooted_rows, read) for read in self.backbone.each_reading(x)]
        return read_until_clear(readings, self.classifier, float(self.margin))

    def outputs(self, x: Tensor) -> Outputs:
        """Returns logits and probabilities, and with early exit how often each image was read."""
        if not self.exits_early:
            return super().outputs(x)
        z, readings = self._read(x)
        logits = self.classifier(z)
        return Outputs(logits, torch.softmax(logits, dim=1), None, readings)

    @torch.no_grad()
    def solve(self, train: Batches, val: Batches) -> None:
        """Computes the classifier from source training images, and calibrates it on `val`."""
        if self.early_exit:
            self.margin.fill_(NEVER)
        by_reading = self.domain_sums(train)
        sums = {domain: total(readings) for domain, readings in by_reading.items()}
        shrinkage, without = DEFAULT_SHRINKAGE, {}
        if len(sums) > 1:
            without = {out: total([s for d, s in sums.items() if d != out]) for out in sums}
            shrinkage = self._best_shrinkage(without, train)
        weight, bias = total(list(sums.values())).solve(shrinkage)
        self._set(weight, bias)
        solutions = {domain: rest.solve(shrinkage) for domain, rest in without.items()}
        several = self.num_classes > 1 and len(next(iter(by_reading.values()))) > 1
        chosen = self.early_exit and several and bool(solutions)
        margin = self._best_margin(solutions, train) if chosen else NEVER
        factor = _best_factor(*self._scores(solutions, val, margin))
        self._set(factor * weight, factor * bias)
        if self.early_exit:
            self.margin.fill_(min(factor * margin, NEVER))

    @torch.no_grad()
    def solve_without(self, sums: DomainSums, domain: int, readings: Sequence[int]) -> None:
        """Computes the classifier from the sums of these readings of all domains but one."""
        rest = [of[number] for d, of in sums.items() if d != domain for number in readings]
        self._set(*total(rest).solve(DEFAULT_SHRINKAGE))

    @torch.no_grad()
    def domain_sums(self, train: Batches) -> DomainSums:
        """Returns the sums of each source domain and reading; classes of a domain weigh the same.

        Sums of more domains, or of fewer readings, need no second pass over the images.
        """
        counts = self._class_counts(train)
        sums: DomainSums = {}
        for batch in train():
            for domain in batch.domain.unique().tolist():
                own = batch.domain == domain
                each = square_rooted(self.backbone.embed_each(batch.x[own]))  # (R, B, D)
                y = batch.y[own]
                weight = (1 / counts[domain][y]).to(each.dtype)
                if domain not in sums:
                    zero = (each.shape[2], self.num_classes, each.device)
                    sums[domain] = [RidgeSums.zero(*zero) for _ in each]
                for of_reading, z in zip(sums[domain], each, strict=True):
                    of_reading.add_images(z, y, weight)
        return dict(sorted(sums.items()))

    def _class_counts(self, train: Batches) -> dict[int, Tensor]:
        """Returns how many images of each class (C,) each source domain has."""
        counts: dict[int, Tensor] = {}
        for batch in train():
            for domain in batch.domain.unique().tolist():
                found = torch.bincount(batch.y[batch.domain == domain], minlength=self.num_classes)
                counts[domain] = counts.get(domain, torch.zeros_like(found)) + found
        return counts

    def _set(self, weight: Tensor, bias: Tensor) -> None:
        self.classifier.weight.copy_(weight)
        self.classifier.bias.copy_(bias)

    def _best_shrinkage(self, without: dict[int, RidgeSums], train: Batches) -> float:
        """Returns the shrinkage with the best mean accuracy on domains that are left out."""
        solved = {d: [s.solve(value) for value in SHRINKAGES] for d, s in without.items()}
        right = {domain: torch.zeros(len(SHRINKAGES)) for domain in without}
        images = dict.fromkeys(without, 0)
        for batch in train():
            z = self.embed(batch.x).double()
            for domain in batch.domain.unique().tolist():
                own = batch.domain == domain
                images[domain] += int(own.sum())
                for place, (weight, bias) in enumerate(solved[domain]):
                    chosen = (z[own] @ weight.T + bias).argmax(1)
                    right[domain][place] += (chosen == batch.y[own]).sum().cpu()
        mean = torch.stack([right[d] / images[d] for d in without]).mean(0)
        return SHRINKAGES[int(mean.argmax())]

    def _best_margin(self, solutions: dict[int, tuple[Tensor, Tensor]], train: Batches) -> float:
        """Returns the margin of scores for early exit, chosen on domains that are left out."""
        choice = MarginChoice(list(solutions))
        for batch in train():
            each = square_rooted(self.backbone.embed_each(batch.x)).double()  # (R, B, D)
            for domain in batch.domain.unique().tolist():
                weight, bias = solutions[domain]
                own = batch.domain == domain
                choice.add(domain, each[:, own] @ weight.T + bias, batch.y[own])
        return choice.best()

    def _scores(
        self, solutions: dict[int, tuple[Tensor, Tensor]], val: Batches, margin: float
    ) -> tuple[Tensor, Tensor]:
        """Returns scores (N, C) and classes (N,) of images, each without its own domain.

        Images are read as often as at test, with this margin.
        """
        scores, labels = [], []
        for batch in val():
            each = square_rooted(self.backbone.embed_each(batch.x))  # (R, B, D)
            logits = self.classifier(each).double()
            for domain, (weight, bias) in solutions.items():
                own = batch.domain == domain
                logits[:, own] = each[:, own].double() @ weight.T + bias
            scores.append(mean_until_clear(logits, margin))
            labels.append(batch.y)
        return torch.cat(scores), torch.cat(labels)


def square_rooted(z: Tensor) -> Tensor:
    """Returns the square root of the size of each number, with its sign."""
    return z.sign() * z.abs().sqrt()


def _square_rooted_rows(read: ReadRows, rows: Tensor | None) -> Tensor:
    return square_rooted(read(rows))


def _best_factor(scores: Tensor, labels: Tensor) -> float:
    """Returns the factor of the scores with the lowest cross-entropy."""
    from scipy.optimize import minimize_scalar  # late: it takes half a second to import

    def cross_entropy(log_factor: float) -> float:
        return float(F.cross_entropy(math.exp(log_factor) * scores, labels))

    found = minimize_scalar(cross_entropy, bounds=(-3.0, 6.0), method="bounded")
    return math.exp(float(found.x))
