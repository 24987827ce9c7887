"""Cuts a network before its first trained module.

Where only the last stages of a network are trained, the maps that enter them never change: they are
computed once and stored, and the rest of the network, the tail, is trained on them
(models/map_backbone.py).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from solodg.errors import UserError
from solodg.models.backbones import Backbone
from solodg.models.stages import Network, channel_means
from solodg.seeding import torch_generator

_TOLERANCE = 1e-4  # of the same sums, possibly in another memory layout


class Cut:
    """Divides the network of a backbone into frozen first stages and the `stages` last ones.

    `rows` computes what a backbone stores of an image. `tail` is a network that begins with the
    stored map: its trained modules are those of the backbone itself, under the same names, and
    modules before the cut do nothing. Raises `UserError` where a network cannot be cut.
    """

    def __init__(self, backbone: Backbone, stages: int) -> None:
        self.backbone = backbone
        groups = backbone.net.stages()
        if stages >= len(groups):
            raise UserError(
                f"--train-stages {stages}: this backbone has {len(groups)} stages, so none of them "
                "is frozen and no map can be stored. Train fewer, or leave --stored-views out."
            )
        self._trained = {id(p) for group in groups[-stages:] for p in group}
        all_stages = backbone.stage_modules()
        if backbone.net.maps_by_hooks or not all_stages:
            self._refuse(stages, "its stages give no maps")
        before = self._find_first(stages)
        self._early = [stage for stage in all_stages if id(stage) in before]
        self.late_stages = len(all_stages) - len(self._early)
        self.tail, self._shared = self._make_tail(before)
        try:
            self.shape, self.early_dim = self._verify()
        except _FAILURES as error:
            self._refuse(stages, str(error).splitlines()[0] if str(error) else repr(error))

    def rows(self, x: Tensor) -> Tensor:
        """Returns what is stored of images in [0, 1]: (B, E + H * W * C).

        These are the channel means of the stages before the cut, then the map with channels last.
        With several readings: all images once per reading, one reading after the other.
        """
        style, entering = self._before(self.backbone.prepared(x, None))
        return torch.cat([style, entering.permute(0, 2, 3, 1).flatten(1)], 1)

    def early_state(self) -> dict[str, Tensor]:
        """Returns the tensors that stored maps depend on: all but those of the tail, by name."""
        state = self.backbone.state_dict(keep_vars=True)
        return {name: t.detach() for name, t in state.items() if id(t) not in self._shared}

    @torch.no_grad()
    def _before(self, prepared: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the early style (B, E) and the map that enters the tail; computes no more."""
        means: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            means.append(channel_means(output))  # at once: the map may be changed in place

        hooks = [stage.register_forward_hook(keep) for stage in self._early]
        hooks.append(self.first.register_forward_pre_hook(_stop))
        try:
            self.backbone.net(prepared)
        except _ReachedError as reached:
            entering = reached.entering
        finally:
            for hook in hooks:
                hook.remove()
        means.append(entering.new_zeros(len(entering), 0))
        return torch.cat(means, 1), entering

    def _find_first(self, stages: int) -> set[int]:
        """Finds the first trained module; returns the ids of the frozen modules that run before."""
        ran: list[nn.Module] = []
        hooks = [
            module.register_forward_pre_hook(lambda module, _inputs: ran.append(module))
            for module in self.backbone.net.modules()
        ]
        self.backbone.blank()
        for hook in hooks:
            hook.remove()
        for place, module in enumerate(ran):
            own = [id(parameter) in self._trained for parameter in module.parameters()]
            if own and all(own):
                self.first = module
                return {id(m) for m in ran[:place] if not self._has_trained(m)}
        self._refuse(stages, "no module has trained parameters alone")

    def _has_trained(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._trained for parameter in module.parameters())

    def _make_tail(self, before: set[int]) -> tuple[Network, set[int]]:
        """Returns the network without what runs before the cut, and the ids of shared tensors."""
        net = self.backbone.net
        memo: dict[int, Any] = {id(t): t for t in (*net.parameters(), *net.buffers())}
        shared: set[int] = set()

        def visit(module: nn.Module) -> None:
            for child in module.children():
                if id(child) in before:
                    memo[id(child)] = nn.Identity()
                elif any(id(inner) in before for inner in child.modules()):
                    visit(child)  # deepcopy makes a copy of this container alone
                else:
                    memo[id(child)] = child
                    shared.update(id(t) for t in (*child.parameters(), *child.buffers()))

        visit(net)
        return copy.deepcopy(net, memo), shared

    @torch.no_grad()
    def _verify(self) -> tuple[tuple[int, int, int], int]:
        """Returns map shape (C, H, W) and early dimension; raises if the tail is not exact."""
        backbone = self.backbone
        size = (2, backbone.channels, backbone.image_size, backbone.image_size)
        x = torch.rand(size, generator=torch_generator(0, "cut")).to(backbone.mean.device)
        with _evaluating(backbone), _evaluating(self.tail):
            whole = backbone.net(backbone.prepared(x, None))
            early, entering = self._before(backbone.prepared(x, None))
            if entering.ndim != 4:
                raise _NotExactError("what enters them is no map")
            rest = self.tail(entering)
            late = rest.maps[len(rest.maps) - self.late_stages :]
            style = torch.cat([early, *map(channel_means, late)], 1)
            expected = torch.cat([channel_means(m) for m in whole.maps], 1)
            pairs = [
                (rest.embedding, whole.embedding),
                (self.tail.embed(entering), whole.embedding),
                (style, expected),
            ]
        if not all(_close(a, b) for a, b in pairs):
            raise _NotExactError("the rest of the network needs more than the map there")
        return (entering.shape[1], entering.shape[2], entering.shape[3]), early.shape[1]

    def _refuse(self, stages: int, reason: str) -> NoReturn:
        raise UserError(
            f"--stored-views: this backbone cannot be cut before its last {stages} stage(s) "
            f"({reason}). Try another number of --train-stages, or leave --stored-views out."
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)


class _NotExactError(Exception):
    """The tail does not compute what the whole network does."""


_FAILURES = (
    _NotExactError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class _ReachedError(Exception):
    """Ends a forward pass at the cut."""

    def __init__(self, entering: Tensor) -> None:
        super().__init__()
        self.entering = entering


def _stop(_module: nn.Module, inputs: tuple[Tensor, ...]) -> NoReturn:
    raise _ReachedError(inputs[0])


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
