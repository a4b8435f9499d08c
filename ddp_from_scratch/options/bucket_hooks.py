"""One Python call per bucket, not one per gradient, where that is enough.

With many small layers, a Python call for each gradient is the largest cost. Once the ranks have
agreed on an order, autograd only notes the other gradients in their bucket (`Bucket.noted`), and
the hook of the last one counts them all. The very first gradient keeps its hook, since it begins
the pass.
"""

import weakref
from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import is_, setitem

import torch

from ddp_from_scratch.core.bucket import Bucket, gradient_of
from ddp_from_scratch.core.extension import Extension
from ddp_from_scratch.core.hooks import current_pass
from ddp_from_scratch.core.reducer import CoreReducer


class BucketHooks(Extension):
    """Hooks only the last gradient of each bucket, unless another extension asks for each one."""

    on: bool = False  # True if autograd does not call for every gradient

    def attach(self, reducer: CoreReducer) -> None:
        super().attach(reducer)
        self._hooked: tuple[bool, tuple[Bucket, ...]] = (True, ())

    def on_layout(self) -> None:
        reducer: CoreReducer = self._of()
        calls, order = reducer.calls, reducer.ready_order
        each = bool(calls["on_gradient"] or reducer.needs_each)
        hooked = order is None or each, reducer.flat_buckets
        if reducer.hooks is None or hooked == self._hooked:
            return
        self._hooked = hooked
        reducer.count_noted()
        hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        if order is not None and not each:
            first = reducer.layout.index_of[order[0]]
            for bucket in reducer.flat_buckets:
                # Not a parameter with a hook of the program's, which may clear the gradient.
                others = filter(reducer.hooks.is_hooked, bucket.members)
                noted = {*bucket.members[:-1]} - {first, *others}
                if noted and not bucket.packs_early:
                    # C code alone, without a Python frame.
                    hooks |= {index: partial(setitem, bucket.noted, index) for index in noted}
                    last = bucket.members[-1]
                    hooks[last] = partial(_last, weakref.ref(reducer), last)
        reducer.hooks.replace(hooks)
        self.on = bool(hooks)


def _last(of: "weakref.ref[CoreReducer]", index: int, parameter: torch.Tensor) -> None:
    """Counts the bucket whose last member is `index`; its `.grad` is complete."""
    reducer: CoreReducer | None = of()
    if reducer is None:
        return
    if parameter.grad is None:
        CoreReducer.ready(of, index, parameter)
        return
    with reducer.lock:
        bucket = reducer.bucket_of[index]
        bucket.noted[index] = parameter
        # The list lives until the launch, so that Python does not wrap each `.grad` again.
        gradients = [*map(gradient_of, bucket.noted.values())]
        if (
            bucket.noted.keys() != bucket.missing
            or not reducer.sync
            or torch.is_grad_enabled()
            or any(map(is_, gradients, repeat(None)))
        ):
            reducer.count_each(bucket)
            return
        if reducer.pass_number != current_pass():
            reducer.begin_pass()
        bucket.noted.clear()
        bucket.missing.clear()
        reducer.launch_full_buckets(early=True)
