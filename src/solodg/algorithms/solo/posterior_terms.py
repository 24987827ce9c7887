"""Logit variance and KL of one classifier per image, computed in pieces that stay in cache.

Image and class have w ~ N(m, s^2) with m = A h + a and s = softplus(P h + p) + MIN_SCALE; the class
has a prior N(m', s'^2). The loss needs the variance of the logit, s^2 . z^2, and KL(q || p). Plain
autograd keeps about ten tensors of shape (B, C, D) for them. Here a few images at a time go through
all steps, and only mean and scale are kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from solodg.algorithms.solo.gaussian import Gaussian
from solodg.algorithms.solo.mean_hidden import pieces
from solodg.algorithms.solo.writer import MIN_SCALE, GaussianWriter

_PIECE_BYTES = {"cpu": 1024**2, "cuda": 256 * 1024**2}


class PosteriorTerms(NamedTuple):
    """What the loss needs of the posterior of each image and class."""

    variance: Tensor  # (B, C) of the logit w.z
    kl: Tensor  # (B, C) to the prior


def posterior_terms(
    hidden: Tensor, z: Tensor, writer: GaussianWriter, prior: Gaussian
) -> PosteriorTerms:
    """Returns logit variance and KL (B, C) of the classifiers that the writer's heads write.

    Hidden layer (B, C, H), embeddings z (B, D), prior (C, D).
    """
    with torch.autocast(hidden.device.type, enabled=False):  # single precision from here on
        dtype = hidden.dtype
        heads = (
            writer.mean.weight,
            writer.mean.bias,
            writer.pre_scale.weight,
            writer.pre_scale.bias,
        )
        inputs = (tensor.to(dtype) for tensor in (z, *heads, *prior))
        variance, kl = _PosteriorTerms.apply(hidden, next(inputs).square(), *inputs)  # type: ignore[no-untyped-call]
    return PosteriorTerms(variance, kl)


class _PosteriorTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, z2: Tensor, mean_weight: Tensor, mean_bias: Tensor,
        scale_weight: Tensor, scale_bias: Tensor, prior_mean: Tensor, prior_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shape = (*hidden.shape[:2], len(mean_weight))  # (B, C, D)
        means, scales = hidden.new_empty(shape), hidden.new_empty(shape)
        variance, kl = hidden.new_empty(shape[:2]), hidden.new_empty(shape[:2])
        precision = prior_scale.square().reciprocal()  # (C, D)
        for piece in pieces(shape[0], shape[1] * shape[2], hidden, _PIECE_BYTES):
            h, mean, scale = hidden[piece].flatten(0, 1), means[piece], scales[piece]
            torch.addmm(mean_bias, h, mean_weight.T, out=mean.view(-1, shape[2]))
            scale.copy_(F.softplus(torch.addmm(scale_bias, h, scale_weight.T)).view_as(scale))
            scale += MIN_SCALE
            squares = scale * scale
            torch.bmm(squares, z2[piece, :, None], out=variance[piece, :, None])
            off = mean - prior_mean
            squares.addcmul_(off, off).mul_(precision)
            kl[piece] = 0.5 * squares.sum(-1) - scale.log().sum(-1)
        kl += prior_scale.log().sum(-1) - 0.5 * shape[2]
        ctx.save_for_backward(
            hidden, z2, mean_weight, scale_weight, prior_mean, prior_scale, means, scales
        )
        return variance, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        hidden, z2, mean_weight, scale_weight, prior_mean, prior_scale, means, scales = (
            ctx.saved_tensors
        )
        grad_variance, grad_kl = grads
        precision = prior_scale.square().reciprocal()
        half = 0.5 * precision
        grad_hidden, grad_z2 = torch.empty_like(hidden), torch.empty_like(z2)
        grad_weights = [torch.zeros_like(mean_weight), torch.zeros_like(scale_weight)]
        grad_biases = [mean_weight.new_zeros(len(mean_weight)) for _ in range(2)]
        grad_prior_mean = torch.zeros_like(prior_mean)
        grad_precision = torch.zeros_like(prior_scale)
        for piece in pieces(len(means), means[0].numel(), hidden, _PIECE_BYTES):
            h, scale = hidden[piece].flatten(0, 1), scales[piece]
            of_variance, of_kl = grad_variance[piece], grad_kl[piece, :, None]
            squares = scale * scale
            torch.bmm(of_variance[:, None], squares, out=grad_z2[piece, None])
            off = means[piece] - prior_mean
            # d/ds of both, then through the softplus, whose slope is 1 - exp(-softplus).
            through = (of_kl * half).addcmul_(of_variance[..., None], z2[piece, None])
            through.mul_(2).mul_(scale).sub_(of_kl / scale)
            through.mul_((MIN_SCALE - scale).expm1_().neg_())
            grad_precision += (squares.addcmul_(off, off) * of_kl).sum(0)
            grad_mean = off.mul_(precision).mul_(of_kl)
            grad_prior_mean -= grad_mean.sum(0)
            grad_heads = [grad_mean.flatten(0, 1), through.flatten(0, 1)]
            for weight, bias, grad in zip(grad_weights, grad_biases, grad_heads, strict=True):
                weight.addmm_(grad.T, h)
                bias += grad.sum(0)
            into = grad_hidden[piece].view_as(h)
            torch.mm(grad_heads[0], mean_weight, out=into)
            into.addmm_(grad_heads[1], scale_weight)
        grad_prior_scale = grad_kl.sum(0)[:, None] / prior_scale - grad_precision / prior_scale**3
        return (
            grad_hidden, grad_z2, grad_weights[0], grad_biases[0], grad_weights[1], grad_biases[1],
            grad_prior_mean, grad_prior_scale,
        )  # fmt: skip
