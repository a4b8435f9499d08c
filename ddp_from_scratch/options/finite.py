"""`check_finite`: a gradient that is not finite is named before it disappears in an average."""

import torch

from ddp_from_scratch.common.group import on_gpu_of
from ddp_from_scratch.core.bucket import Bucket, FlatBucket
from ddp_from_scratch.core.observer import Check
from ddp_from_scratch.core.reducer import CoreReducer
from ddp_from_scratch.sync.check_sync import gather_integers


class FiniteCheck(Check):
    """Finds gradients that are not finite in the packed buckets, on the rank that has them.

    A packed bucket costs one sum, which is not finite if an element is not. On a GPU the host waits
    for that sum. The rank still sends the bucket, since the others wait for it. When all buckets
    are launched, the ranks gather what each has found (32 bytes), so all of them raise the same
    RuntimeError from `backward()`. Then no optimizer has stepped, and the next pass may continue.
    """

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        # The first parameter in launch order: the closest to the loss, where a nan comes from.
        self._first: tuple[int, int, int] | None = None  # its index, and its numbers of nan and inf
        self._parameters = 0  # with a gradient that is not finite, in this average

    def on_packed(self, bucket: Bucket) -> None:
        reducer: CoreReducer = self._reducer()
        if isinstance(bucket, FlatBucket):
            whole, gradients = bucket.flat, bucket.views
        else:
            whole = _sent(bucket, reducer)
            gradients = [whole]
        if whole.sum().isfinite():
            return
        for index, gradient in zip(bucket.members, gradients, strict=True):
            nan, inf = int(gradient.isnan().sum()), int(gradient.isinf().sum())
            if nan or inf:  # the sum of finite elements may overflow, too
                self._parameters += 1
                self._first = self._first or (index, nan, inf)

    def verdict(self) -> RuntimeError | None:
        reducer: CoreReducer = self._reducer()
        mine = [self._parameters, *(self._first or (0, 0, 0))]
        self.on_abort()
        with on_gpu_of(reducer.module):
            everyone = gather_integers(mine, reducer.process_group)
        found = []
        for rank, (parameters, index, nan, inf) in enumerate(everyone):
            if parameters:
                size = reducer.parameters[index].numel()
                text = f"{reducer.names[index]} on rank {rank} ({nan} nan and {inf} inf in {size} "
                more = f" and {parameters - 1} more there" if parameters > 1 else ""
                found.append(f"{text}elements){more}")
        if not found:
            return None
        average = reducer.iteration + 1
        return RuntimeError(f"average {average}: a gradient is not finite: {'; '.join(found)}")

    def on_abort(self) -> None:
        self._first, self._parameters = None, 0


def _sent(bucket: Bucket, reducer: CoreReducer) -> torch.Tensor:
    """Returns what a sparse bucket sends: the gathered rows, or a dense gradient."""
    (parameter,) = bucket.parameters()
    gradient = parameter.grad
    plan = reducer.average.plan
    if gradient is None or (plan is not None and plan.sends_zeros):
        return torch.zeros(1, dtype=torch.float32, device="cpu")
    return gradient.coalesce().values() if gradient.is_sparse else gradient
