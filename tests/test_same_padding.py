"""SAME padding without copies: timm's own convolution is the oracle, in values and gradients."""

import copy

import onnxruntime
import pytest
import timm
import torch
from timm.layers.conv2d_same import Conv2dSame

from solodg.models.same_padding import SamePaddedConv2d, pad_without_copies


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (8, 13), (15, 6), (1, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5, (3, 5)])
@pytest.mark.parametrize("groups", [1, 4])
def test_it_computes_what_a_padded_copy_gives(size, stride, kernel, groups) -> None:
    torch.manual_seed(0)
    plain = Conv2dSame(4, 8, kernel, stride, groups=groups)
    ours = copy.deepcopy(plain)
    pad_without_copies(ours)
    assert type(ours) is SamePaddedConv2d
    x = torch.randn(2, 4, *size).requires_grad_()
    again = x.detach().clone().requires_grad_()
    expected, found = plain(x), ours(again)
    torch.testing.assert_close(found, expected)
    toward = torch.randn_like(expected)
    expected.backward(toward)
    found.backward(toward)
    torch.testing.assert_close(again.grad, x.grad)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("options", [{"dilation": 2, "groups": 3}, {"groups": 1}])
def test_other_convolutions_are_left_as_they_are(options) -> None:
    torch.manual_seed(0)
    plain = Conv2dSame(3, 3, 3, 2, **options)
    ours = copy.deepcopy(plain)
    pad_without_copies(ours)
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(ours(x), plain(x))


@pytest.mark.filterwarnings("ignore")
def test_a_whole_network_returns_and_exports_the_same(tmp_path) -> None:
    torch.manual_seed(0)
    plain = timm.create_model("tf_efficientnet_lite0", num_classes=3).eval()
    ours = copy.deepcopy(plain)
    pad_without_copies(ours)
    changed = [module for module in ours.modules() if type(module) is SamePaddedConv2d]
    assert len(changed) == 5  # the convolutions with a stride
    assert ours.state_dict().keys() == plain.state_dict().keys()
    x = torch.rand(2, 3, 96, 96)
    with torch.inference_mode():
        expected = plain(x)
        torch.testing.assert_close(ours(x), expected)
    torch.onnx.export(ours, (x,), tmp_path / "net.onnx", dynamo=False, input_names=["x"])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)
