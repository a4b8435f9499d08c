"""Adam and AdamW on flat buckets."""

import torch

from ddp_from_scratch.optim.flat_optimizer import FlatOptimizer
from ddp_from_scratch.optim.update_rules import ADAM_RULE


class Adam(FlatOptimizer, torch.optim.Adam):
    """torch.optim.Adam with one flat call per bucket; the same parameters to the last bit.

    They are those of `fused=True`. See `FlatOptimizer` for what a step does.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.Adam.
        reducer: averages the gradients; keeps them in its buckets from now on.

    Raises: see `FlatOptimizer`; from a step, if a gradient is sparse.

    Follows: torch/optim/adam.py, `_fused_adam`.
    """

    _rule = ADAM_RULE


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with one flat call per bucket; the same parameters to the last bit.

    They are those of `fused=True`. See `FlatOptimizer` for what a step does.

    Args:
        params: parameters, named parameters or groups, as every optimizer takes them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        reducer: averages the gradients; keeps them in its buckets from now on.

    Raises: see `FlatOptimizer`; from a step, if a gradient is sparse.

    Follows: torch/optim/adamw.py, and `_fused_adam` in torch/optim/adam.py.
    """

    _rule = ADAM_RULE
