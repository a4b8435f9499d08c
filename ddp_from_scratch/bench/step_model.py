"""A model of a training step: how long it takes, and what memory it needs, with other settings.

A rank has a main thread and sends one bucket at a time:

    main thread   | forward | backward ..pack.. backward ..pack | exposed wait | optimizer |
    wire                                 | bucket 0  |          | bucket 1     |

The parts of backward between two gradients are as long as they were when they were recorded
(`what_if.py`). An all-reduce of n ranks is a ring: 2 (n - 1) messages of 1/n of the bucket each
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009). Sending takes a part of a
core; if threads want more cores than there are, all become slower by the same factor. All ranks
are equally fast. `what_if.html` has the same functions in JavaScript.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_from_scratch.core.layout import ALIGNMENT, assign
from ddp_from_scratch.optim.squares import BLOCK
from ddp_from_scratch.optim.update_rules import CACHE_LINE

CALL_MS = 0.1  # to launch a bucket: a few calls of Python
ITEM = 4  # bytes of a float32


class Gradient(NamedTuple):
    """A parameter's gradient."""

    nbytes: int
    ready: float  # ms after the begin of backward


@dataclass(frozen=True)
class Layers:
    """The times of a model's step on one rank with one core, without communication."""

    name: str
    forward: float  # ms, as the other times
    backward: float
    optimizer: float
    gradients: Sequence[Gradient]  # the first ready one first
    copy_gbs: float  # GB/s of copies into a bucket
    core_gbs: float  # GB/s that a core sends, receives and sums; 0: it takes no core, as on a GPU


@dataclass(frozen=True)
class Setting:
    """What a reader asks about."""

    caps: Sequence[int]  # of buckets, in bytes; the last one applies to all later buckets
    ranks: int
    latency_us: float  # of a message
    gbit: float  # Gbit/s of a rank, in each direction
    cores: float  # of a rank
    overlap: bool  # buckets are sent during backward


class Bar(NamedTuple):
    """A stretch of a step, in ms."""

    kind: str  # a key of `render.COLOURS`
    bucket: int  # -1: none
    begin: float
    end: float


class Step(NamedTuple):
    """A step, in ms."""

    bars: list[Bar]
    exposed: float
    total: float


class _Task(NamedTuple):
    kind: str
    bucket: int
    work: float  # ms on a core


