"""SGD on flat buckets."""

import torch

from ddp_from_scratch.optim.flat_optimizer import FlatOptimizer
from ddp_from_scratch.optim.update_rules import SGD_RULE


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD with one flat call per bucket; the same parameters to the last bit.

    They are those of `foreach=False` and `foreach=True`. See `FlatOptimizer` for arguments, errors,
    and what a step does.

    Follows: torch/optim/sgd.py, `_single_tensor_sgd` and `_fused_sgd`.
    """

    _rule = SGD_RULE
