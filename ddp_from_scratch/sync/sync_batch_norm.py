"""Batch norm over the batches of all ranks, on CPUs and GPUs.

It takes one collective in forward, for the moments, and one in backward:

    forward   rank r: n, mean, sum (x - mean)^2   -> all-gather ->   n, mean, variance of all
    backward  rank r: sum dy, sum dy (x - mean)   -> all-reduce ->   both sums over all
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ddp_from_scratch.common.group import all_gather_single


def convert_sync_batchnorm(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Makes every batch norm of `module` use the batches of all ranks, in place.

    A layer keeps its parameters (the same objects), buffers, hooks and mode. A layer that is used
    in two places stays one layer. `state_dict()` does not change.

    Args:
        module: a module with BatchNorm1d, 2d, 3d or torch.nn.SyncBatchNorm layers.
        process_group: the ranks whose batches are combined; None means all. With a group other than
            the Reducer's, a layer does not queue behind the buckets in flight.

    Returns:
        `module`, or its replacement if it is a batch norm itself.

    Raises:
        ValueError: a layer is lazy and has no shape yet.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and isinstance(layer, LazyModuleMixin):
            raise ValueError(
                f"{name or 'the module'} is lazy and has no shape yet: run one forward pass before "
                f"convert_sync_batchnorm"
            )
    converted: dict[torch.nn.Module, SyncBatchNorm] = {}

    def convert(layer: _BatchNorm) -> SyncBatchNorm:
        if layer not in converted:
            # Without __init__, which would make new parameters, while optimizers hold the old ones.
            converted[layer] = new = SyncBatchNorm.__new__(SyncBatchNorm)
            new.__dict__.update(layer.__dict__, process_group=process_group)
        return converted[layer]

    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                parent._modules[name] = convert(child)
    return convert(module) if isinstance(module, _BatchNorm) else module


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d, with mean and variance over all ranks' batches.

    Batches may be empty, or differ in size. Outputs, gradients and running statistics are those of
    one process with the whole batch. Running statistics have the same bits on every rank. Each rank
    computes its part of the gradients of weight and bias, and the Reducer averages the parts.

    Either all ranks run the layer in forward (and in backward), or none. If ranks have different
    weights, multiply their losses by these weights; `Reducer.weight` would be too late. In
    evaluation mode, or with one rank, the layer is torch's batch norm and communicates nothing.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in
            torch.nn.BatchNorm2d.
        process_group: the ranks whose batches are combined; None means all.

    Raises:
        ValueError: from a forward pass: the input has fewer than 2 dimensions, no channels, or at
            most one value per channel over all ranks; or this rank is not a member of the group.
        RuntimeError: the input has another number of channels; or second derivatives are asked for,
            which the collective in backward does not have.

    Follows: Ioffe and Szegedy, "Batch Normalization" (2015); Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979) for the moments.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises `input` (N, C, ...). Collective in training mode."""
        self._check_input_dim(input)
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        world_size = dist.get_world_size(self.process_group)
        if world_size < 1:
            raise ValueError("this rank is not a member of the batch norm's process group")
        if world_size == 1:
            return super().forward(input)
        # Checked first: an error after the collective has begun would leave other ranks waiting.
        for name in ("running_mean", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and (found := tensor.numel()) != input.size(1):
                raise RuntimeError(f"{name} should contain {input.size(1)} elements not {found}")
        moments = _moments_of_all(input, self.process_group)
        if self.track_running_stats:
            self._update_running_statistics(moments)
        anchor = None
        if moments.need_gradient and torch.is_grad_enabled():
            # On other ranks layers below this one learn, and need this rank's sums. The anchor
            # makes autograd run this layer's backward here, too.
            anchor = torch.empty((), dtype=torch.float32, device=input.device, requires_grad=True)
        output: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, anchor, moments, self.eps, self.process_group
        )
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    @torch.no_grad()
    def _update_running_statistics(self, moments: "_Moments") -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if moments.empty:
            return
        # As in torch, no momentum means the average over all batches so far.
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # As in torch, the running variance is unbiased, but normalisation uses the biased one.
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        for running, now in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
            assert running is not None
            running.copy_(running.double() * (1 - factor) + now * factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncBatchNorm":
        """Copies the layer, but not its process group, which cannot be copied."""
        # Noted first, so that references back to the layer find the copy.
        memo[id(self)] = new = SyncBatchNorm.__new__(SyncBatchNorm)
        own = {name: value for name, value in self.__dict__.items() if name != "process_group"}
        new.__dict__.update(copy.deepcopy(own, memo), process_group=self.process_group)
        return new


@dataclass(frozen=True)
class _Moments:
    """The moments of each channel over all ranks, in float64."""

    count: torch.Tensor  # values per channel, at least 1; one element
    mean: torch.Tensor  # (C,)
    variance: torch.Tensor  # biased; (C,)
    empty: bool  # no rank has any value
    need_gradient: bool  # layers below this one learn on other ranks, but not here


@torch.no_grad()
def _moments_of_all(x: torch.Tensor, group: dist.ProcessGroup | None) -> _Moments:
    """Gathers and merges all ranks' moments. Collective: one all-gather of 2 C + 2 numbers."""
    channels, row = x.size(1), _pack_moments(x)
    rows = row.new_empty(dist.get_world_size(group), len(row))
    all_gather_single(rows.view(-1), row, group=group)
    means, squares, counts, learn = rows.split([channels, channels, 1, 1], dim=1)
    # At least 1, to avoid a division by zero if all batches are empty.
    count = counts.sum(0).clamp(min=1)
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    # bool() and int() wait for a GPU, so they run only where the answer may matter.
    need_gradient = not x.requires_grad and bool(learn.any())
    values = int(counts.sum()) if x.numel() <= channels else None
    if values == 1:  # on every rank
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.size()}"
        )
    return _Moments(count, mean, variance, values == 0, need_gradient)


