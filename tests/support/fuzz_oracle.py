"""What every rank must hold after each operation of a case: all ranks played in one process.

Averaging is written out here, one parameter at a time, from what the documents promise: nothing of
the package is used. Where they promise an error, that is what is expected.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import batch_norm

from tests.support.fuzz_case import (
    Again,
    Backward,
    Case,
    Evaluate,
    Forward,
    Freeze,
    Join,
    Net,
    Operation,
    Player,
    Step,
    Transform,
    Weigh,
    Zero,
    loss_of,
)
from tests.support.fuzz_expected import (
    ANY_ERROR,
    CHANGED,
    DRIFTED,
    LATE,
    NOT_STATIC,
    SECOND,
    UNEQUAL,
    UNUSED,
    Expected,
    is_torch_right,
    leaves_of,
)


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
        self._trainable = {i for i, p in enumerate(self._players[0].parameters) if p.requires_grad}
        self._number = 0  # of the operation that is being played
        self._amounts: tuple[float, ...] | None = None  # of the next average
        self._use: tuple[tuple[int, ...], ...] = ()  # of the forward pass that is being played
        # By this Reducer, in its forward passes; and whether it compares ranks for that reason.
        self._averaged = self._wrote = self._watched = False
        # Since a Reducer was made: what had a gradient then, each rank its own.
        self._inherited: list[set[int]] = [set() for _ in range(case.world_size)]
        if case.batch_norm:
            for rank, player in enumerate(self._players):
                assert player.model.first is not None
                player.model.first.forward = partial(self._whole_batch, rank)
                player.retain = True  # every rank's graph goes through the others'
        self._varies = case.find_unused_parameters and not case.static_graph
        ranks = range(case.world_size)
        self._counted: list[set[int]] = [set() for _ in ranks]  # of an average not yet complete
        self._used: list[set[int]] = [set() for _ in ranks]  # since the last average
        self._first: list[Counter[int]] | None = None  # what the first pass of a static graph used
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
        self.as_torch = is_torch_right(self.case, self.expected)
        self.together = not case.divided and all(
            len(e.must) in (0, case.world_size) for e in self.expected
        )

    def _play(self, number: int, op: Operation) -> Expected | None:
        """None for an operation that makes no sense here."""
        if isinstance(op, Forward):
            must = self._changed() or self._incomplete()
            if 0 < len(must) < self._whole.world_size and self._whole.batch_norm:
                return None  # the others would wait in the layer for ranks that do not come
            if not must:
                self._all_play(number, op)
                self._wrote |= self._whole.writes is not None
                if self._wrote and self._averaged and not self._watched:
                    must = {
                        rank: (LATE.format(rank=rank), set[str]())
                        for rank in range(len(self._used))
                    }
            return Expected(must)
        if isinstance(op, Backward):
            return self._backward(number, op)
        if isinstance(op, Zero) and any(self._counted):
            return None  # gradients are under way
        if isinstance(op, Step) and any(self._counted):
            return Expected(self._incomplete())
        if isinstance(op, Step) and self._whole.batch_norm and any(self._used + self._inherited):
            return None  # with local gradients: ranks must have the same weights of batch norm
        if isinstance(op, Evaluate) and not op.rank < self._whole.world_size:
            return None
        if isinstance(op, Freeze) and not op.parameter < len(self._whole.parameters):
            return None
        if isinstance(op, Weigh):
            if any(self._counted) or self._whole.divided:
                return None  # all must come to it before any bucket
            if self._whole.batch_norm and len(set(op.amounts)) > 1:
                everyone = range(self._whole.world_size)
                return Expected({rank: (UNEQUAL, set[str]()) for rank in everyone})
            self._amounts = op.amounts
            return Expected()
        if isinstance(op, Again):
            return Expected() if self._make_again() else None
        if isinstance(op, Transform):
            collective = self._whole.batch_norm or self._whole.checkpoint
            if collective or self._changed() or self._incomplete():
                return None
            if not op.rank < self._whole.world_size:
                return None
        if isinstance(op, Join):
            return Expected() if self._join(number, op) else None
        self._all_play(number, op)
        return Expected()

    def _make_again(self) -> bool:
        """Whether it makes sense here."""
        trains = [
            {i for i, p in enumerate(player.parameters) if p.requires_grad}
            for player in self._players
        ]
        if self._whole.divided or any(t != trains[0] for t in trains) or not trains[0]:
            return False
        if self._whole.wrapped:
            if self._players[0].graphs:
                return False  # parameters are sent, and with them graphs end
            self._send(0)
        self._trainable = trains[0]
        self._counted = [set() for _ in self._players]
        self._inherited = [
            {i for i in self._trainable if player.parameters[i].grad is not None}
            for player in self._players
        ]
        self._used = [set() for _ in self._players]
        self._first, self._used_by_any, self._amounts = None, set(), None
        self._averaged = self._wrote = self._watched = False
        return True

    def _all_play(self, number: int, op: Operation) -> None:
        self._number = number
        if isinstance(op, Forward):
            self._use = op.use
        for player in self._players:
            player.play(number, op)

    @torch.no_grad()
    def _send(self, src: int, buffers_alone: bool = False) -> None:
        """One rank's parameters and buffers to all."""
        for player in self._players:
            pairs = zip(player.model.buffers(), self._players[src].model.buffers(), strict=True)
            for to, value in pairs:
                to.copy_(value)
            if not buffers_alone:
                for p, q in zip(player.parameters, self._players[src].parameters, strict=True):
                    p.copy_(q)

    def _whole_batch(self, rank: int, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """`First` of a rank, with the batches of all."""
        first = self._players[rank].model.first
        assert first is not None
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
        static = case.static_graph or case.divided or case.batch_norm or case.momentum
        static = static or case.optimizer != "SGD"
        if (
            case.writes
            or any(self._inherited)
            or static
            or players[0].graphs
            or any(self._counted)
            or any(self._used)
            or self._changed()
        ):
            return False
        everything = {i for branch in case.branches for i in branch} & self._trainable
        trains = [
            {i for i, p in enumerate(player.parameters) if p.requires_grad} for player in players
        ]
        if not everything or any(t != self._trainable for t in trains):
            return False
        if not self._varies and everything != self._trainable:
            return False
        if case.checkpoint == "reentrant" and self._twice(case.branches):
            return False
        self._amounts = None
        for batch in range(max(op.batches)):
            active = [rank for rank, count in enumerate(op.batches) if count > batch]
            if case.sends_buffers:
                self._send(active[-1], buffers_alone=True)
            for rank in active:
                players[rank].forward_backward(number, batch)
            divisor = case.world_size if op.initial else len(active)
            shares = [case.world_size / divisor * (rank in active) for rank in range(len(players))]
            self._average(everything, shares, active)
            for rank in active:
                players[rank].update()
        last = [rank for rank, count in enumerate(op.batches) if count == max(op.batches)]
        self._send(last[-1])
        return True

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

    def _drifted(self) -> str | None:
        """The first parameter that is not the same on all ranks, whatever has made it so."""
        models = [player.model.named_parameters() for player in self._players]
        for (name, first), *others in zip(*models, strict=True):
            if not all(torch.equal(first, other) for _, other in others):
                return name
        return None

    def _name(self, index: int) -> str:
        return self._names[id(self._players[0].parameters[index])]

    # Backward -----------------------------------------------------------------------------------

    def _backward(self, number: int, op: Backward) -> Expected | None:
        alive = len(self._players[0].graphs)
        if not op.back or max(op.back) >= alive or len(set(op.back)) < len(op.back):
            return None
        times = [self._times(player, op) for player in self._players]
        touched = [set(counts) for counts in times]
        if not all(touched):
            return None  # a rank would not take part at all
        complete = [c | t == self._trainable for c, t in zip(self._counted, touched, strict=True)]
        overlapping = any(c & t for c, t in zip(self._counted, touched, strict=True))
        plain = not self._varies and not self._whole.static_graph
        wrong = self._not_static(times)
        if plain and any(count > 1 for counts in times for count in counts.values()):
            return None  # may raise in this pass, or in the next forward
        if any(t != touched[0] for t in touched):
            # Where only some ranks get an error the others wait for them.
            meet = all(complete) and not overlapping
            alone = self._whole.divided and not overlapping
            if plain and not (meet or alone or (op.no_sync and not overlapping)):
                return None
        self._all_play(number, op)
        for used, new in zip(self._used, touched, strict=True):
            used |= new
        may = (SECOND,) if overlapping else ()
        if op.no_sync:
            return Expected(may=may)
        averages = self._varies or self._whole.static_graph or all(complete)
        if averages and not self._averaged:
            self._averaged, self._watched = True, self._wrote
            drifted = self._drifted() if self._wrote else None
            if drifted is not None:
                # A rank with a second gradient says that instead, and is not compared.
                errors = "|".join((DRIFTED.format(name=drifted), *may))
                everyone = range(self._whole.world_size)
                return Expected({rank: (errors.format(rank=rank), set[str]()) for rank in everyone})
        inherited = self._take_inherited() if averages else set()
        if self._varies:
            self._average_all(set.union(*self._used) | inherited)
        elif self._whole.static_graph:
            if self._first is None:
                self._first, self._used_by_any = times, set.union(*self._used)
            self._average_all(self._used_by_any | inherited)
            errors = f"({NOT_STATIC}|{SECOND})"
            return Expected({rank: (errors.format(rank=rank), set[str]()) for rank in wrong})
        elif all(complete):
            self._average_all(self._trainable)
            self._counted = [set() for _ in self._players]
        else:
            must = {rank: (ANY_ERROR, set[str]()) for rank, done in enumerate(complete) if done}
            for rank, new in enumerate(touched):
                self._counted[rank] = set() if complete[rank] else self._counted[rank] | new
            return Expected(must, may=may)
        return Expected(may=may)

    def _not_static(self, times: list[Counter[int]]) -> list[int]:
        """The ranks on which this pass of a static graph would not be as the first."""
        if self._first is None:
            return []
        return [
            rank
            for rank, (now, then, used) in enumerate(
                zip(times, self._first, self._used, strict=True)
            )
            if now != then or used - self._used_by_any
        ]

    def _times(self, player: Player, op: Backward) -> Counter[int]:
        """The parameters that get a gradient, and how many."""
        graphs = [player.graphs[-1 - back] for back in op.back]
        found = leaves_of([loss_of(graph, op.outputs) for graph in graphs])
        times = Counter(
            i for i, p in enumerate(player.parameters) if id(p) in found and p.requires_grad
        )
        if self._whole.checkpoint == "reentrant":  # a backward pass of its own for each branch
            chosen = {"all": slice(None), "first": slice(1), "rest": slice(1, None)}[op.outputs]
            for graph in graphs:
                for branch in list(graph)[chosen]:
                    times.update(set(self._whole.branches[branch]) & self._trainable)
        return times

    def _twice(self, branches: tuple[tuple[int, ...], ...]) -> bool:
        """Whether a parameter is in several branches."""
        times = Counter(i for branch in branches for i in set(branch) & self._trainable)
        return any(count > 1 for count in times.values())

    def _take_inherited(self) -> set[int]:
        """What had a gradient when the Reducer was made, and has not been dropped since."""
        found = {
            i
            for player, inherited in zip(self._players, self._inherited, strict=True)
            for i in inherited
            if player.parameters[i].grad is not None
        }
        self._inherited = [set() for _ in self._players]
        return found

    def _average_all(self, indices: set[int]) -> None:
        self._average(indices)
        if self._whole.sends_buffers:
            self._send(0, buffers_alone=True)

    @torch.no_grad()
    def _average(
        self,
        indices: set[int],
        shares: list[float] | None = None,
        ranks: list[int] | None = None,
    ) -> None:
        """Each rank's gradients count by its share; `ranks` get the average, or all."""
        n = len(self._players)
        if shares is None and self._amounts is not None:
            shares = [amount * n / sum(self._amounts) for amount in self._amounts]
        self._amounts = None
        for index in indices:
            members = [player.parameters[index] for player in self._players]
            terms = []
            for p, share in zip(members, shares or [1.0] * n, strict=True):
                absent = p.grad is None or share == 0
                term = torch.zeros_like(p) if absent else p.grad * share * (1.0 / n)
                terms.append(term.to_dense() if term.is_sparse else term)
            self.largest = max([self.largest, *(n * t.abs().max().item() for t in terms)])
            for rank in range(n) if ranks is None else ranks:
                members[rank].grad = sum(terms[1:], terms[0]).clone()
        self._used = [set() for _ in self._players]
