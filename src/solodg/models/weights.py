"""Pretrained weights of a network, read from a safetensors file."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.torchvision_shim import make_torchvision_importable

_CLASSIFIERS = ("classifier.6", "fc", "head", "classifier")  # layers that a file may have on top


def load_weights(net: nn.Module, name: str, path: Path, channels: int) -> None:
    """Loads a safetensors file into a network; raises `UserError` if it is of another model.

    Colour filters of the first convolution are adapted to grey images.
    """
    if not path.is_file():  # also a pipe or a device, which may have no end
        what = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"no weights file at {path}: it {what}. Give a safetensors file.")
    try:
        state = load_file(path)
    except Exception as error:  # safetensors raises its own, undocumented types
        raise UserError(f"{path} is not a readable safetensors file ({error}).") from error
    broken = not_finite(state)
    if broken is not None:
        raise UserError(f"{path} is damaged: its tensor {broken!r} is not finite.")
    model = cast(nn.Module, getattr(net, "model", net))
    expected = model.state_dict()
    for key in set(state) & set(expected):
        if channels != 3 and _is_colour_convolution(state[key], expected[key]):
            state[key] = _with_channels(channels, state[key])
    heads = getattr(model, "default_cfg", {}).get("classifier") or _CLASSIFIERS
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    foreign = [k for k in state if k not in expected and not k.startswith(heads)]
    fitting = {k: v for k, v in state.items() if k in expected and v.shape == expected[k].shape}
    # BatchNorm's counter of batches is not a weight, and many published files leave it out.
    missing = [k for k in expected if k not in fitting and not k.endswith("num_batches_tracked")]
    if missing or foreign:
        raise UserError(
            f"{path} does not fit backbone {name!r}: {len(missing)} of {len(expected)} tensors are "
            f"missing or of another shape, {len(foreign)} are not of this model, "
            f"e.g. {(missing + foreign)[0]!r}. Give the weights of this backbone, or "
            "name theirs with --backbone."
        )
    model.load_state_dict(fitting, strict=False)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the first tensor that holds NaN or infinity; None if all are finite."""
    found = (name for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    return next(found, None)


def _is_colour_convolution(given: Tensor, expected: Tensor) -> bool:
    """Returns whether both are the same convolution except that `given` reads three channels."""
    return (
        given.ndim == expected.ndim == 4
        and given.shape[1] == 3
        and given.shape[0] == expected.shape[0]
        and given.shape[2:] == expected.shape[2:]
    )


def _with_channels(channels: int, convolution: Tensor) -> Tensor:
    """Returns the weights of a colour convolution as those of one that reads `channels`."""
    make_torchvision_importable()
    from timm.models import adapt_input_conv  # late: it takes a second or two to import

    adapted: Tensor = adapt_input_conv(channels, convolution)
    return adapted
