"""SGD on flat buckets."""

import torch

from ddp_from_scratch.optim.flat_optimizer import FlatOptimizer
from ddp_from_scratch.optim.update_rules import SGD_RULE


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; the same parameters to the last bit.

    They are those of `foreach=False` and `foreach=True`. With `fused=True` torch rounds the
    momentum of a parameter's last elements otherwise. See `FlatOptimizer` for what a step does.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        reducer: averages the gradients; keeps them in its buckets from now on.

    Raises: see `FlatOptimizer`.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd` and `_fused_sgd`.
    """

    _rule = SGD_RULE
