"""FiLM: the style code scales and shifts the embedding (Perez et al., AAAI 2018)."""

from torch import nn

from solodg.types import Features


class FiLM(nn.Linear):
    """Scales and shifts the embedding by the style code; starts at the identity."""

    def __init__(self, code_dim: int, embedding_dim: int) -> None:
        super().__init__(code_dim, 2 * embedding_dim)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def modulate(self, features: Features) -> Features:
        """Returns the features with embedding z (1 + scale(code)) + shift(code)."""
        scale, shift = self(features.style).chunk(2, 1)  # (B, D) each
        return Features(features.embedding * (1 + scale) + shift, features.style)
