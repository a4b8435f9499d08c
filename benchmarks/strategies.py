"""What is compared: ways to keep a model in step, each a function that takes one training step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_from_scratch as ddp

Step = Callable[[], None]

REFERENCES = ("torch DDP, default", "torch DDP, views")
NO_COMMUNICATION = "no communication"


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one rank.

    Attributes:
        name: for the table.
        model: makes the model; drawn from torch's generator.
        batch: makes inputs and labels.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _mlp() -> nn.Module:
    """16 x Linear(1024, 1024): 64 MB of gradients."""
    layers: list[nn.Module] = []
    for _ in range(16):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers)


WORKLOADS = {
    "mlp": Workload(
        "MLP, 64 MB, batch 16",
        _mlp,
        lambda: (torch.randn(16, 1024), torch.randint(1024, (16,))),
    ),
    "resnet18": Workload(
        "ResNet-18, 45 MB, batch 8 at 64x64",
        lambda: torchvision.models.resnet18(num_classes=1000),
        lambda: (torch.randn(8, 3, 64, 64), torch.randint(1000, (8,))),
    ),
}


@dataclass
class Contender:
    """One strategy at work on its own copy of the model.

    Attributes:
        name: for the table.
        model: the user's module, without a wrapper.
        step: takes one training step.
    """

    name: str
    model: nn.Module
    step: Step


def contenders(workload: Workload, device: torch.device) -> list[Contender]:
    """Every strategy, each with the same parameters and, on this rank, the same batch."""
    batch = tuple(tensor.to(device) for tensor in workload.batch())

    def contender(name: str, prepare: Callable[[nn.Module], nn.Module]) -> Contender:
        torch.manual_seed(0)
        model = workload.model().to(device)
        called = prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(called(batch[0]), batch[1]).backward()
            optimizer.step()

        return Contender(name, model, step)

    def reduced(**settings: object) -> Callable[[nn.Module], nn.Module]:
        def prepare(model: nn.Module) -> nn.Module:
            ddp.broadcast_parameters(model)
            # Held by the model's own hook for as long as the model lives.
            ddp.Reducer(model, **settings)  # type: ignore[arg-type]
            return model

        return prepare

    views = {"gradient_as_bucket_view": True}
    return [
        contender(NO_COMMUNICATION, lambda model: model),
        contender(REFERENCES[0], DistributedDataParallel),
        contender(REFERENCES[1], lambda model: DistributedDataParallel(model, **views)),  # type: ignore[arg-type]
        contender("one all-reduce per parameter", reduced(bucket_cap_mb=0, overlap=False)),
        contender("one flat bucket", reduced(bucket_cap_mb=float("inf"), overlap=False)),
        contender("buckets", reduced(overlap=False)),
        contender("buckets, overlapped (default)", reduced()),
        contender("buckets, overlapped, views", reduced(**views)),
    ]
