"""Passes through a network: its features of images, in pieces and in one reading after another.

A large batch is slow, since its maps leave the processor's cache. So at inference it goes through
the network piece by piece.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.models.image_norm import one_reading
from solodg.models.stages import Network, Stages
from solodg.types import Features


def features(net: Network, prepared: Tensor, *, styled: bool) -> tuple[Tensor, ...]:
    """Returns the embedding (B, D) of prepared images, and if wanted their style (B, S)."""
    if not styled:
        return (net.embed(prepared),)
    stages: Stages = net(prepared)
    return stages.embedding, stages.style()


def every_reading(
    net: Network, pieces: Iterable[dict[str, Tensor]], views: Sequence[str], *, styled: bool
) -> list[Tensor]:
    """Returns the embedding (R, B, D), and if wanted the style (R, B, S), of every reading.

    `pieces` are prepared images in each view, `views` that of each reading.
    """
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in views]
    for piece in pieces:
        for place, view in enumerate(views):
            with one_reading(place):
                found[place].append(features(net, piece[view], styled=styled))
    return [torch.stack(each) for each in zip(*map(_joined, found), strict=True)]


def in_reading(net: Network, pieces: Iterable[Tensor], place: int, *, styled: bool) -> list[Tensor]:
    """Returns the features of prepared images in the reading at a place, piece by piece."""
    with one_reading(place):
        return _joined([features(net, piece, styled=styled) for piece in pieces])


def mean_reading(each: Tensor) -> Tensor:
    """Averages features over the readings: (R, B, D) -> (B, D)."""
    return each[0] if len(each) == 1 else each.mean(0)


def mean_features(embeddings: Tensor, styles: Tensor) -> Features:
    """Averages embedding (R, B, D) and style (R, B, S) over the readings."""
    return Features(mean_reading(embeddings), mean_reading(styles))


def divisible(net: nn.Module) -> bool:
    """Returns whether a batch may be divided: no gradients, and each image for itself.

    Adapters give BatchNorms the statistics of a whole batch, and a donor is another image of it.
    """
    if torch.is_grad_enabled() or torch._C._get_tracing_state() is not None:
        return False
    norms = (m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return not any(
        norm.training or norm._forward_pre_hooks or getattr(norm, "donor", None) is not None
        for norm in norms
    )


def probed(net: Network, run: Callable[[], Stages], image_size: int) -> tuple[Stages, int]:
    """Runs the network; returns its stages and how many numbers its largest map has.

    Raises `UserError` if the network cannot take images of this size.
    """
    sizes = [0]

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    hooks = [module.register_forward_hook(note) for module in net.modules()]
    try:
        return run(), max(sizes)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"this backbone cannot take images of {image_size} pixels ({reason}). "
            "Try a larger --image-size, e.g. 224."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _joined(pieces: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]
