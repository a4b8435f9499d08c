"""The models, by name, for images of any size."""

import pytest
import torch

from ddp_from_scratch.training.models import make_model
from tests.support.refusal import refusal
from tests.support.tiers import slow

torchvision = pytest.importorskip("torchvision")


def check(model, channels, size):
    """Two images through forward and backward, in train mode: every parameter takes part."""
    out = model(torch.randn(2, channels, size, size))
    assert out.shape == (2, 10)
    out.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["cnn", "mlp"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 75), (1, 96)])
def test_our_own(name, channels, size):
    model = make_model(name, channels=channels, image_size=size, num_classes=10)
    check(model, channels, size)
    assert model(torch.randn(1, channels, size, size)).shape == (1, 10)


# One of each family whose first convolution, pooling or positions are its own.
@pytest.mark.parametrize(
    ("name", "size", "enlarged_to"),
    [
        slow("alexnet", 8, 64),
        slow("inception_v3", 32, 96),
        ("resnet18", 8, None),
        ("squeezenet1_1", 8, 32),
        slow("swin_t", 8, None),
        ("vit_b_32", 8, 32),
    ],
)
def test_torchvision(name, size, enlarged_to):
    model = make_model(name, channels=1, image_size=size, num_classes=10)
    enlarge = getattr(model, "enlarge", None)
    assert (enlarge and enlarge.size) == (enlarged_to and (enlarged_to, enlarged_to))
    check(model, 1, size)


def test_other_sizes_and_channels():
    """A new convolution keeps the old one's geometry."""
    model = make_model("resnet18", channels=4, image_size=32, num_classes=10)
    check(model, 4, 32)
    first = model.conv1
    assert (first.in_channels, first.out_channels, first.bias) == (4, 64, None)
    assert (first.kernel_size, first.stride, first.padding) == ((7, 7), (2, 2), (3, 3))


def test_weights_are_torchvisions_own_and_trying_it_changes_nothing():
    torch.manual_seed(3)
    ours = make_model("resnet18", channels=3, image_size=32, num_classes=10)
    after_ours = torch.get_rng_state()
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(num_classes=10)
    assert torch.equal(after_ours, torch.get_rng_state())
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    assert ours.bn1.num_batches_tracked == 0
    assert ours.training


def test_an_unknown_name():
    told = refusal(make_model, "resnet5", channels=1, image_size=8, num_classes=10)
    assert "unknown model 'resnet5': expected cnn, mlp, or a torch" in told
