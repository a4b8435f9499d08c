"""Finds ranks that compute wrongly, or slowly, before a run: all repeat the same work for a while.

Each rank keeps checksums of what it computes, and compares them with those of its first repetition.
Ranks communicate only at the end: then they compare their first ones, and the majority is right.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.common.group import check_group, gather_objects, on_gpu_of
from ddp_from_scratch.common.random import seeded
from ddp_from_scratch.options.buffers import BufferSnapshot
from ddp_from_scratch.options.checks import sync_batch_norms
from ddp_from_scratch.options.launch_order import active_reducers
from ddp_from_scratch.sync.broadcast import broadcast_parameters
from ddp_from_scratch.sync.checksums import checksums
from ddp_from_scratch.virtual_ranks.recheck import describe_machine, machine_difference

# By what it is of ("the gradient of fc1.weight"), a checksum.
Bits = dict[str, int]


class Answer(NamedTuple):
    """What a rank has computed again and again."""

    host: str
    machine: str
    bits: Bits  # of the first repetition
    repetitions: int
    others: int = 0  # repetitions with other bits
    other: Bits | None = None  # of the first such
    seconds: float = 0.0  # the median repetition


@dataclass(frozen=True)
class RankReport:
    """What `check_ranks` has found. As text, one line.

    Attributes:
        wrong: the ranks that computed other bits than most, or not always the same.
        equal: True if all ranks computed the same bits, each time.
        hosts: by rank, the name of its machine.
        seconds: by rank, its median time for the work.
        repetitions: by rank, how often it did the work.
        unequal: how the ranks' machines differ (processor or GPU, threads, torch); "" if they do
            not. Such ranks may round differently without a fault.
    """

    wrong: tuple[int, ...]
    equal: bool
    hosts: tuple[str, ...]
    seconds: tuple[float, ...]
    repetitions: tuple[int, ...]
    unequal: str
    text: str

    def __str__(self) -> str:
        return self.text


def check_ranks(
    module: torch.nn.Module,
    function: Callable[[], torch.Tensor | float | None],
    seconds: float = 60.0,
    process_group: dist.ProcessGroup | None = None,
) -> RankReport:
    """Repeats the same work on all ranks, and compares the bits of its results. Collective.

        report = ddp.check_ranks(model, lambda: train_on(model, batch), seconds=60)
        assert report.equal, report

    All ranks take rank 0's parameters and buffers first. Each repetition begins without gradients,
    with the same buffers, and with all generators seeded equally. The first one does not count.
    Afterwards module and generators are as before.

    Args:
        module: its gradients and buffers are compared. It may have no Reducer yet.
        function: runs forward and backward on the same batch on all ranks, and changes nothing but
            gradients and buffers. It may return the loss, which is compared, too.
        seconds: how long each rank repeats it, at least three times.
        process_group: the ranks that take part; None means all.

    Returns:
        The same report on all ranks: `equal`, `wrong`, `seconds` by rank, and a line of text. Of
        two ranks that differ, it cannot name the wrong one, unless one also differs from itself.

    Raises:
        ValueError: `seconds` is not positive, or the module has a Reducer, synchronised batch norm
            or a wrapper that communicates.
        RuntimeError: the ranks' models differ in names, shapes or dtypes.
    """
    check_group(process_group)
    if not seconds > 0:
        raise ValueError(f"seconds must be more than 0, got {seconds}")
    own = {id(parameter) for parameter in module.parameters()}
    if any(own & {*map(id, reducer.parameters)} for reducer in active_reducers()):
        raise ValueError(
            "the module has a Reducer, which would average what ranks compute: call check_ranks "
            "before you make it"
        )
    if sync_batch_norms(module) or isinstance(module, DistributedDataParallel):
        raise ValueError(
            "the module communicates in each pass (synchronised batch norm, or a wrapper), but "
            "ranks do not repeat the work equally often: pass a module that does not"
        )
    with on_gpu_of(module):
        broadcast_parameters(module, process_group=process_group)
        answers = gather_objects(_repeat(module, function, seconds), process_group)
    return report_of(answers)


def _repeat(
    module: torch.nn.Module, function: Callable[[], torch.Tensor | float | None], seconds: float
) -> Answer:
    parameters = dict(module.named_parameters())
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    buffers = BufferSnapshot(module, ())

    def compute() -> tuple[Bits, float]:
        for parameter in parameters.values():
            parameter.grad = None
        buffers.restore()
        with seeded(0):
            began = perf_counter()
            result = function()
            gpu.synchronize(device)
            ended = perf_counter()
        return _bits(module, result), ended - began

    try:
        compute()  # memory and kernels are not warm yet
        end = perf_counter() + seconds
        first, took = compute()
        times, others, other = [took], 0, None
        while len(times) < 2 or perf_counter() < end:
            bits, took = compute()
            times.append(took)
            if bits != first:
                others, other = others + 1, other or bits
    finally:
        buffers.restore()
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
    host, machine = socket.gethostname(), describe_machine(device)
    return Answer(host, machine, first, len(times), others, other, median(times))


def _bits(module: torch.nn.Module, result: Any) -> Bits:
    tensors = {} if result is None else {"the result": _as_tensor(result)}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            tensors[f"the gradient of {name}"] = parameter.grad
    tensors |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return dict(zip(tensors, checksums([*tensors.values()]), strict=True))


def _as_tensor(result: torch.Tensor | float) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        return result
    return torch.tensor(result, dtype=torch.float64, device="cpu")


# The vote, without communication -----------------------------------------------------------------


def report_of(answers: Sequence[Answer]) -> RankReport:
    """Returns the report of all ranks' answers.

    Ranks that differ from themselves are named, and have no vote. Of the others, those are wrong
    that differ from more than half.
    """
    steady = {rank: answer.bits for rank, answer in enumerate(answers) if not answer.others}
    right = majority([*steady.values()])
    odd = [rank for rank, bits in steady.items() if right is not None and bits != right]
    said = [_odd(rank, steady, answers[rank].host, odd) for rank in odd]
    if steady and right is None:
        said.append(_undecided(steady, answers))
    unsteady = [rank for rank in range(len(answers)) if rank not in steady]
    said += [_unsteady(rank, answers[rank]) for rank in unsteady]
    if not steady:
        said.append("as no rank repeats its bits, the work may not be deterministic")
    unequal = machine_difference([answer.machine for answer in answers])
    if said and unequal:
        said.append(f"their machines differ: {unequal}")
    return RankReport(
        wrong=tuple(sorted([*odd, *unsteady])),
        equal=not said,
        hosts=tuple(answer.host for answer in answers),
        seconds=tuple(answer.seconds for answer in answers),
        repetitions=tuple(answer.repetitions for answer in answers),
        unequal=unequal,
        text="; ".join(said) or _all_equal(answers),
    )


def majority(found: Sequence[Bits]) -> Bits | None:
    """Returns what more than half have; None if there is no such."""
    return next((bits for bits in found if 2 * found.count(bits) > len(found)), None)


def _odd(rank: int, steady: Mapping[int, Bits], host: str, odd: Sequence[int]) -> str:
    right = [other for other in steady if other not in odd]
    what = first_difference(steady[rank], steady[right[0]])
    others = f"{'ranks' if len(right) > 1 else 'rank'} {shortened([*map(str, right)])}"
    return (
        f"rank {rank} on {host} computes wrongly: {what} has different bits there than on {others}"
    )


def _undecided(steady: Mapping[int, Bits], answers: Sequence[Answer]) -> str:
    first, *others = steady.values()
    what = first_difference(first, next(bits for bits in others if bits != first))
    places = shortened([f"rank {rank} on {answers[rank].host}" for rank in steady])
    return f"{what} has different bits on {places}: no majority shows which is wrong"


def _unsteady(rank: int, answer: Answer) -> str:
    what = first_difference(answer.bits, answer.other or {})
    return (
        f"rank {rank} on {answer.host} does not repeat its bits: {what} differs in "
        f"{answer.others:,} of {answer.repetitions:,} repetitions"
    )


def _all_equal(answers: Sequence[Answer]) -> str:
    ranks = f"all {len(answers)} ranks" if len(answers) > 1 else "one rank"
    times = min(answer.repetitions for answer in answers)
    return f"{ranks} computed the same bits, at least {times:,} times each"


def first_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Returns the first label whose checksum is not the same, or is missing in one of them."""
    return next(label for label in [*one, *other] if one.get(label) != other.get(label))
