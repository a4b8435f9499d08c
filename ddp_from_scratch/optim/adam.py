"""Adam and AdamW on flat buckets."""

import torch

from ddp_from_scratch.optim.flat_optimizer import FlatOptimizer
from ddp_from_scratch.optim.update_rules import ADAM_RULE


class Adam(FlatOptimizer, torch.optim.Adam):
    """torch.optim.Adam with one flat call per bucket; the same parameters to the last bit.

    They are those of `fused=True`. See `FlatOptimizer` for arguments, errors, and what a step does.

    Follows: torch/optim/adam.py, `_fused_adam`.
    """

    _rule = ADAM_RULE


class AdamW(FlatOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with one flat call per bucket; the same parameters to the last bit.

    They are those of `fused=True`. See `FlatOptimizer` for arguments, errors, and what a step does.

    Follows: torch/optim/adamw.py, and `_fused_adam` in torch/optim/adam.py.
    """

    _rule = ADAM_RULE
