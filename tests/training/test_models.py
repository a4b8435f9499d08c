"""The models, by name, for images of any size."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.environment import ALONE
from ddp_from_scratch.training import datasets, loaders, models
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import World

torchvision = pytest.importorskip("torchvision")


def check(model: nn.Module, channels: int, size: int) -> None:
    """Two images through forward and backward, in train mode: every parameter takes part."""
    out = model(torch.randn(2, channels, size, size))
    assert out.shape == (2, 10)
    out.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["cnn", "mlp"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32), (3, 75), (1, 224)])
def test_our_own(name: str, channels: int, size: int) -> None:
    check(make_model(name, channels=channels, image_size=size, num_classes=10), channels, size)


@pytest.mark.parametrize("size", [8, 28])
def test_cnn_takes_a_batch_of_one(size: int) -> None:
    model = make_model("cnn", channels=1, image_size=size, num_classes=10)
    assert model(torch.randn(1, 1, size, size)).shape == (1, 10)


# One of each family whose first convolution, pooling or positions are its own.
@pytest.mark.parametrize(
    ("name", "size", "enlarged_to"),
    [
        ("alexnet", 8, 64),
        ("densenet121", 8, 32),
        ("efficientnet_b0", 8, None),
        ("googlenet", 8, 32),
        ("inception_v3", 32, 96),
        ("maxvit_t", 32, 224),
        ("mobilenet_v3_small", 8, None),
        ("regnet_y_400mf", 8, None),
        ("resnet18", 8, None),
        ("shufflenet_v2_x0_5", 8, None),
        ("squeezenet1_1", 8, 32),
        ("swin_t", 8, None),
        ("vit_b_32", 8, 32),
    ],
)
def test_torchvision(name: str, size: int, enlarged_to: int | None) -> None:
    model = make_model(name, channels=1, image_size=size, num_classes=10)
    enlarge = getattr(model, "enlarge", None)
    assert (enlarge and enlarge.size) == (enlarged_to and (enlarged_to, enlarged_to))
    check(model, 1, size)


def test_a_large_enough_image_is_not_enlarged() -> None:
    model = make_model("squeezenet1_1", channels=3, image_size=32, num_classes=10)
    assert type(model) is torchvision.models.SqueezeNet
    check(model, 3, 32)


def test_four_channels() -> None:
    check(make_model("resnet18", channels=4, image_size=32, num_classes=10), 4, 32)


def test_the_new_convolution_keeps_the_old_ones_geometry() -> None:
    model = make_model("resnet18", channels=1, image_size=32, num_classes=10)
    assert (model.conv1.in_channels, model.conv1.out_channels) == (1, 64)
    assert (model.conv1.kernel_size, model.conv1.stride, model.conv1.padding) == (
        (7, 7),
        (2, 2),
        (3, 3),
    )
    assert model.conv1.bias is None


def test_weights_are_torchvisions_own_and_trying_it_changes_nothing() -> None:
    torch.manual_seed(3)
    ours = make_model("resnet18", channels=3, image_size=32, num_classes=10)
    after_ours = torch.get_rng_state()
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(num_classes=10)
    assert torch.equal(after_ours, torch.get_rng_state())
    for (name, value), (_, expected) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert torch.equal(value, expected), name
    assert ours.bn1.num_batches_tracked == 0
    assert ours.training


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("resnet5", "resnet50"),
        ("ResNet18", "resnet18"),
        ("cmn", "cnn"),
        ("fcn_resnet50", "resnet50"),
        ("zzz", None),
    ],
)
def test_an_unknown_name_suggests_another(name: str, suggestion: str | None) -> None:
    with pytest.raises(UsageError) as error:
        make_model(name, channels=1, image_size=8, num_classes=10)
    text = str(error.value)
    told, _, meant = text.partition("; did you mean ")
    assert told == f"unknown model {name!r}: expected {models.MODELS}"
    assert (suggestion or "") in meant
    assert bool(meant) == bool(suggestion)
    assert "\n" not in text


def test_a_model_that_takes_no_such_images() -> None:
    # Larger than every size on the list, and not divisible as maxvit wants it.
    with pytest.raises(UsageError, match="maxvit_t takes no images of 300x300") as error:
        make_model("maxvit_t", channels=3, image_size=300, num_classes=10)
    assert "\n" not in str(error.value)


def test_cnn_learns_the_digits(tmp_path: object) -> None:
    torch.manual_seed(0)
    data = datasets.load_dataset("digits", tmp_path, download=False)
    world = World(**vars(ALONE), backend="gloo", device=torch.device("cpu"))
    train = loaders.train_loader(data.train, Settings(batch_size=64), world)
    test = loaders.test_loader(data.test, Settings(batch_size=64), world)
    model = make_model("cnn", channels=1, image_size=8, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(6):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    assert correct / len(data.test) >= 0.97
