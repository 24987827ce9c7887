"""Single-sample generalisation: every image gets its own classifier in one forward pass.

Xiao, Zhen, Shao, Snoek, "Learning to Generalize across Domains on Single Test Samples",
ICLR 2022. With z = phi(x) the embedding, S' and T' the meta-source and meta-target context:

    p(w | T')     meta-prior: `amortiser` on the class centres of T'              (eq. 1)
    p(w_s | S')   source classifier: `source_prior` on the class centres of S'    (eq. 4)
    q(w | x, S')  posterior: `amortiser` on [style of x ; w_s], mean over samples (eq. 3, 5)
    loss          CE under q + prior_weight CE under p + kl_weight KL(q || p)     (eq. 6, 7)

It is computed in an exact form that never makes a tensor of sampled weights. docs/method.md
derives each step; the tests compare it with the plain form in float64.
"""

from typing import Any, ClassVar, Literal, TypeGuard

import torch

from solodg.algorithms.base import Algorithm
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.algorithms.solo.networks import Posterior
from solodg.algorithms.solo.prediction import SoloPrediction
from solodg.algorithms.solo.training import SoloTraining
from solodg.models.extractor import Extractor
from solodg.types import Size


class Solo(SoloTraining, SoloPrediction):
    """The paper's method. The variants of its tables are arguments.

    Two classifiers can predict after `finalize`. The posterior is written for each image, from
    the source centres and the image's style. The prior is one for all images: the meta-prior at
    the source centres. "Sampled" means M classifiers drawn from the Gaussian with fixed noise.

    | call                          | input    | gives                                           |
    |-------------------------------|----------|-------------------------------------------------|
    | `forward`                     | images   | logits of the posterior's mean: the fastest,    |
    |                               |          | for the class alone                             |
    | `logits`                      | features | the same, e.g. with another image's style       |
    | `probabilities`               | images   | softmax averaged over the sampled posterior:    |
    |                               |          | calibrated, for everything that is reported     |
    | `outputs`                     | images   | `forward`, `probabilities` and the prior's      |
    |                               |          | probabilities (`before`), in one backbone pass  |
    | `sampled_probabilities`       | features | softmax of each posterior sample, for spread    |
    | `prior_sampled_probabilities` | features | softmax of each prior sample                    |
    | `prior_logits`                | features | logits of the prior's mean: without adaptation  |
    | `classifiers`                 | images   | the posterior itself, mean and scale            |
    | `classifiers_from`            | features | the same                                        |
    | `prior_classifier`            | -        | the prior itself, mean and scale                |

    "features" is what `features(images)` returns, before `modulate`.

    Arguments:
        backbone: extractor of embedding and style.
        num_classes: number of classes C.
        posterior: "hierarchical" is the paper's (eq. 5); "concatenation" puts the centres in the
            place of samples of w_s (eq. 3); "invariant" does not see the image (eq. 2).
        meta_learning: False: S' and T' are both all source domains (table 3).
        turns: how many domains of an episode are meta-target within one step. "one": the paper's,
            the episode's target. "all": each domain in turn, with all images as queries, which
            gives more supervision for the same images.
        base: "linear": the written mean is a residual, starting at zero, on a learned linear
            classifier, without which training from random weights does not start. "none": the
            written mean alone, as in the paper.
        hidden: width H of the hidden layers. None: min(D, 256). "embedding": D, the authors' width.
        pre_scale_start: initial pre-scale of both Gaussian writers, whatever their input; the
            scale is its softplus. None: the default initialisation of a linear layer.
        source_samples: L, samples of w_s in training. At test w_s is its mean.
        posterior_samples: M, sampled logits for the cross-entropy under the posterior.
        prior_samples: N, sampled logits for the cross-entropy under the meta-prior.
        test_samples: classifiers that `probabilities` averages over; even, in pairs of opposite
            noise.
        prior_weight: weight of the cross-entropy under the meta-prior; 0 leaves it out.
        kl_weight: weight of KL(q || p); 0 leaves it out.
        kl_reduction: "mean" over queries, so that the weight does not depend on the batch size,
            or the paper's "sum".
        kl_warmup: updates in which the weight of the KL grows from zero to its value.
        style_dim: width of the style, where a subclass changes it. None: that of the backbone.
    """

    search: ClassVar[dict[str, SearchRange]] = {
        "kl_weight": LogUniform(1e-5, 1e-2),
        "prior_weight": LogUniform(0.1, 10.0),
    }
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {},
        "invariant": {"posterior": "invariant"},
        "no-hierarchy": {"posterior": "concatenation"},
        "no-prior-supervision": {"prior_weight": 0.0},
        "no-meta-learning": {"meta_learning": False},
        "literal": {
            "turns": "one",
            "base": "none",
            "hidden": "embedding",
            "source_samples": 10,
            "pre_scale_start": None,
            "kl_weight": 1e-5,
            "kl_reduction": "sum",
            "kl_warmup": 0,
        },
    }

    def __init__(
        self,
        backbone: Extractor,
        *,
        num_classes: int,
        posterior: Posterior = "hierarchical",
        meta_learning: bool = True,
        turns: Literal["one", "all"] = "all",
        base: Literal["linear", "none"] = "linear",
        hidden: Size | Literal["embedding"] | None = None,
        pre_scale_start: float | None = -4.0,
        source_samples: Size = 4,
        posterior_samples: Size = 10,
        prior_samples: Size = 10,
        test_samples: Size = 32,
        prior_weight: float = 1.0,
        kl_weight: float = 1e-4,
        kl_reduction: Literal["mean", "sum"] = "mean",
        kl_warmup: int = 500,
        style_dim: Size | None = None,
    ) -> None:
        super().__init__(backbone, num_classes=num_classes)
        width = _hidden_width(hidden, backbone.embedding_dim)
        if min(width, source_samples, posterior_samples, prior_samples) < 1:
            raise ValueError("hidden and the numbers of samples must be at least 1")
        if test_samples < 2 or test_samples % 2:
            raise ValueError(f"test_samples must be even and at least 2, not {test_samples}")
        self.posterior, self.meta_learning, self.turns = posterior, meta_learning, turns
        self.source_samples, self.posterior_samples = source_samples, posterior_samples
        self.prior_samples = prior_samples
        self.prior_weight, self.kl_weight = prior_weight, kl_weight
        self.kl_reduction, self.kl_warmup = kl_reduction, kl_warmup
        self._build_networks(
            style_dim or backbone.style_dim,
            width,
            base=base == "linear",
            pre_scale_start=pre_scale_start,
        )
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._register_buffers(backbone.embedding_dim, width, test_samples)


def _hidden_width(hidden: int | Literal["embedding"] | None, embedding_dim: int) -> int:
    if hidden == "embedding":
        return embedding_dim
    return min(embedding_dim, 256) if hidden is None else hidden


def adapts(algorithm: Algorithm) -> TypeGuard[Solo]:
    """Returns whether an algorithm has a classifier for each image and one for all images."""
    return isinstance(algorithm, Solo) and algorithm.posterior != "invariant"
