"""Builds classifiers for images of any size: a small CNN, an MLP, or a torchvision model."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.errors import needs_extra, one_line
from ddp_from_scratch.training.settings import MODELS

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Images are enlarged to the first of these sizes that the architecture accepts.
_SIZES = (32, 64, 96, 112, 128, 224, 299)


def make_model(name: str, *, channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Builds an untrained model for float images (batch, channels, image_size, image_size).

    The global generator draws the weights. A torchvision model gets a first convolution for that
    many channels and, if the images are too small for it, an upsampling layer in front.
    """
    if name == "cnn":
        return _cnn(channels, image_size, num_classes)
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * image_size**2, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, num_classes),
        )
    # Imported here because it takes longer than torch.
    with needs_extra("train"):
        import torchvision

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(f"unknown model {name!r}: expected {MODELS}")
    return _fit_to_images(name, channels, image_size, num_classes)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Returns the context of a forward pass in `--precision`."""
    return torch.autocast(device.type, _DTYPES[precision], precision != "fp32")


def _cnn(channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Two convolutions at full size, then one for each halving down to 4x4 or less."""
    width, size = 32, image_size
    layers: OrderedDict[str, nn.Module] = OrderedDict(block0=_block(channels, width, stride=1))
    layers["block1"] = _block(width, width, stride=1)
    while size > 4:
        wider = min(2 * width, 256)
        layers[f"block{len(layers)}"] = _block(width, wider, stride=2)
        width, size = wider, (size + 1) // 2
    # No average pooling: on small images only position tells the parts of a digit apart.
    head = nn.Sequential(nn.Flatten(), nn.Linear(width * size**2, num_classes))
    return nn.Sequential(OrderedDict(features=nn.Sequential(layers), head=head))


def _block(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    # No bias, because batch norm subtracts it.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _fit_to_images(name: str, channels: int, image_size: int, num_classes: int) -> nn.Module:
    model: nn.Module | None = None
    for size in (image_size, *(size for size in _SIZES if size > image_size)):
        try:
            if model is None:
                # vit and maxvit are built for one size and reject a wrong one here.
                model = _torchvision_model(name, channels, size, num_classes)
            # On the meta device: the model's parameters, buffers and generators stay unchanged.
            named = [*model.named_parameters(), *model.named_buffers()]
            shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
            with torch.no_grad(), torch.device("meta"):
                images = torch.empty(2, channels, size, size)
                torch.func.functional_call(model, shapes, (images,))
        except (AssertionError, RuntimeError, ValueError) as error:  # vit, most, maxvit
            reason = one_line(error)
            continue
        if size == image_size:
            return model
        enlarge = nn.Upsample(size=(size, size), mode="bilinear", align_corners=False)
        return nn.Sequential(OrderedDict(enlarge=enlarge, model=model))
    raise UsageError(
        f"{name} takes no images of {image_size}x{image_size}, not even enlarged to {size}x{size} "
        f"({reason}); choose another model"
    )


def _torchvision_model(name: str, channels: int, size: int, num_classes: int) -> nn.Module:
    options: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary losses need another training loop, and these models initialise slowly.
        options = {"aux_logits": False, "init_weights": False}
    if name.startswith("vit"):
        options["image_size"] = size
    if name.startswith("maxvit"):
        options["input_size"] = (size, size)
    import torchvision

    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **options
    )
    if channels != 3:
        # The first convolution that a torchvision model registers sees the image.
        path, old = next(
            (path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d)
        )
        new: Any = nn.Conv2d
        shape = {"kernel_size": old.kernel_size, "stride": old.stride, "padding": old.padding}
        bias = old.bias is not None
        model.set_submodule(path, new(channels, old.out_channels, **shape, bias=bias))
    return model
