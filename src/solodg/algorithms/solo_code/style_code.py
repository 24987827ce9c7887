"""The style code: a few numbers that replace the style and should not reveal the class.

The paper's generator reads the channel means of all stages of the image that it classifies. It may
recognise the class from them, a short cut that may fail on an unseen domain. The style code has few
dimensions, and classification sends no gradient through it to the backbone. Two further rules apply
in training:

    domain supervision  codes of one domain lie near their mean and far from the means of the other
                        domains (`centres.prototype_loss`, for any number of domains)
    swap                an image is classified with the code of another image of its domain
"""

import torch
from torch import Tensor, nn


def code_network(style_dim: int, code_dim: int) -> nn.Sequential:
    """Returns the network that encodes a standardised style: (B, S) -> (B, code_dim)."""
    return nn.Sequential(nn.Linear(style_dim, 128), nn.ReLU(), nn.Linear(128, code_dim))


def within_domain_shuffle(domain: Tensor) -> Tensor:
    """Returns a random permutation (B,) that sends each image to one of its own domain (B,)."""
    mixed = torch.randperm(len(domain), device=domain.device)
    source = mixed[domain[mixed].argsort(stable=True)]  # domain by domain, at random within
    place = domain.argsort(stable=True)
    result = torch.empty_like(mixed)
    result[place] = source
    return result
