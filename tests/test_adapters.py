"""Test-time methods against small independent implementations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from solodg.adapters import ADAPTERS
from solodg.adapters.base import entropy
from solodg.adapters.memo import random_crops
from solodg.adapters.shot import nearest_centre
from solodg.adapters.t3a import T3A
from solodg.adapters.tent import Tent
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.ttt import rotated
from solodg.errors import UserError
from solodg.models.backbones import build_backbone
from solodg.models.extractor import ReadyFeatures
from solodg.models.image_norm import ImageBatchNorm


def model(name: str = "erm", backbone: str = "small_cnn", image_norm: float | None = None):
    torch.manual_seed(0)
    net = build_backbone(backbone, channels=3, image_size=32, image_norm=image_norm)
    algorithm = ALGORITHMS[name](net, num_classes=4)
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


def test_shot_takes_its_step() -> None:
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
    torch.testing.assert_close(ADAPTERS["shot"](algorithm)(x), expected, atol=1e-5, rtol=1e-4)


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


def test_t3a_is_a_plain_loop() -> None:
    algorithm, keep = model(), 2
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
                supports[c] = sorted(supports[c], key=lambda pair: pair[0])[:keep]
            expected = torch.zeros(6, 4)
            for c, kept in supports.items():
                if kept:
                    direction = sum(s / s.norm() for _, s in kept)
                    expected[:, c] = z @ (direction / direction.norm())
            torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-4)


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
    torch.testing.assert_close(ADAPTERS["memo"](algorithm)(x), expected, atol=1e-5, rtol=1e-4)


def test_crops_are_of_the_image_and_the_same_each_time() -> None:
    x = images(1)
    crops = random_crops(x, 6)
    assert torch.equal(crops, random_crops(x, 6))
    assert not torch.equal(crops[0], crops[1])
    assert crops.min() >= x.min() - 1e-6
    assert crops.max() <= x.max() + 1e-6


def test_ttt_steps_on_rotations_of_the_image() -> None:
    algorithm = model("ttt")
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
    torch.testing.assert_close(ADAPTERS["ttt"](algorithm)(x), torch.cat(expected))
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
