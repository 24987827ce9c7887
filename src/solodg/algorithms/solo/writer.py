"""The amortised network that writes classifiers: one vector per class -> Gaussian weights."""

from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.solo.gaussian import Gaussian

MIN_SCALE = 1e-6  # a scale of zero would make the divergence infinite


class GaussianWriter(nn.Module):
    """Writes a diagonal Gaussian over a classifier's row (D,) from a vector (D,) of the class.

    Linear -> ReLU -> two linear heads; scale = softplus(pre-scale) + MIN_SCALE. `zero_start` makes
    the written mean zero at first, so that a residual starts as its base alone. `pre_scale_start`
    makes the pre-scale this number at first, whatever the input.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        zero_start: bool = False,
        pre_scale_start: float | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(dim, hidden)
        self.mean = nn.Linear(hidden, dim)
        self.pre_scale = nn.Linear(hidden, dim)
        if zero_start:
            nn.init.zeros_(self.mean.weight)
            nn.init.zeros_(self.mean.bias)
        if pre_scale_start is not None:
            nn.init.zeros_(self.pre_scale.weight)
            nn.init.constant_(self.pre_scale.bias, pre_scale_start)

    def hidden(self, x: Tensor) -> Tensor:
        """Returns the hidden layer: (..., D) -> (..., H)."""
        return F.relu(self.first(x))

    def scale(self, hidden: Tensor) -> Tensor:
        """Returns the scale for a hidden layer: (..., H) -> (..., D)."""
        return F.softplus(self.pre_scale(hidden)) + MIN_SCALE

    def forward(self, x: Tensor) -> Gaussian:
        """Returns the written Gaussian: (..., D) -> mean and scale (..., D)."""
        hidden = self.hidden(x)
        return Gaussian(self.mean(hidden), self.scale(hidden))
