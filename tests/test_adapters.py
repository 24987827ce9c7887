"""Test-time methods against small independent implementations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solodg.adapters import ADAPTERS
from solodg.adapters.base import entropy
from solodg.adapters.crops import random_crops
from solodg.adapters.shot import nearest_centre, pseudo_labels
from solodg.adapters.t3a import T3A
from solodg.adapters.tent import Tent
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.ttt import rotated
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.models.image_norm import ImageBatchNorm
from solodg.runs.fit import Schedule, build_optimizer


def model(
    name: str = "erm",
    backbone: str = "small_cnn",
    image_norm: float | None = None,
    **arguments: int,
):
    torch.manual_seed(0)
    net = build_backbone(backbone, channels=3, image_size=32, image_norm=image_norm)
    algorithm = ALGORITHMS[name](net, num_classes=4, **arguments)
    algorithm.train()
    with torch.no_grad():
        for _ in range(3):
            algorithm(torch.rand(16, 3, 32, 32))  # statistics that are not 0 and 1
    return algorithm.eval()


def images(count: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


class PlainTent:
    """Written from the paper alone: batch statistics, Adam on scales and shifts, entropy."""

    def __init__(self, algorithm, steps: int) -> None:
        self.model, self.steps = copy.deepcopy(algorithm), steps
        parameters = []
        for parameter in self.model.parameters():
            parameter.requires_grad = False
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                if isinstance(module, ImageBatchNorm):
                    module.train()  # it mixes what it remembers with the image: it needs both
                else:
                    module.track_running_stats = False
                    module.running_mean = module.running_var = None
                for parameter in (module.weight, module.bias):
                    parameter.requires_grad = True
                    parameters.append(parameter)
        self.adam = torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.999))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            logits = self.model(x)
            p = torch.softmax(logits, 1)
            self.adam.zero_grad()
            (-(p * torch.log(p)).sum(1)).mean().backward()
            self.adam.step()
        return logits.detach()


@pytest.mark.parametrize("backbone", ["small_cnn", "resnet18", "tf_efficientnet_lite0"])
@pytest.mark.parametrize("steps", [1, 3])
def test_tent_is_the_plain_tent(steps: int, backbone: str) -> None:
    algorithm = model(backbone=backbone).double()  # Adam divides by gradients that are near zero
    plain, ours = PlainTent(algorithm, steps), Tent(algorithm, steps=steps)
    for seed in range(3):
        x = images(8, seed).double()
        torch.testing.assert_close(ours(x), plain(x), atol=1e-6, rtol=0)
    theirs = dict(plain.model.named_parameters())
    for name, parameter in ours.algorithm.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("count", "image_norm"), [(1, None), (8, 50.0), (1, 50.0)])
def test_tent_on_one_image_and_with_image_norm(count: int, image_norm: float | None) -> None:
    algorithm = model(image_norm=image_norm).double()
    plain, ours = PlainTent(algorithm, 2), Tent(algorithm, steps=2)
    for seed in range(3):
        x = images(count, seed).double()
        torch.testing.assert_close(ours(x), plain(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 8])
def test_batch_statistics_are_those_of_the_batch(count: int) -> None:
    algorithm = model()
    x = images(count)
    plain = copy.deepcopy(algorithm)
    for norm in (m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)):

        def by_hand(module, inputs, output):
            (maps,) = inputs
            mean = maps.mean((0, 2, 3), keepdim=True)
            var = maps.var((0, 2, 3), correction=0, keepdim=True)
            scale, shift = module.weight[:, None, None], module.bias[:, None, None]
            return (maps - mean) / (var + module.eps).sqrt() * scale + shift

        norm.register_forward_hook(by_hand)
    with torch.inference_mode():
        torch.testing.assert_close(
            ADAPTERS["bn"](algorithm).eval()(x), plain(x), atol=1e-5, rtol=1e-4
        )


BEFORE = {"learning_rate": 1e-4, "nesterov": False, "weight_decay": 0.0, "rounds": None}


def plain_rounds(z: torch.Tensor, p: torch.Tensor) -> list[int]:
    """Two rounds of pseudo-labels as the authors find them, image by image."""
    rows = [torch.cat([row, torch.ones(1, dtype=z.dtype)]) for row in z]
    rows = [row / row.norm() for row in rows]
    labels, weights = p.argmax(1).tolist(), p.tolist()
    for _ in range(2):
        centres = {}
        for c in sorted(set(labels)):  # only predicted classes
            total = sum(w[c] for w in weights) + 1e-8
            centres[c] = sum(w[c] * row for w, row in zip(weights, rows, strict=True)) / total
        labels = [
            min(centres, key=lambda c: 1 - float(F.cosine_similarity(row, centres[c], dim=0)))
            for row in rows
        ]
        weights = [[float(label == c) for c in range(p.shape[1])] for label in labels]
    return labels


def test_pseudo_labels_are_found_in_two_rounds_among_predicted_classes() -> None:
    changed = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(14, 3, generator=generator, dtype=torch.float64)
        p = torch.rand(14, 4, generator=generator, dtype=torch.float64)
        p[:, 2] = 0.1 * p.max(1).values  # class 2 is missing, and never predicted
        p /= p.sum(1, keepdim=True)
        labels = pseudo_labels(z, p, 2)
        assert labels.tolist() == plain_rounds(z, p)
        assert 2 not in labels
        changed += bool((labels != pseudo_labels(z, p, 1)).any())
    assert changed


@pytest.mark.parametrize("updates", [None, 5])
def test_shot_steps_with_the_authors_settings(updates: int | None) -> None:
    """SGD by hand: rate 0.001, Nesterov momentum 0.9, weight decay 0.001; entropy minus diversity
    plus 0.3 of the cross-entropy on pseudo-labels, as written with an epsilon of 0.00001."""
    algorithm = model().double()
    copied = copy.deepcopy(algorithm)
    weights = list(copied.backbone.parameters())
    moments = [torch.zeros_like(w) for w in weights]
    shot = ADAPTERS["shot"](algorithm, updates=updates)
    for number, count in enumerate((6, 3, 5), start=1):
        x = images(count, number).double()
        z, logits = copied.embed(x), copied(x)
        p = logits.softmax(1)
        sure = sum(-(row * (row + 1e-5).log()).sum() for row in p) / count
        mean = sum(p) / count
        varied = -(mean * (mean + 1e-5).log()).sum()
        labels = torch.tensor(plain_rounds(z.detach(), p.detach()))
        loss = sure - varied + 0.3 * F.cross_entropy(logits, labels)
        rate = 1e-3 * (1.0 if updates is None else (1 + 10 * number / updates) ** -0.75)
        with torch.no_grad():
            gradients = torch.autograd.grad(loss, weights)
            for weight, moment, gradient in zip(weights, moments, gradients, strict=True):
                gradient += 1e-3 * weight
                moment.mul_(0.9).add_(gradient)
                weight -= rate * (gradient + 0.9 * moment)
            expected = copied(x)
        # The epsilon moves the gradient a little.
        torch.testing.assert_close(shot(x), expected, atol=1e-6, rtol=1e-4)


def test_shot_takes_its_step_as_before() -> None:
    algorithm = model()
    x = images(6)
    copied = copy.deepcopy(algorithm)
    z, logits = copied.embed(x), copied(x)
    p = logits.softmax(1)
    sure = -(p * p.log()).sum(1).mean()
    mean = p.mean(0)
    varied = -(mean * mean.log()).sum()
    centres = torch.stack([(p[:, c, None] * z).sum(0) for c in range(4)]).detach()
    labels = F.cosine_similarity(z[:, None], centres[None], dim=2).argmax(1)
    loss = sure - varied + 0.3 * F.nll_loss(p.log(), labels)
    weights = list(copied.backbone.parameters())
    gradients = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 1e-4 * gradient
        expected = copied(x)
    shot = ADAPTERS["shot"](algorithm, **BEFORE)
    torch.testing.assert_close(shot(x), expected, atol=1e-5, rtol=1e-4)


def test_shot_does_not_learn_from_one_image() -> None:
    algorithm = model()
    shot = ADAPTERS["shot"](algorithm)
    before = [p.clone() for p in algorithm.parameters()]
    with torch.no_grad():
        torch.testing.assert_close(shot(images(1)), algorithm(images(1)))
    assert all(torch.equal(a, b) for a, b in zip(before, algorithm.parameters(), strict=True))


@pytest.mark.parametrize("name", ["t3a", "shot"])
def test_embedding_and_logits_cost_one_pass(name: str) -> None:
    algorithm = model()
    passes = []
    adapter = ADAPTERS[name](algorithm)
    algorithm.backbone.net.register_forward_hook(lambda *_: passes.append(1))
    embed = algorithm.backbone.net.embed
    algorithm.backbone.net.embed = lambda x: passes.append(1) or embed(x)
    adapter(images(4))
    assert len(passes) <= {"t3a": 1, "shot": 2}[name]  # shot: one to learn, one to answer


def test_tent_learns_and_stays_until_reset() -> None:
    tent = Tent(model(), steps=5)
    x = images(16)
    first = tent(x)
    assert entropy(tent(x)).mean() < entropy(first).mean()
    tent.reset()
    assert torch.equal(tent(x), first)


def test_one_image_has_the_statistics_of_itself() -> None:
    """A single image at maps of one pixel, where torch refuses: what is normalised is zero."""
    algorithm = model(backbone="resnet18")
    for name in ("bn", "tent"):
        logits = ADAPTERS[name](copy.deepcopy(algorithm))(images(1))
        assert torch.isfinite(logits).all()


def test_without_batchnorm_there_is_a_user_error() -> None:
    algorithm = ALGORITHMS["erm"](ReadyFeatures(4, 2), num_classes=3)
    for name in ("bn", "tent"):
        with pytest.raises(UserError, match="BatchNorm"):
            ADAPTERS[name](algorithm)


@pytest.mark.parametrize("keep", [2, "all"])
def test_t3a_is_a_plain_loop(keep: int | str) -> None:
    algorithm = model()
    ours = T3A(algorithm, keep=keep)
    weight, bias = algorithm.classifier.weight, algorithm.classifier.bias
    supports: dict[int, list[tuple[float, torch.Tensor]]] = {c: [] for c in range(4)}

    def add(z: torch.Tensor) -> None:
        p = torch.softmax(weight @ z + bias, 0)
        supports[int(p.argmax())].append((float(-(p * p.log()).sum()), z))

    with torch.inference_mode():
        for row in weight:
            add(row)
        for seed in range(3):
            x = images(6, seed)
            z = algorithm.embed(x)
            for row in z:
                add(row)
            for c in supports:
                supports[c] = sorted(supports[c], key=lambda pair: pair[0])[
                    : 99 if keep == "all" else keep
                ]
            expected = torch.zeros(6, 4)
            for c, kept in supports.items():
                if kept:
                    direction = sum(s / s.norm() for _, s in kept)
                    expected[:, c] = z @ (direction / direction.norm())
            torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-4)


def with_mixed_statistics(algorithm):
    """Lets BatchNorm use 16/17 of its statistics and 1/17 of those of what it reads."""

    def by_hand(module, inputs, output):
        (maps,) = inputs
        channels = maps.detach().transpose(0, 1).flatten(1)
        mean = 16 / 17 * module.running_mean + 1 / 17 * channels.mean(1)
        var = 16 / 17 * module.running_var + 1 / 17 * channels.var(1, correction=1)
        scale = module.weight / (var + module.eps).sqrt()
        shift = module.bias - mean * scale
        return maps * scale[:, None, None] + shift[:, None, None]

    for norm in (m for m in algorithm.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.register_forward_hook(by_hand)
    return algorithm


def test_memo_steps_and_predicts_with_the_authors_settings() -> None:
    """64 copies, a rate of 0.00025, and a prior of 16 images in both passes."""
    algorithm = model().double()
    x = images(2).double()
    expected = []
    for image in x:
        copied = with_mixed_statistics(copy.deepcopy(algorithm)).requires_grad_(True)
        p = sum(copied(random_crops(image[None], 64)).softmax(1)) / 64
        (-(p * p.log()).sum()).backward()
        with torch.no_grad():
            for parameter in copied.parameters():
                if parameter.grad is not None:
                    parameter -= 2.5e-4 * parameter.grad
            expected.append(copied(image[None]))
    before = copy.deepcopy(algorithm.state_dict())
    memo = ADAPTERS["memo"](algorithm)
    torch.testing.assert_close(memo(x), torch.cat(expected))
    assert all(torch.equal(v, before[k]) for k, v in algorithm.state_dict().items())
    assert ADAPTERS["memo"](model(image_norm=50.0)).norms == []  # they mix by themselves


def test_memo_takes_one_step_on_the_entropy_of_the_mean() -> None:
    algorithm = model()
    x = images(1)
    copied = copy.deepcopy(algorithm).requires_grad_(True)
    p = torch.softmax(copied(random_crops(x, 32)), 1).mean(0)
    (-(p * p.log()).sum()).backward()
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.grad is not None:
                parameter -= 2.5e-4 * parameter.grad
        expected = copied(x)
    memo = ADAPTERS["memo"](algorithm, copies=32, prior=None)
    torch.testing.assert_close(memo(x), expected, atol=1e-5, rtol=1e-4)


def test_crops_are_of_the_image_and_the_same_each_time() -> None:
    x = images(1)
    crops = random_crops(x, 6)
    assert torch.equal(crops, random_crops(x, 6))
    assert not torch.equal(crops[0], crops[1])
    assert crops.min() >= x.min() - 1e-6
    assert crops.max() <= x.max() + 1e-6


def test_ttt_steps_on_new_copies_before_the_branch() -> None:
    """Ten steps of 0.001 on 32 crops, drawn anew for each; the last block is no part of it."""
    algorithm = model("ttt").double()
    own = algorithm.own
    of_own = {name.replace("/", "."): tensor for name, tensor in own.state_dict().items()}
    assert of_own.keys() == {
        f"net.blocks.3.{n}" for n in algorithm.backbone.net.blocks[3].state_dict()
    }
    with torch.no_grad():
        for parameter in own.parameters():  # not like that of the classes, as after training
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    x = images(1).double()
    copied = copy.deepcopy(algorithm).requires_grad_(True)
    blocks = copied.backbone.net.blocks
    branch = copy.deepcopy(blocks[3])
    branch.load_state_dict({k.removeprefix("net.blocks.3."): v for k, v in of_own.items()})
    weights = [p for m in (*blocks[:3], branch, copied.rotation) for p in m.parameters()]
    sgd = torch.optim.SGD(weights, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(10):
        quarters = torch.randint(4, (32,), generator=generator)
        crops = random_crops(x, 32, generator)
        seen.append(crops)
        maps = torch.stack(
            [torch.rot90(c, int(k), (1, 2)) for c, k in zip(crops, quarters, strict=True)]
        )
        maps = (maps - 0.5) / 0.5
        for block in (*blocks[:3], branch):
            maps = block(maps)
        sgd.zero_grad()
        F.cross_entropy(copied.rotation(maps.mean((2, 3))), quarters).backward()
        sgd.step()
    assert not torch.equal(seen[0], seen[1])
    with torch.no_grad():
        expected = copied(x)
    assert (expected - algorithm(x)).abs().max() > 1e-6
    torch.testing.assert_close(ADAPTERS["ttt"](algorithm)(x), expected)


def test_the_head_of_rotations_trains_its_own_last_stages() -> None:
    algorithm = model("ttt").train()
    quarters = torch.arange(8) % 4
    algorithm.rotation_loss(images(8), quarters).backward()
    trained = {n for n, p in algorithm.named_parameters() if p.grad is not None}
    names = {f"backbone.net.blocks.{i}" for i in range(3)} | {"own", "rotation"}
    assert {next(n for n in names if name.startswith(n)) for name in trained} == names
    before = algorithm.backbone.net.blocks[3][1].running_mean.clone()
    own = getattr(algorithm.own, "net/blocks/3/1/running_mean").clone()
    algorithm.rotation_loss(images(8), quarters)
    assert torch.equal(algorithm.backbone.net.blocks[3][1].running_mean, before)
    assert not torch.equal(getattr(algorithm.own, "net/blocks/3/1/running_mean"), own)
    rates = {p: g["lr"] for g in build_optimizer(algorithm, Schedule(1, 1, 1e-2, 1e-4, 0.0, 0))
             .param_groups for p in g["params"]}  # fmt: skip
    assert {rates[p] for p in algorithm.own.parameters()} == {1e-4}
    assert rates.keys() == set(algorithm.parameters())
    with pytest.raises(ValueError, match="less than 4"):
        ALGORITHMS["ttt"](algorithm.backbone, num_classes=4, own_stages=4)


def test_ttt_steps_on_rotations_of_the_image_as_before() -> None:
    algorithm = model("ttt", own_stages=0)
    x = images(2)
    expected = []
    for image in x:
        copied = copy.deepcopy(algorithm).requires_grad_(True)
        weights = [*copied.backbone.parameters(), *copied.rotation.parameters()]
        sgd = torch.optim.SGD(weights, lr=1e-3)
        copies = torch.stack([torch.rot90(image, k, (1, 2)) for k in range(4)])
        for _ in range(10):
            sgd.zero_grad()
            F.cross_entropy(copied.rotation(copied.embed(copies)), torch.arange(4)).backward()
            sgd.step()
        with torch.no_grad():
            expected.append(copied(image[None]))
    torch.testing.assert_close(ADAPTERS["ttt"](algorithm, copies=None)(x), torch.cat(expected))
    with pytest.raises(UserError, match="--algorithm ttt"):
        ADAPTERS["ttt"](model("erm"))


def test_images_are_rotated_by_quarters() -> None:
    x, turns = images(5), torch.tensor([0, 3, 1, 2, 1])
    expected = torch.stack([torch.rot90(i, int(k), (1, 2)) for i, k in zip(x, turns, strict=True)])
    assert torch.equal(rotated(x, turns), expected)


def test_pseudo_labels_are_of_the_nearest_centre() -> None:
    torch.manual_seed(0)
    z, p = torch.randn(12, 5), torch.rand(12, 3).softmax(1)
    centres = [sum(p[i, c] * z[i] for i in range(12)) for c in range(3)]
    for i, label in enumerate(nearest_centre(z, p).tolist()):
        cosines = [float(F.cosine_similarity(z[i], centre, dim=0)) for centre in centres]
        assert label == cosines.index(max(cosines))


def test_entropy_leaves_absent_classes_out() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    expected = torch.distributions.Categorical(logits=logits[:, :2]).entropy()
    torch.testing.assert_close(entropy(logits), expected)
    entropy(logits).sum().backward()
    assert torch.isfinite(logits.grad[:, :2]).all()
