"""The amortised network that writes classifiers: a vector per class -> a Gaussian over weights."""

from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.solo.gaussian import Gaussian

MIN_SCALE = 1e-6  # a scale of zero would make the divergence infinite


class GaussianWriter(nn.Module):
    """Linear -> ReLU -> two Linear heads; scale = softplus(pre-scale) + MIN_SCALE.

    `zero_start` makes the written mean zero and the scale softplus(`pre_scale_start`) whatever
    the input, so that a residual around it starts as its base alone.
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
        return F.relu(self.first(x))

    def scale(self, hidden: Tensor) -> Tensor:
        return F.softplus(self.pre_scale(hidden)) + MIN_SCALE

    def forward(self, x: Tensor) -> Gaussian:
        hidden = self.hidden(x)
        return Gaussian(self.mean(hidden), self.scale(hidden))
