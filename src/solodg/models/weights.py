"""Pretrained weights of a network, read from a safetensors file."""

from pathlib import Path
from typing import cast

from safetensors.torch import load_file
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.torchvision_shim import make_torchvision_importable

make_torchvision_importable()

from timm.models import adapt_input_conv  # noqa: E402  (needs the call above)

_CLASSIFIERS = ("classifier.6", "fc", "head", "classifier")  # layers that a file may have on top


def load_weights(net: nn.Module, name: str, path: Path, channels: int) -> None:
    """Loads a safetensors file into a network; a user error if it is of another model.

    Colour filters of the first convolution are adapted to grey images.
    """
    if not path.is_file():
        raise UserError(f"no weights file at {path}.")
    try:
        state = load_file(path)
    except Exception as error:  # safetensors raises its own, undocumented types
        raise UserError(f"{path} is not a readable safetensors file ({error}).") from error
    model = cast(nn.Module, getattr(net, "model", net))
    own = model.state_dict()
    for key in set(state) & set(own):
        if channels != 3 and _is_colour_convolution(state[key], own[key]):
            state[key] = adapt_input_conv(channels, state[key])
    heads = getattr(model, "default_cfg", {}).get("classifier") or _CLASSIFIERS
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    foreign = [k for k in state if k not in own and not k.startswith(heads)]
    fitting = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    # BatchNorm's counter of batches is not a weight, and many published files leave it out.
    missing = [k for k in own if k not in fitting and not k.endswith("num_batches_tracked")]
    if missing or foreign:
        raise UserError(
            f"{path} does not fit backbone {name!r}: {len(missing)} of {len(own)} tensors are "
            f"missing or of another shape, {len(foreign)} are not of this model, "
            f"e.g. {(missing + foreign)[0]!r}. Is it for another model?"
        )
    model.load_state_dict(fitting, strict=False)


def _is_colour_convolution(given: Tensor, own: Tensor) -> bool:
    """Returns whether both are the same convolution except that `given` reads three channels."""
    return (
        given.ndim == own.ndim == 4
        and given.shape[1] == 3
        and given.shape[0] == own.shape[0]
        and given.shape[2:] == own.shape[2:]
    )
