"""Extractors: what every algorithm reads features from, be it a network or stored features."""

import torch
from torch import Tensor, nn

from solodg.types import Features


class ReadyFeatures(nn.Module):
    """For features computed beforehand, reading by reading: (B, readings (D + S)) -> Features."""

    def __init__(self, embedding_dim: int, style_dim: int, readings: int = 1) -> None:
        super().__init__()
        self.embedding_dim, self.style_dim, self.readings = embedding_dim, style_dim, readings

    def forward(self, x: Tensor) -> Features:
        embedding, style = self._read(x).split([self.embedding_dim, self.style_dim], dim=1)
        return Features(embedding, style)

    def embed(self, x: Tensor) -> Tensor:
        return self._read(x)[:, : self.embedding_dim]

    def _read(self, x: Tensor) -> Tensor:
        """As a backbone does: in training one reading at random, else the mean of all."""
        if self.readings == 1:
            return x
        each = x.view(len(x), self.readings, -1)  # (B, readings, D + S)
        if not self.training:
            return each.mean(1)
        rows = torch.arange(len(x), device=x.device)
        return each[rows, torch.randint(self.readings, (len(x),), device=x.device)]

    def last_map(self, x: Tensor) -> Tensor:
        """There is none any more: the embedding."""
        return self.embed(x)

    def pool(self, last: Tensor) -> Tensor:
        return last


class Standardised(nn.Module):
    """Ready features, standardised, as both embedding and style."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.embedding_dim = self.style_dim = features.shape[1]
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("scale", features.std(0, correction=0).clamp_min(1e-6))
        self.mean: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor) -> Features:
        z = self.embed(x)
        return Features(z, z)

    def embed(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def last_map(self, x: Tensor) -> Tensor:
        """There is none: the embedding."""
        return self.embed(x)

    def pool(self, last: Tensor) -> Tensor:
        return last
