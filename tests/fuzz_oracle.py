"""What every rank must hold after each operation of a case: all ranks played in one process.

Averaging is written out here, one parameter at a time, from what the guide promises: nothing of
the package is used. Where the guide promises an error, that is what is expected.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fuzz_case import (
    Backward,
    Case,
    Evaluate,
    Forward,
    Freeze,
    Net,
    Operation,
    Player,
    State,
    Step,
    Zero,
    loss_of,
)

ANY_ERROR = r"(?s)."  # a rank that others have left alone: its backend's words
UNUSED = r"no gradient in the last backward pass on rank {rank} for: "
CHANGED = r"became .* on rank {rank} after the Reducer was made"
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


class Oracle:
    """Plays a case.

    Attributes:
        case: with only those operations that make sense where they come, up to an error.
        expected: one for each of its operations.
        largest: the largest gradient of any rank before averaging.
        together: whether an error, if there is one, is all ranks'.
        as_torch: whether torch's DistributedDataParallel is right in this case.
    """

    def __init__(self, case: Case) -> None:
        self._whole = case
        self._players = [Player(case, rank, Net(case, 0)) for rank in range(case.world_size)]
        self._names = {id(p): n for n, p in self._players[0].model.named_parameters()}
        self._trainable = {i for i, p in enumerate(case.parameters) if not p.frozen}
        self._varies = case.find_unused_parameters and not case.static_graph
        ranks = range(case.world_size)
        self._counted: list[set[int]] = [set() for _ in ranks]  # of an average not yet complete
        self._used: list[set[int]] = [set() for _ in ranks]  # since the last average
        self._first: list[set[int]] | None = None  # what the first pass of a static graph used
        self._used_by_any: set[int] = set()
        self.expected: list[Expected] = []
        self.largest = 0.0
        operations: list[Operation] = []
        for op in case.operations:
            # Inputs depend on the operation's number: dropped ones must not count.
            expected = self._play(len(operations), op)
            if expected is None:
                continue
            if not expected.must and not any(self._counted):
                expected.states = [player.state() for player in self._players]
            operations.append(op)
            self.expected.append(expected)
            if expected.must:
                if isinstance(op, Backward) and any(self._counted):
                    # Ranks that are not waiting come to their own error in the next forward.
                    everything = tuple(range(len(case.branches)))
                    operations.append(Forward((everything,) * case.world_size))
                    waiting = expected.must.keys()
                    self.expected.append(
                        Expected({r: e for r, e in self._incomplete().items() if r not in waiting})
                    )
                break
        self.case = replace(case, operations=tuple(operations))
        self.as_torch = self._is_torch_right()
        self.together = not case.divided and all(
            len(e.must) in (0, case.world_size) for e in self.expected
        )

    def _play(self, number: int, op: Operation) -> Expected | None:
        """None for an operation that makes no sense here."""
        if isinstance(op, Forward):
            must = self._changed() or self._incomplete()
            if not must:
                self._send_buffers(op)
                self._all_play(number, op)
            return Expected(must)
        if isinstance(op, Backward):
            return self._backward(number, op)
        if isinstance(op, Zero) and any(self._counted):
            return None  # gradients are under way
        if isinstance(op, Step) and any(self._counted):
            return Expected(self._incomplete())
        if isinstance(op, Evaluate) and not op.rank < self._whole.world_size:
            return None
        if isinstance(op, Freeze) and not op.parameter < len(self._whole.parameters):
            return None
        self._all_play(number, op)
        return Expected()

    def _all_play(self, number: int, op: Operation) -> None:
        for player in self._players:
            player.play(number, op)

    def _send_buffers(self, op: Forward) -> None:
        if self._whole.wrapped and not op.no_sync:
            for player in self._players[1:]:
                for to, src in zip(
                    player.model.buffers(), self._players[0].model.buffers(), strict=True
                ):
                    to.copy_(src)

    # Errors -------------------------------------------------------------------------------------

    def _changed(self) -> dict[int, tuple[str, set[str]]]:
        must = {}
        for rank, player in enumerate(self._players):
            for i, p in enumerate(player.parameters):
                before = i in self._trainable
                if p.requires_grad != before and not (self._varies and before):
                    must[rank] = (CHANGED.format(rank=rank), set[str]())
        return must

    def _incomplete(self) -> dict[int, tuple[str, set[str]]]:
        return {
            rank: (UNUSED.format(rank=rank), {self._name(i) for i in self._trainable - counted})
            for rank, counted in enumerate(self._counted)
            if counted
        }

    def _name(self, index: int) -> str:
        return self._names[id(self._players[0].parameters[index])]

    # Backward -----------------------------------------------------------------------------------

    def _backward(self, number: int, op: Backward) -> Expected | None:
        alive = len(self._players[0].graphs)
        if not op.back or max(op.back) >= alive or len(set(op.back)) < len(op.back):
            return None
        touched = [self._touched(player, op) for player in self._players]
        if not all(touched):
            return None  # a rank would not take part at all
        complete = [c | t == self._trainable for c, t in zip(self._counted, touched, strict=True)]
        overlapping = any(c & t for c, t in zip(self._counted, touched, strict=True))
        plain = not self._varies and not self._whole.static_graph
        wrong = self._not_static(touched)
        if any(t != touched[0] for t in touched):
            # Where only some ranks get an error the others wait for them.
            meet = all(complete) and not overlapping
            alone = self._whole.divided and not overlapping
            if plain and not (meet or alone or (op.no_sync and not overlapping)):
                return None
        if wrong and not op.no_sync and len(wrong) < self._whole.world_size:
            return None
        self._all_play(number, op)
        for used, new in zip(self._used, touched, strict=True):
            used |= new
        may = (SECOND,) if overlapping else ()
        if op.no_sync:
            return Expected(may=may)
        if self._varies:
            self._average(set.union(*self._used))
        elif self._whole.static_graph:
            if self._first is None:
                self._first, self._used_by_any = touched, set.union(*self._used)
            self._average(self._used_by_any)
            errors = f"({NOT_STATIC}|{SECOND})"
            return Expected({rank: (errors.format(rank=rank), set[str]()) for rank in wrong})
        elif all(complete):
            self._average(self._trainable)
            self._counted = [set() for _ in self._players]
        else:
            must = {rank: (ANY_ERROR, set[str]()) for rank, done in enumerate(complete) if done}
            for rank, new in enumerate(touched):
                self._counted[rank] = set() if complete[rank] else self._counted[rank] | new
            return Expected(must, may=may)
        return Expected(may=may)

    def _not_static(self, touched: list[set[int]]) -> list[int]:
        """The ranks on which this pass of a static graph would not be as the first."""
        if self._first is None:
            return []
        return [
            rank
            for rank, (now, then, used) in enumerate(
                zip(touched, self._first, self._used, strict=True)
            )
            if now != then or used - self._used_by_any
        ]

    def _touched(self, player: Player, op: Backward) -> set[int]:
        """The parameters that get a gradient."""
        graphs = [player.graphs[-1 - back] for back in op.back]
        found = _leaves([loss_of(graph, op.outputs) for graph in graphs])
        return {i for i, p in enumerate(player.parameters) if id(p) in found and p.requires_grad}

    @torch.no_grad()
    def _average(self, indices: set[int]) -> None:
        n = len(self._players)
        for index in indices:
            members = [player.parameters[index] for player in self._players]
            terms = [torch.zeros_like(p) if p.grad is None else p.grad * (1.0 / n) for p in members]
            self.largest = max([self.largest, *(n * t.abs().max().item() for t in terms)])
            for p in members:
                p.grad = sum(terms[1:], terms[0]).clone()
        self._used = [set() for _ in self._players]

    # torch --------------------------------------------------------------------------------------

    def _is_torch_right(self) -> bool:
        """Forward and backward in turn, and none of what torch is silent about or refuses."""
        case, alive = self.case, 0
        buffers = case.buffers and case.wrapped
        if any(expected.must or expected.may for expected in self.expected):
            return False
        before: Forward | None = None
        for op in case.operations:
            if isinstance(op, Forward):
                alive, before = alive + 1, op
                if alive > 1 or (op.no_sync and (buffers or case.static_graph)):
                    return False
            elif isinstance(op, Backward):
                every = op.outputs == "all" or case.branches[1:] == ()
                assert before is not None
                if op.keep or not every or before.no_sync != op.no_sync:
                    return False
                alive = 0
            elif isinstance(op, Step):
                alive = 0
            elif isinstance(op, Freeze) or (isinstance(op, Evaluate) and buffers):
                return False
        return True


def _leaves(tensors: list[Any]) -> set[int]:
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
