"""What must not pass in silence: checks before a forward pass and before an optimizer's step."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .bucket import Bucket
from .snapshot import AGAIN

Handle = torch.utils.hooks.RemovableHandle
StepCheck = Callable[[torch.optim.Optimizer], None]


def trains(module: torch.nn.Module) -> bool:
    """Whether the forward pass that begins is one of training, which all ranks take part in.

    An evaluation is one rank's own affair; recomputing, for activation checkpointing, is part of
    backward. Reentrant checkpointing of the whole module runs it without gradients first.
    """
    recomputing = torch._C._current_graph_task_id() != -1
    return not recomputing and (torch.is_grad_enabled() or module.training)


def check_complete(
    broken_off: bool, buckets: Sequence[Bucket], names: Sequence[str], rank: int
) -> None:
    """Raises unless every gradient of the last backward pass has been averaged."""
    if broken_off and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"an optimizer stepped during backward on rank {rank}, on gradients that are not "
            f"averaged yet: let it step when backward() has returned"
        )
    if broken_off:
        raise RuntimeError(f"the last backward pass on rank {rank} was broken off: {AGAIN}")
    if any(bucket.begun for bucket in buckets):
        raise RuntimeError(
            f"no gradient in the last backward pass on rank {rank} for: "
            f"{missing_names(buckets, names)}. Every parameter must take part in the loss on every "
            f"rank, unless the Reducer has find_unused_parameters=True"
        )


def second_gradient(
    index: int, buckets: Sequence[Bucket], names: Sequence[str], rank: int
) -> RuntimeError:
    """A gradient came when its bucket was under way: the average would overwrite it."""
    missing = missing_names(buckets, names)
    return RuntimeError(
        f"parameter {names[index]} got a second gradient on rank {rank} while the first was being "
        f"averaged{f' and these had none: {missing}' if missing else ''}. Accumulate several "
        f"backward passes under no_sync(), all but the last; where one pass gives it several "
        f"gradients, or it is used outside of the module's forward, use static_graph=True"
    )


def sparse_gradient(name: str) -> RuntimeError:
    """A gradient came that cannot be laid into a bucket."""
    return RuntimeError(
        f"the gradient of parameter {name} is sparse, which the Reducer cannot lay into a "
        f"bucket: make it dense (for an embedding, sparse=False)"
    )


def check_static(
    differences: Sequence[tuple[int, int, int]], names: Sequence[str], rank: int
) -> None:
    """Raises if a backward pass was not as the first one."""
    if differences:
        told = [f"{names[i]} {now} instead of {then}" for i, now, then in differences]
        raise RuntimeError(
            f"static_graph=True, but this backward pass on rank {rank} gave other numbers of "
            f"gradients than the first: {_shortened(told)}"
        )


def missing_names(buckets: Sequence[Bucket], names: Sequence[str]) -> str:
    """The parameters that have no gradient yet."""
    return _shortened([names[i] for bucket in buckets for i in sorted(bucket.missing)])


def _shortened(told: list[str]) -> str:
    more = f" and {len(told) - 10} more" if len(told) > 10 else ""
    return ", ".join(told[:10]) + more


class ModuleHook:
    """A hook on a module's forward. In a copy of the module, deep or pickled, it does nothing.

    It keeps what it calls alive: a Reducer lives as long as its module.

    Args:
        function: called with the arguments of the hook.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> None:
        """Called by the module."""
        # A compiled model is one graph, without this; the optimizer's step has a check, too.
        if self._function is not None and not torch.compiler.is_compiling():
            self._function(*arguments)

    def __reduce__(self) -> "tuple[type[ModuleHook], tuple[()]]":
        return ModuleHook, ()


def before_optimizer_steps(parameters: Iterable[torch.Tensor], check: StepCheck) -> Handle:
    """Calls `check`, a bound method held weakly, with any optimizer that is to step these.

    Unlike a check before a forward pass this does not depend on how the model is called.
    """
    ours = frozenset(id(parameter) for parameter in parameters)
    return register_optimizer_step_pre_hook(partial(_on_step, weakref.WeakMethod(check), ours))


def _on_step(
    check: "weakref.WeakMethod[StepCheck]",
    ours: frozenset[int],
    optimizer: torch.optim.Optimizer,
    *arguments: object,
) -> None:
    found = check()
    if found is not None and any(
        id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]
    ):
        found(optimizer)


def remove_all(hooks: list[Handle]) -> None:
    """Takes hooks off. Idempotent."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