def _pack_moments(x: torch.Tensor) -> torch.Tensor:
    """Packs [mean, sum of squared deviations, count, learns] of `x` (N, C, ...) as float64."""
    count = x.numel() // x.size(1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.sum(_all_but_channels(x)) / max(count, 1)
    # Sums deviations from the mean, since a difference of large squares would lose all digits.
    squares = (wide - _along_channels(mean, x)).square_().sum(_all_but_channels(x))
    # Filled on the device, because copying a number to a GPU would wait for its earlier work.
    counted, learns = torch.full((2, 1), count, dtype=torch.float64, device=x.device)
    learns.fill_(x.requires_grad)
    return torch.cat([mean.double(), squares.double(), counted, learns])


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over all ranks.

    Backward, with sums over a channel's n values on all ranks:

        dx = weight / std * (dy - sum(dy) / n - (x - mean) / std^2 * sum(dy (x - mean)) / n)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        moments: _Moments,
        eps: float,
        process_group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = moments.mean.to(wide)
        inverse = (moments.variance + eps).rsqrt().to(wide)
        ctx.save_for_backward(x, weight, mean, inverse, moments.count.to(wide))
        ctx.process_group = process_group
        # x comes first, because the result takes its memory format from the first operand.
        y = x.to(wide) - _along_channels(mean, x)
        y.mul_(_along_channels(inverse if weight is None else inverse * weight, x))
        if bias is not None:
            y.add_(_along_channels(bias, x))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        dy = gradient.to(mean.dtype)
        centred = x.to(mean.dtype) - _along_channels(mean, x)
        sums = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])

        dx = d_weight = d_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            d_weight = sums[1] * inverse
        if ctx.needs_input_grad[2]:
            d_bias = sums[0].clone()  # the sum below overwrites `sums`
        # If x and anchor need no gradient, x needs none on any rank, and all skip the collective.
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            dist.all_reduce(sums, group=ctx.process_group)
        if ctx.needs_input_grad[0]:
            of_dy, of_product = sums / count
            dx = centred.mul_(_along_channels(-of_product * inverse.square(), x))
            dx.add_(dy).sub_(_along_channels(of_dy, x))
            dx.mul_(_along_channels(inverse if weight is None else inverse * weight, x))
            dx = dx.to(x.dtype)
        return dx, d_weight, d_bias, None, None, None, None


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
