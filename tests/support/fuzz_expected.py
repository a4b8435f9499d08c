"""Results that a case may have: the errors of ranks, their states, and where torch is right."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.fuzz_case import (
    Backward,
    Case,
    Evaluate,
    Forward,
    State,
    Step,
    Zero,
)

ANY_ERROR = r"(?s)."  # a rank that others have left alone: its backend's words
UNUSED = r"no gradient in the last backward pass on rank {rank} for: "
CHANGED = r"became .* on rank {rank} after the Reducer was made"
UNEQUAL = r"the weights of ranks differ, and the module has synchronised batch norm"
LATE = r"a forward pass on rank {rank} has written to written"
DRIFTED = r"average 1: parameter {name} is not the same on all ranks"
SECOND = r"got a second gradient on rank {rank} "
NOT_STATIC = r"static_graph=True, but .* on rank {rank} "


@dataclass
class Expected:
    """Of one operation.

    Attributes:
        must: the error that a rank must raise, and the parameters that it must name; the case ends.
        may: the errors that ranks may raise instead of being right; the case ends then.
        states: what each rank holds, or None while gradients are under way.
    """

    must: dict[int, tuple[str, set[str]]] = field(default_factory=dict)
    may: tuple[str, ...] = ()
    states: list[State] | None = None


def is_torch_right(case: Case, expected: list[Expected]) -> bool:
    """Forward and backward in turn, and none of what torch is silent about or refuses."""
    alive = 0
    buffers = case.buffers and case.sends_buffers
    if any(each.must or each.may for each in expected):
        return False
    if case.batch_norm or case.checkpoint == "reentrant":
        return False
    if case.find_unused_parameters and any(p.kind == "table" for p in case.parameters):
        return False  # raises where a rank does not use one
    before: Forward | None = None
    for op in case.operations:
        if isinstance(op, Forward):
            alive, before = alive + 1, op
            if alive > 1 or (op.no_sync and case.static_graph):
                return False
        elif isinstance(op, Backward):
            every = op.outputs == "all" or case.branches[1:] == ()
            assert before is not None
            if op.keep or not every or before.no_sync != op.no_sync:
                return False
            alive = 0
        elif isinstance(op, Step):
            if alive and buffers:  # torch sends them before the next forward pass all the same
                return False
            alive = 0
        elif isinstance(op, Evaluate):
            if buffers:
                return False
        elif not isinstance(op, Zero):
            return False
    return True


def leaves_of(tensors: list[Any]) -> set[int]:
    ahead = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(ahead), set()
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return found
