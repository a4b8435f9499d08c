"""Makes the optimizer of `--optimizer`."""

from typing import Any

import torch

import ddp_from_scratch as ddp
from ddp_from_scratch import UsageError
from ddp_from_scratch.training.settings import Settings


def make_optimizer(
    settings: Settings, model: torch.nn.Module, reducer: ddp.Reducer
) -> torch.optim.Optimizer:
    """Makes `--optimizer`. Its state is numbered in the order of the model's parameters."""
    rates: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    parameters, shard = list(model.parameters()), settings.shard
    if settings.optimizer == "adamw":
        return ddp.AdamW(parameters, reducer=reducer, shard=shard, **rates)
    assert settings.momentum is not None, "it has a default"
    if settings.optimizer == "sgd":
        momentum = settings.momentum
        return ddp.SGD(parameters, momentum=momentum, reducer=reducer, shard=shard, **rates)
    hidden = hidden_matrices(model, settings.model)
    # A group for each parameter, as two groups would number the state in another order.
    groups = [{"params": [p], "use_muon": id(p) in hidden} | rates for p in parameters]
    return ddp.Muon(
        groups, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw", reducer=reducer
    )


def hidden_matrices(model: torch.nn.Module, name: str) -> set[int]:
    """Returns the ids of all matrices but the output layer's; a UsageError if there are none."""
    found = {id(p) for p in [p for p in model.parameters() if p.ndim == 2][:-1]}
    if not found:
        raise UsageError(
            f"--optimizer muon steps matrices of hidden layers, and {name} has none: use adamw, or "
            f"a model that has some (mlp, vit_b_16)"
        )
    return found
