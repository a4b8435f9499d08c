"""What every rank must hold after each operation of a case: all ranks played in one process.

Averaging is written out here, one parameter at a time, from what the documents promise: nothing of
the package is used. Where they promise an error, that is what is expected.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from re import escape
from typing import Any

import torch
from torch.nn.functional import batch_norm

from tests.support.fuzz_case import (
    Again,
    Average,
    Backward,
    BackwardAndStep,
    Case,
    Differentiate,
    Evaluate,
    Forward,
    Freeze,
    Grow,
    Join,
    Net,
    Player,
    Second,
    Set,
    Step,
    Transform,
    Weigh,
    Zero,
    loss_of,
    part,
)

# Errors of a rank.
ANY = ""  # of one that others have left alone: its backend's words
UNUSED = "no gradient in the last backward pass on rank {rank} for: "
CHANGED = "became .* on rank {rank} after the Reducer was made"
UNEQUAL = "the weights of ranks differ, and the module has synchronised batch norm"
LATE = "a forward pass on rank {rank} has written to written"
DRIFTED = "average 1: parameter %s is not the same on all ranks"
SECOND = "got a second gradient on rank {rank} "
LOCAL = "gradients that stay local cannot go through a comm hook"
NOT_STATIC = "static_graph=True, but .* on rank {rank} "
BUFFERS = "the ranks' buffers differ: rank 0 has "
SETTINGS = "ranks took different steps|ranks called different|settings of Muon differ"
NOTHING = "no gradient to average on rank {rank} for: "


@dataclass
class Expected:
    must: dict[int, str] = field(default_factory=dict)  # by rank, the error that ends the case
    may: str | None = None  # an error that ranks may raise instead of being right; it ends the case
    states: list[dict[str, list[Any]]] | None = None  # of each rank; None with gradients under way


class Oracle:
    """Plays a case: `case` has its operations that make sense, up to an error.

    `expected` is of each. `tolerance` is beside the largest gradient of any rank before averaging,
    `together` whether an error is all ranks', and `as_torch` whether torch's class is right.
    """

    def __init__(self, case: Case) -> None:
        self._whole, self._ranks = case, range(case.world_size)
        self._players = [Player(case, rank, Net(case, 0)) for rank in self._ranks]
        self._names = {id(p): n for n, p in self._players[0].model.named_parameters()}
        self._number = 0  # of the operation that is being played
        self._use: tuple[tuple[int, ...], ...] = ()  # of the forward pass that is being played
        self._largest = 0.0
        self._renew()
        self._varies = case.find_unused_parameters and not case.static_graph
        for rank, player in enumerate(self._players if case.batch_norm else []):
            player.model.first.forward = partial(self._whole_batch, rank)
            player.retain = True  # every rank's graph goes through the others'
        self.expected: list[Expected] = []
        operations: list[Any] = []
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
                    operations.append(Forward((case.everything,) * case.world_size))
                    waiting = expected.must.keys()
                    later = {r: e for r, e in self._incomplete().items() if r not in waiting}
                    self.expected.append(Expected(later))
                break
        self.case = replace(case, operations=tuple(operations))
        self.tolerance = (0.05 if case.coarse else 1e-4) * max(1.0, self._largest)
        self.as_torch = is_torch_right(self.case, self.expected)
        self.together = not case.divided and all(
            len(each.must) in (0, case.world_size) for each in self.expected
        )

    def _renew(self) -> None:
        self._trainable = self._trains(self._players[0])
        self._amounts: tuple[float, ...] | None = None  # of the next average
        # By this Reducer, in its forward passes; and whether it compares ranks for that reason.
        self._averaged = self._wrote = self._watched = False
        self._counted: list[set[int]] = [set() for _ in self._ranks]  # of an incomplete average
        self._used: list[set[int]] = [set() for _ in self._ranks]  # since the last average
        self._first: list[Counter[int]] | None = None  # what a static graph's first pass used
        self._used_by_any: set[int] | None = None  # in a static graph's first average
        # The wrapper's forward passes under no_sync() that no backward pass under it has entered,
        # since the last one outside, on each rank. While there are any, gradients stay local.
        self._pending: list[list[Any]] = [[] for _ in self._ranks]
        # Whether a part of the module has a Reducer of its own, and one that has averaged.
        self._has_second = self._second_averaged = False
        # What had a gradient when the Reducer was made, on each rank.
        self._inherited = [
            {i for i in self._trainable if player.parameters[i].grad is not None}
            for player in self._players
        ]

    def _trains(self, player: Player) -> set[int]:
        return {i for i, p in enumerate(player.parameters) if p.requires_grad}

    def _everyone(self, error: str) -> Expected:
        return Expected(dict.fromkeys(self._ranks, error))

    def _play(self, number: int, op: Any) -> Expected | None:  # noqa: C901
        """None for an operation that makes no sense here."""
        case, under_way = self._whole, any(self._counted)
        match op:
            case Forward():
                must = self._changed() or self._incomplete()
                if 0 < len(must) < case.world_size and case.batch_norm:
                    return None  # the others would wait in the layer for ranks that do not come
                if must:
                    return Expected(must)
                self._all_play(number, op)
                self._note_forward(op)
                self._wrote |= case.writes is not None
                late = self._wrote and self._averaged and not self._watched
                return self._everyone(LATE) if late else Expected()
            case Backward():
                return self._backward(number, op)
            case BackwardAndStep():
                divides = case.shard == "world" or (case.shard == "node" and op.max_norm is None)
                if divides and case.hook and self._players[0].graphs:
                    return self._everyone(LOCAL)
                expected = self._backward(number, Backward())
                if expected is None:
                    return None
                if expected.must:
                    # A rank that others wait for in vain lacks a gradient, and does not step.
                    return replace(expected, must=self._incomplete() | expected.must)
                if not any(self._counted) and op.max_norm is not None:
                    for player in self._players:
                        player.clip(op.max_norm)
                stepped = self._play(number, Step())
                expected = stepped and replace(stepped, may=expected.may)
                tables = [i for i, p in enumerate(case.parameters) if p.kind == "table"]
                for player in self._players if case.shard != "none" else []:
                    for index, p in enumerate(player.parameters):
                        p.grad = p.grad if index in tables else None  # they are averaged nowhere
                return expected
            case Zero() if under_way:
                return None
            case Step() if under_way:
                return Expected(self._incomplete())
            case Step() if self._settings_differ():
                return self._everyone(SETTINGS)
            case Step() if case.batch_norm and any(self._used + self._inherited):
                return None  # with local gradients: ranks must have the same weights of batch norm
            case Evaluate() | Transform() if op.rank not in self._ranks:
                return None
            case Transform() if case.batch_norm or case.checkpoint:
                return None
            case Transform() if self._changed() or self._incomplete():
                return None
            case Freeze() if op.parameter is not None and op.parameter >= len(case.parameters):
                return None
            case Grow() if not case.buffers or (op.rank or 0) >= case.world_size:
                return None
            # Ranks must have the same weights of batch norm.
            case Set(rank=int()) if case.batch_norm or op.rank >= case.world_size:
                return None
            case Differentiate():
                if under_way or case.batch_norm or case.checkpoint == "reentrant":
                    return None
                if not all(self._times(p, Backward()) if p.graphs else () for p in self._players):
                    return None
            case Average():
                return self._average_now()
            case Second():
                return self._add_second(op)
            case Weigh():
                if under_way or case.divided:
                    return None  # all must come to it before any bucket
                if case.batch_norm and len(set(op.amounts)) > 1:
                    return self._everyone(UNEQUAL)
                self._amounts = op.amounts
                return Expected()
            case Again():
                return Expected() if self._make_again(op) else None
            case Join():
                return Expected() if self._join(number, op) else None
        self._all_play(number, op)
        return Expected()

    def _note_forward(self, op: Forward) -> None:
        for pending, player in zip(self._pending, self._players, strict=True):
            outputs = [output for output, _ in player.graphs[-1].values()]
            if any(output.requires_grad for output in outputs) or not op.no_sync:
                pending[:] = [*pending, player.graphs[-1]] if op.no_sync else []

    def _settings_differ(self) -> bool:
        """Whether the ranks, which divide a step, have different settings."""
        divided = self._whole.shard != "none"
        if self._whole.optimizer == "Muon":  # it divides matrices that have a gradient
            divided = any(
                p.grad is not None for one in self._players for p in one.groups()[0]["params"]
            )
        rates = [[group["lr"] for group in player.groups()] for player in self._players]
        return divided and any(each != rates[0] for each in rates)

    def _buffers_differ(self) -> bool:
        """Whether buffers that are sent have several shapes."""
        if not (self._whole.sends_buffers and self._whole.buffers):
            return False
        return len({player.model.grown.shape for player in self._players}) > 1

    def _add_second(self, op: Second) -> Expected | None:
        case = self._whole
        no = case.wrapped or case.halves or case.divided or case.reduce == "sum"
        no = no or case.find_unused_parameters or case.static_graph or self._has_second
        no = no or any(self._counted) or op.branch >= len(case.branches)
        if no or any(self._trains(player) != self._trainable for player in self._players):
            return None
        part = self._trainable.intersection(case.branches[op.branch])
        if not part or part == self._trainable:  # it would replace the first Reducer
            return None
        self._has_second = True
        return Expected()

    def _make_again(self, op: Again) -> bool:
        """Whether it makes sense here."""
        trains = [self._trains(player) for player in self._players]
        if self._whole.divided or any(t != trains[0] for t in trains) or not trains[0]:
            return False
        leaves = not op.removes
        if leaves and (self._whole.wrapped or self._whole.halves or trains[0] != self._trainable):
            return False  # it would not replace what is there
        if leaves and any(self._counted):
            return False
        if self._whole.wrapped:
            if self._players[0].graphs or self._buffers_differ():
                return False  # parameters are sent, and with them graphs end
            self._send(0)
        self._renew()
        return True

    def _all_play(self, number: int, op: Any) -> None:
        self._number = number
        if isinstance(op, Forward):
            self._use = op.use
        for player in self._players:
            player.play(number, op)

    @torch.no_grad()
    def _send(self, src: int, buffers_alone: bool = False) -> None:
        """One rank's parameters and buffers to all."""

        def sent(player: Player) -> list[torch.Tensor]:
            return [*player.model.buffers(), *([] if buffers_alone else player.parameters)]

        for player in self._players:
            for to, value in zip(sent(player), sent(self._players[src]), strict=True):
                to.copy_(value)

    def _whole_batch(self, rank: int, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """`First` of a rank, with the batches of all."""
        first = self._players[rank].model.first
        norm = first.norm
        if not first.training:
            return norm(first.below(x, side))
        whole = torch.cat(
            [
                p.model.first.below(p.input(self._number), p.model.side[0] if 0 in use else None)
                for p, use in zip(self._players, self._use, strict=True)
            ]
        )
        with torch.no_grad():
            norm.running_mean.lerp_(whole.mean(0), norm.momentum)
            norm.running_var.lerp_(whole.var(0), norm.momentum)
            norm.num_batches_tracked += 1
        normalised = batch_norm(whole, None, None, norm.weight, norm.bias, True)
        return normalised.chunk(len(self._players))[rank]

    def _join(self, number: int, op: Join) -> bool:
        """Whether it makes sense here."""
        case, players = self._whole, self._players
        everything = {i for branch in case.branches for i in branch} & self._trainable
        twice = sum(len(set(b) & self._trainable) for b in case.branches) > len(everything)
        no = case.static_graph or case.divided or case.batch_norm or case.momentum or case.writes
        no = no or case.optimizer != "SGD" or (case.checkpoint == "reentrant" and twice)
        no = no or any(self._counted + self._used + self._inherited) or players[0].graphs
        no = no or any(self._trains(player) != self._trainable for player in players)
        no = no or self._buffers_differ() or self._has_second
        no = no or len({player.model.grown.shape for player in players if case.buffers}) > 1
        if no or not everything or (not self._varies and everything != self._trainable):
            return False
        self._amounts = None
        for batch in range(max(op.batches)):
            active = [rank for rank, count in enumerate(op.batches) if count > batch]
            if case.sends_buffers:
                self._send(active[-1], buffers_alone=True)
            for rank in active:
                players[rank].forward_backward(number, batch)
            divisor = case.world_size if op.initial else len(active)
            shares = [case.world_size / divisor * (rank in active) for rank in self._ranks]
            self._average(everything, shares, active)
            for rank in active:
                players[rank].update()
        last = [rank for rank, count in enumerate(op.batches) if count == max(op.batches)]
        self._send(last[-1])
        return True

    def _changed(self) -> dict[int, str]:
        def changed(player: Player) -> set[int]:
            now = self._trains(player)
            if not now & self._trainable and not now - self._trainable:
                return set()  # all are frozen: nothing is averaged
            return now - self._trainable if self._varies else now ^ self._trainable

        return {rank: CHANGED for rank in self._ranks if changed(self._players[rank])}

    def _incomplete(self) -> dict[int, str]:
        def names(counted: set[int]) -> str:
            """Those of all that are missing, and of no others."""
            parameters = self._players[0].parameters
            found = {i: escape(self._names[id(parameters[i])]) for i in self._trainable}
            return "".join(f"(?{'!' if i in counted else '='}.*{n}\\b)" for i, n in found.items())

        return {rank: UNUSED + names(c) for rank, c in enumerate(self._counted) if c}

    def _drifted(self) -> str | None:
        """The first parameter that is not the same on all ranks, whatever has made it so."""
        models = [player.model.named_parameters() for player in self._players]
        for (name, first), *others in zip(*models, strict=True):
            if not all(torch.equal(first, other) for _, other in others):
                return name
        return None

    def _backward(self, number: int, op: Backward) -> Expected | None:  # noqa: C901
        alive = len(self._players[0].graphs)
        if not op.back or max(op.back) >= alive or len(set(op.back)) < len(op.back):
            return None
        times = [self._times(player, op) for player in self._players]
        touched = [set(counts) for counts in times]
        if not all(touched):
            return None  # a rank would not take part at all
        pending = self._pending_after(op)
        local = op.no_sync or (self._whole.wrapped and any(pending))
        if not op.no_sync and self._whole.wrapped and not all(map(bool, pending)) and any(pending):
            return None  # some ranks would average
        complete = [c | t == self._trainable for c, t in zip(self._counted, touched, strict=True)]
        overlapping = any(c & t for c, t in zip(self._counted, touched, strict=True))
        plain = not self._varies and not self._whole.static_graph
        if plain and any(count > 1 for counts in times for count in counts.values()):
            return None  # may raise in this pass, or in the next forward
        # Where only some ranks get an error the others wait for them. A hook that may start several
        # collectives is awaited in each pass: there a rank fails, too, whose bucket others lack.
        partly = [t for t, is_complete in zip(touched, complete, strict=True) if not is_complete]
        same = all(t == partly[0] for t in partly) and len(partly) < len(touched)
        divided = self._whole.divided and (same or self._whole.hook in (None, "allreduce_hook"))
        meet = not overlapping and (all(complete) or divided or local)
        if plain and any(t != touched[0] for t in touched) and not meet:
            return None
        if self._has_second and not local and (overlapping or not all(complete)):
            return None  # either Reducer may raise
        averages = not local and (not plain or all(complete))
        if averages and self._is_drifted_for_second():
            return None
        self._all_play(number, op)
        self._pending = pending
        for used, new, player in zip(self._used, touched, self._players, strict=True):
            used |= {i for i in new if player.parameters[i].grad is not None}
        may = SECOND if overlapping else None
        if local:
            return Expected(may=may)
        # A rank with a second gradient says that instead, and is not compared.
        wrong = dict.fromkeys(self._not_static(times), f"{NOT_STATIC}|{SECOND}")
        errors = self._errors_of_all() if averages else []
        if errors:
            return self._everyone("|".join([*errors, *wrong.values(), *[SECOND] * overlapping]))
        inherited = self._take_inherited() if averages else set()
        if self._varies:
            self._average_all(set.union(*self._used) | inherited)
        elif not plain:
            self._first = self._first or times
            if self._used_by_any is None:
                self._used_by_any = set.union(*self._used)
            self._average_all(self._used_by_any | inherited)
            return Expected(wrong)
        elif all(complete):
            self._average_all(self._trainable)
            self._counted = [set() for _ in self._players]
        else:
            for rank, new in enumerate(touched):
                self._counted[rank] = set() if complete[rank] else self._counted[rank] | new
            return Expected({rank: ANY for rank in self._ranks if complete[rank]}, may=may)
        return Expected(may=may)

    def _pending_after(self, op: Backward) -> list[list[Any]]:
        if not op.no_sync:
            return self._pending
        found = []
        for pending, player in zip(self._pending, self._players, strict=True):
            entered = [player.graphs[-1 - back] for back in op.back]
            found.append([g for g in pending if all(g is not used for used in entered)])
        return found

    def _errors_of_all(self) -> list[str]:
        """What all ranks raise at the end of the average that begins here: one of these."""
        errors = []
        if not self._averaged:
            self._averaged, self._watched = True, self._wrote
            drifted = self._drifted()
            errors += [] if drifted is None else [DRIFTED % escape(drifted)]
        return errors + [BUFFERS] * self._buffers_differ()

    def _is_drifted_for_second(self) -> bool:
        """Whether the first average of the Reducer of a part might find its parameters different.

        Otherwise that average counts as done.
        """
        if not self._has_second or self._second_averaged:
            return False
        self._second_averaged = self._drifted() is None
        return not self._second_averaged

    def _average_now(self) -> Expected | None:
        plain = not self._varies and not self._whole.static_graph
        having = [
            {i for i in self._trainable if player.parameters[i].grad is not None}
            for player in self._players
        ]
        lacking = [r for r in self._ranks if plain and having[r] != self._trainable]
        if any(self._counted) or (lacking and (self._has_second or self._whole.divided)):
            return None
        if self._is_drifted_for_second():
            return None
        for used, found in zip(self._used, having, strict=True):
            used |= found
        errors = self._errors_of_all()
        if errors:
            return self._everyone("|".join([*errors, NOTHING]))
        indices = self._trainable if plain else set.union(*self._used)
        wrong = dict.fromkeys(lacking, NOTHING)
        if self._whole.static_graph:
            if self._used_by_any is None:
                self._used_by_any = indices
            wrong = {r: NOT_STATIC for r in self._ranks if self._used[r] - self._used_by_any}
            indices = self._used_by_any
        self._take_inherited()
        self._average_all(indices)
        return Expected(wrong)

    def _not_static(self, times: list[Counter[int]]) -> list[int]:
        """The ranks on which this pass of a static graph is not as the first."""
        if not self._whole.static_graph:
            return []
        first, known = self._first or times, self._used_by_any
        same = [now == then for now, then in zip(times, first, strict=True)]
        beyond = [known is not None and bool(used - known) for used in self._used]
        return [r for r in self._ranks if not same[r] or beyond[r]]

    def _times(self, player: Player, op: Backward) -> Counter[int]:
        """The parameters that get a gradient, and how many."""
        graphs = [player.graphs[-1 - back] for back in op.back]
        found = leaves_of([loss_of(graph, op.outputs) for graph in graphs])
        times = Counter(i for i in self._trains(player) if id(player.parameters[i]) in found)
        if self._whole.checkpoint == "reentrant":  # a backward pass of its own for each branch
            for graph in graphs:
                for branch in part(list(graph), op.outputs):
                    times.update(set(self._whole.branches[branch]) & self._trainable)
        return times

    def _take_inherited(self) -> set[int]:
        """What had a gradient when the Reducer was made, and has not been dropped since."""
        pairs = zip(self._players, self._inherited, strict=True)
        found = {i for p, mine in pairs for i in mine if p.parameters[i].grad is not None}
        self._inherited = [set() for _ in self._players]
        return found

    def _average_all(self, indices: set[int]) -> None:
        self._average(indices)
        if self._whole.sends_buffers:
            self._send(0, buffers_alone=True)

    @torch.no_grad()
    def _average(
        self, indices: set[int], shares: list[float] | None = None, ranks: Any = None
    ) -> None:
        """Each rank's gradients count by its share; `ranks` get the average or sum, or all."""
        n = len(self._players)
        sums = self._whole.reduce == "sum"
        if shares is None and self._amounts is not None:
            total = 1 if sums else sum(self._amounts)
            shares = [amount * (1 if sums else n) / total for amount in self._amounts]
        self._amounts = None
        for index in indices:
            members = [player.parameters[index] for player in self._players]
            terms = []
            for p, share in zip(members, shares or [1.0] * n, strict=True):
                absent = p.grad is None or share == 0
                term = (
                    torch.zeros_like(p, dtype=p.grad_dtype)
                    if absent
                    else p.grad * share * (1.0 if sums else 1.0 / n)
                )
                terms.append(term.to_dense() if term.is_sparse else term)
            sizes = [n * t.abs().max().item() for t in terms if t.numel()]
            self._largest = max([self._largest, *sizes])
            for rank in self._ranks if ranks is None else ranks:
                members[rank].grad = sum(terms[1:], terms[0]).clone()
        self._used = [set() for _ in self._players]


def is_torch_right(case: Case, expected: list[Expected]) -> bool:  # noqa: C901
    """Forward and backward in turn, and none of what torch is silent about or refuses."""
    buffers = case.buffers and case.sends_buffers
    tables = any(p.kind == "table" for p in case.parameters)  # raises where a rank uses none
    if (
        any(each.must or each.may for each in expected)
        or (case.batch_norm or case.checkpoint == "reentrant")
        or any(p.kind in ("conjugated", "precise") for p in case.parameters)
        or (tables and (case.find_unused_parameters or case.reduce == "sum"))
    ):
        return False
    alive: Forward | None = None
    for op in case.operations:
        match op:
            case Forward():
                if alive or (op.no_sync and case.static_graph):
                    return False
                alive = op
            case Backward():
                every = op.outputs == "all" or len(case.branches) == 1
                if op.keep or not every or alive.no_sync != op.no_sync:
                    return False
                alive = None
            case BackwardAndStep():
                if alive is None or alive.no_sync or case.shard != "none":
                    return False
                alive = None
            case Set(rank=None):
                pass
            case Step():
                if alive and buffers:  # torch sends them before the next forward pass all the same
                    return False
                alive = None
            case Evaluate():
                if buffers:
                    return False
            case Zero():
                pass
            case _:
                return False
    return True


def leaves_of(tensors: list[torch.Tensor]) -> set[int]:
    ahead: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(ahead), set()
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        following = {f for f, _ in node.next_functions if f is not None} - seen
        seen |= following
        ahead += following
    return found
