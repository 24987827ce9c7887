"""Random crops of a single image, as augmented copies of it."""

import torch
from torch import Tensor
from torch.nn import functional as F


def random_crops(image: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns crops of an image, enlarged to its size: (1, C, H, W) -> (count, C, H, W).

    A crop has 0.7 to 1 of the area. Without a generator the crops are the same at every call.
    """
    generator = generator or torch.Generator().manual_seed(0)
    side = (0.7 + 0.3 * torch.rand(count, generator=generator)).sqrt()
    shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - side)[:, None]
    matrix = torch.zeros(count, 2, 3)
    matrix[:, 0, 0] = matrix[:, 1, 1] = side
    matrix[:, :, 2] = shift
    grid = F.affine_grid(matrix.to(image), [count, *image.shape[1:]], align_corners=False)
    copies = image.expand(count, -1, -1, -1)
    return F.grid_sample(copies, grid, padding_mode="border", align_corners=False)
