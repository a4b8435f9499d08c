"""PowerSGD: a comm hook that sends a bucket's gradients as low-rank matrices.

    reducer.register_comm_hook(ddp.power_sgd.PowerSGDState(rank=2), ddp.power_sgd.power_sgd_hook)

Follows: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (NeurIPS 2019), algorithm 1 with error feedback (algorithm 2) and warm
start. Unlike torch's, it starts no collective in a callback, so it runs on every backend.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_from_scratch.backend.traits import traits
from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.arguments import check_whole
from ddp_from_scratch.common.group import check_group, of_member
from ddp_from_scratch.common.memory import split_like
from ddp_from_scratch.core.bucket import FlatBucket, Future
from ddp_from_scratch.core.comm_hooks import comm_hook
from ddp_from_scratch.options.comm_hooks import Later, allreduce_hook


@dataclass
class PowerSGDState:
    """The settings of PowerSGD, and its state on this rank from step to step.

    For each compressed gradient it keeps Q, the right factor of the last step, which is the same on
    all ranks, and the error, the part of this rank's gradient that it has not sent yet.

    Attributes:
        rank: the rank of the matrices. A higher rank is more exact and sends more.
        start: number of averages at the beginning that are sent in full.
        process_group: the ranks that take part; None means those of the Reducer.
        iteration: number of averages so far.
        elements_sent: number of elements that this rank has sent.
        elements_total: number of gradient elements in the same averages.
    """

    rank: int = 1
    start: int = 10
    process_group: dist.ProcessGroup | None = None
    iteration: int = 0
    elements_sent: int = 0
    elements_total: int = 0
    # Keyed by parameter and not by bucket, because buckets are rebuilt.
    _errors: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    _qs: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("rank", self.rank)
        check_whole("start", self.start)
        if self.rank < 1 or self.start < 0:
            raise ValueError(
                f"rank must be 1 or more and start 0 or more, got {self.rank} and {self.start}"
            )

    def q(self, parameter: torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the right factor of the last step (warm start), or a random one at first."""
        if parameter not in self._qs:
            # All ranks meet new parameters in the order of buckets, so they use the same seeds.
            generator = torch.Generator().manual_seed(7919 + len(self._qs))
            shape = rows, self.rank
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            self._qs[parameter] = values.to(like)
        return self._qs[parameter]

    def remember(
        self,
        parameter: torch.Tensor,
        finite: torch.Tensor,
        gradient: torch.Tensor,
        average: torch.Tensor,
        q: torch.Tensor,
    ) -> None:
        """Keeps `q` and the error `gradient - average` for the next step, if `finite`."""
        if parameter not in self._errors:
            self._errors[parameter] = torch.zeros_like(gradient)
        error, q_before = self._errors[parameter], self._qs[parameter]
        if finite.device.type != "cpu":
            # A branch on `finite` would make the host wait for the GPU.
            error.copy_(torch.where(finite, gradient - average, error))
            q_before.copy_(torch.where(finite, q, q_before))
        elif finite:
            torch.sub(gradient, average, out=error)
            q_before.copy_(q)

    def compresses(self, gradient: torch.Tensor) -> bool:
        """True if a gradient's factors are smaller than the gradient."""
        n = gradient.shape[0] if gradient.dim() > 1 else 0
        m = gradient.numel() // max(n, 1)
        return (n + m) * self.rank < n * m and gradient.dtype.is_floating_point

    def add_errors(self, bucket: FlatBucket) -> list[torch.Tensor]:
        """Adds the errors to the gradients; returns the parameters that had an error."""
        left: list[torch.Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._errors and self.compresses(gradient):
                gradient.add_(self._errors[parameter])
                left.append(parameter)
        return left

    def forget_errors(self, parameters: list[torch.Tensor]) -> None:
        """Drops the errors of gradients that have been sent in full."""
        for parameter in parameters:
            del self._errors[parameter]

    def rescale(self, factor: float) -> None:
        """Multiplies the errors by the factor by which the loss scale has changed."""
        for error in self._errors.values():
            error.mul_(factor)

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Returns the state for a checkpoint, by parameters' names. "errors" are this rank's."""
        named = dict(module.named_parameters())
        return {
            "iteration": self.iteration,
            "qs": {name: self._qs[p] for name, p in named.items() if p in self._qs},
            "errors": {name: self._errors[p] for name, p in named.items() if p in self._errors},
        }

    def load_state_dict(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. If `rank` has changed, right factors start at random.

        With the same number of ranks, each with its own errors, the averages have the same bits.
        With another number, give every rank the mean of all errors, so that nothing is lost.
        """
        named: dict[str, torch.Tensor] = dict(module.named_parameters())
        self.iteration = state["iteration"]
        self._qs, self._errors = (
            {named[name]: tensor.to(named[name].device) for name, tensor in state[kind].items()}
            for kind in ("qs", "errors")
        )
        if any(q.shape[1] != self.rank for q in self._qs.values()):
            self._qs = {}


@comm_hook()
def power_sgd_hook(
    state: PowerSGDState, bucket: FlatBucket, group: dist.ProcessGroup | None = None
) -> Future:
    """Averages the bucket's matrices as P Q^T of rank `state.rank`, and other gradients in full.

    M is the gradient plus its error, as an n x m matrix:

    1. P = M Q, averaged over ranks. Launched here, together with the bucket's other gradients.
    2. P is made orthonormal, the same on all ranks. Q = M^T P, averaged over ranks.
    3. The average is P Q^T. Its difference from M is the new error.

    If P and Q are not smaller than the gradient, n m <= (n + m) rank, the hook sends the gradient
    in full. Ranks that share memory first average their M in full, so only traffic between machines
    is compressed. On a single machine that mean is the result. After an overflow the hook returns
    the non-finite values, so that GradScaler skips the step, and keeps the bucket's errors and Qs.

    `group` is used instead of the state's group, and must have the same ranks.
    """
    group = group or check_group(state.process_group)
    if state.iteration < state.start:
        state.iteration += bucket.is_last()
        return allreduce_hook(group, bucket)
    left = state.add_errors(bucket)
    known = traits(group)
    if known.native is not None and known.shares_memory:
        if known.machines == 1:
            return _average_in_full(state, bucket, group, left)
        # Awaited here and not in `finish`, so that P is sent while backward runs.
        known.native.average_on_machine(bucket.buffer()).wait()
    return _average_in_low_rank(state, bucket, group)


def _average_in_full(
    state: PowerSGDState, bucket: FlatBucket, group: dist.ProcessGroup, left: list[torch.Tensor]
) -> Future:
    averaged = allreduce_hook(group, bucket)

    def finish() -> torch.Tensor:
        average: torch.Tensor = averaged.wait()
        if left and average.isfinite().all():
            state.forget_errors(left)
        state.iteration += bucket.is_last()
        return average

    return Later(finish)


def _average_in_low_rank(
    state: PowerSGDState, bucket: FlatBucket, group: dist.ProcessGroup
) -> Future:
    # A division: see `core/comm_hooks.py`.
    buffer, scale = bucket.buffer(), 1.0 / dist.get_world_size(group)
    matrices, rest = [], []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if state.compresses(gradient):
            matrices.append((parameter, gradient, gradient.flatten(1).float()))
        else:
            rest.append(gradient)
    qs_before = [state.q(parameter, m.shape[1], m) for parameter, _, m in matrices]
    # The transposed product with a narrow matrix takes half the time on a CPU.
    parts = [(q.t() @ m.t()).t() for (_, _, m), q in zip(matrices, qs_before, strict=True)]
    wire = _flat([*parts, *rest], buffer).mul_(scale)
    work = _all_reduce(wire, state, group)
    state.elements_total += buffer.numel()

    # All ranks wait for buckets in the same order, so they issue the second collective in order.
    def finish() -> torch.Tensor:
        work.wait()
        gpu.used_here([wire, *(m for _, _, m in matrices)])
        received = split_like(wire, [*parts, *rest])
        ps = [torch.linalg.qr(p.float()).Q for p in received[: len(parts)]]
        for gradient, average in zip(rest, received[len(parts) :], strict=True):
            gradient.copy_(average)
        qs = [(p.t() @ m).t() for (_, _, m), p in zip(matrices, ps, strict=True)]
        if qs:
            wire_q = _flat(qs, buffer).mul_(scale)
            _all_reduce(wire_q, state, group).wait()
            qs = [q.float() for q in split_like(wire_q, qs)]
            # All ranks sum the same terms, so they agree. A non-finite error would never recover.
            finite = wire.isfinite().all() & wire_q.isfinite().all()
        for (parameter, gradient, _), p, q in zip(matrices, ps, qs, strict=True):
            average = (p @ q.t()).reshape(gradient.shape).to(gradient.dtype)
            state.remember(parameter, finite, gradient, average, q)
            gradient.copy_(average)
        state.iteration += bucket.is_last()
        return buffer

    return Later(finish)


def _all_reduce(tensor: torch.Tensor, state: PowerSGDState, group: dist.ProcessGroup) -> dist.Work:
    state.elements_sent += tensor.numel()
    return of_member(dist.all_reduce(tensor, group=group, async_op=True))


def _flat(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.reshape(-1).to(like.dtype) for t in tensors])