def buckets_of(layers: Layers, caps: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the gradients of each bucket, by their places in ready order."""
    sizes = [(gradient.nbytes, None) for gradient in layers.gradients]
    return assign(sizes, range(len(sizes)), caps)


def send_ms(nbytes: int, setting: Setting) -> float:
    """Returns the ms of an all-reduce that has a core."""
    messages = 2 * (setting.ranks - 1)
    moved = messages / setting.ranks * nbytes
    return messages * setting.latency_us / 1e3 + moved * 8 / (setting.gbit * 1e6)


def predict(layers: Layers, setting: Setting) -> Step:
    """Returns the step of each rank. One rank sends nothing and has no buckets."""
    buckets = buckets_of(layers, setting.caps) if setting.ranks > 1 else []
    sizes = [sum(layers.gradients[member].nbytes for member in members) for members in buckets]
    tasks = _tasks(layers, buckets, sizes, setting.overlap)
    bars: list[Bar] = []
    queue: list[int] = []  # launched buckets
    now, turn, task_began, send_began = 0.0, 0, 0.0, 0.0
    task_left, send_left, share = tasks[0].work, 0.0, 0.0
    over = 0.0  # when the main thread has nothing left to do but wait
    while turn < len(tasks) or queue:
        computes, sends = turn < len(tasks), len(queue) > 0
        wanted = (1.0 if computes else 0.0) + (share if sends else 0.0)
        rate = min(1.0, setting.cores / wanted) if wanted > 0 else 1.0
        is_task = computes and (not sends or task_left <= send_left)
        done = task_left if is_task else send_left
        now += done / rate
        task_left -= done
        send_left -= done
        if is_task:
            kind, bucket, _ = tasks[turn]
            bars.append(Bar(kind, bucket, task_began, now))
            turn, task_began, over = turn + 1, now, now
            task_left = tasks[turn].work if turn < len(tasks) else 0.0
            if bucket >= 0:
                queue.append(bucket)
            starts = bucket >= 0 and len(queue) == 1
        else:
            bars.append(Bar("in flight", queue.pop(0), send_began, now))
            starts = len(queue) > 0
        if starts:
            send_began, send_left = now, send_ms(sizes[queue[0]], setting)
            share = _share(sizes[queue[0]], send_left, layers, setting)
    if now > over:
        bars.append(Bar("exposed wait", -1, over, now))
    end = now + layers.optimizer / min(1.0, setting.cores)
    return Step([*bars, Bar("optimizer", -1, now, end)], now - over, end)


def _tasks(
    layers: Layers, buckets: Sequence[Sequence[int]], sizes: Sequence[int], overlap: bool
) -> list[_Task]:
    """Returns what the main thread does until all buckets are launched."""
    tasks, packs, reached = [_Task("forward", -1, layers.forward)], list[_Task](), 0.0
    for bucket, members in enumerate(buckets):
        ready = max(reached, layers.gradients[members[-1]].ready)
        tasks.append(_Task("backward", -1, ready - reached))
        reached = ready
        pack = _Task("pack, unpack", bucket, CALL_MS + sizes[bucket] / (layers.copy_gbs * 1e6))
        (tasks if overlap else packs).append(pack)
    return [*tasks, _Task("backward", -1, max(0.0, layers.backward - reached)), *packs]


def _share(nbytes: int, milliseconds: float, layers: Layers, setting: Setting) -> float:
    """Returns the part of a core that an all-reduce takes."""
    if layers.core_gbs == 0 or milliseconds == 0:
        return 0.0
    moved = 2 * (setting.ranks - 1) / setting.ranks * nbytes
    return min(1.0, moved / (layers.core_gbs * 1e6) / milliseconds)


class Memory(NamedTuple):
    """Bytes of a rank. What a machine's ranks share is divided by their number."""

    parameters: float
    gradients: float  # outside the buckets
    buckets: float
    state: float  # of the optimizer


def memory(
    layers: Layers, caps: Sequence[int], ranks: int, shard: str, states: int, views: bool
) -> Memory:
    """Returns what a `Reducer` and a flat optimizer allocate for a float32 model.

    A single rank averages nothing: gradients, parameters and state stay where autograd and the
    optimizer have put them, and buckets are not used.

    Args:
        layers: of the model.
        caps: of buckets, in bytes.
        ranks: all on one machine.
        shard: "none", "node", "world", or "" for torch's optimizer.
        states: numbers of state per parameter: 0 SGD, 1 with momentum, 2 Adam.
        views: gradients are views of the buckets. A flat optimizer makes them so in any case.
    """
    numels = [gradient.nbytes // ITEM for gradient in layers.gradients]
    plain = sum(numels)
    buckets = sum(numel + ALIGNMENT for numel in numels)
    outside = 0 if ranks > 1 and (views or shard) else plain
    steps = len(numels) if states == 2 else 0  # Adam counts the steps of each parameter
    line = CACHE_LINE // ITEM
    flats = [
        sum(-(-numels[member] // line) * line for member in members)
        for members in buckets_of(layers, caps)
    ]
    parameters, own = float(sum(flats)), float(sum(flats))
    if shard == "" or ranks == 1:
        parameters = own = plain
    elif shard == "node":
        parameters, own = parameters / ranks, own / ranks
    elif shard == "world":
        own = sum(-(-flat // (BLOCK * ranks)) * BLOCK for flat in flats)
        parameters = own * ranks
    return Memory(parameters * ITEM, outside * ITEM, buckets * ITEM, (own * states + steps) * ITEM)
