"""Makes ranks start with the same settings, and end together after an error or a signal."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch import PeerError, UsageError, World
from ddp_from_scratch.training.datasets import ImageData, load_dataset
from ddp_from_scratch.training.settings import Settings


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's object, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes every rank leave the block in the same way. Collective.

    The lowest rank with a UsageError raises its own, and every other rank then a PeerError.
    """
    mine: UsageError | None = None
    try:
        yield
    except UsageError as error:
        mine = error
    # Otherwise the other ranks would wait for one that is gone.
    failed = torch.tensor([int(mine is not None)], dtype=torch.int64, device="cpu")
    ddp.wait(dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True))
    if not failed.item():
        return
    texts = gather_objects(str(mine) if mine else None, group)
    rank = next(r for r, text in enumerate(texts) if text is not None)
    if rank == dist.get_rank(group) and mine is not None:
        raise mine
    raise PeerError(f"rank {rank}: {texts[rank]}")


def prepare_process(
    settings: Settings, world: World, must_match: dict[str, str]
) -> dist.ProcessGroup:
    """Compares the options of all ranks; sets determinism, seeds and, where bits count, threads.

    `must_match` holds further values, by name, to compare. Returns a group for CPU tensors.
    """
    group: Any = dist.group.WORLD
    if world.backend == "nccl":
        # What ranks exchange besides gradients must not wait for a GPU.
        timeout = timedelta(seconds=settings.timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    # `must_match` comes first in the message and overrides options of the same name.
    _require_same(versions() | must_match | settings.to_compare() | must_match, group)
    if settings.virtual_ranks is not None or settings.check is not None:
        # Bits depend on the number of threads, and machines may differ.
        least = highest(-torch.get_num_threads(), group=group)
        torch.set_num_threads(-least()[0])
    if settings.deterministic:
        # Without it cuBLAS is not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Skipped if possible: the call imports torch's compiler, which takes a second.
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    seed_generators(settings.seed)
    return group


def seed_generators(seed: int) -> None:
    """Seeds every generator that a model may use: torch's (also on GPUs), Python's, numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    # A seed may have more bits than the 32 that numpy takes.
    np.random.seed(np.random.SeedSequence(seed).generate_state(8))


def _require_same(must_match: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raises on every rank if values differ from rank 0's, and names the first. Collective."""
    everyone = gather_objects(dict(must_match), group)
    for name, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != value:
                text = f"{name} is {value} on rank 0 and {theirs.get(name)} on rank {rank}"
                error = PeerError if dist.get_rank(group) else UsageError
                raise error(f"{text}: it must be the same on all ranks")


def versions() -> dict[str, str]:
    """Returns the versions of the code that this rank runs."""
    # Another torch may round or communicate differently.
    source = hashlib.sha256()
    folder = Path(ddp.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        source.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    installed = list(metadata.distributions(name="torchvision"))  # optional
    return {
        "torch": torch.__version__,
        "torchvision": installed[0].version if installed else "none",
        "ddp_from_scratch's source": source.hexdigest()[:16],
    }


def open_dataset(
    name: str, settings: Settings, world: World, group: dist.ProcessGroup | None
) -> ImageData:
    """Opens the dataset and compares it. The first rank of each machine downloads it first."""
    with raise_on_all_ranks(group):
        if settings.download and world.local_rank == 0:
            load_dataset(name, settings.data_dir, download=True)
    with raise_on_all_ranks(group):
        # The first `raise_on_all_ranks` is a barrier, so the download is complete.
        data = load_dataset(name, settings.data_dir, download=False)
    _require_same({f"--dataset {name}": data.summary()}, group)
    return data


def highest(*flags: int, group: dist.ProcessGroup | None) -> Callable[[], list[int]]:
    """Starts to find the highest of each flag over all ranks; returns a function that waits for it.

    Collective. The run of `ddp.elastic` has the same in `exchange`.
    """
    tensor = torch.tensor(flags, dtype=torch.int64, device="cpu")
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)

    def answer() -> list[int]:
        ddp.wait(work)
        found: list[int] = tensor.tolist()
        return found

    return answer


class Stopped(Exception):
    """A signal has ended the run early, on all ranks after the same step."""

    def __init__(self, number: int) -> None:
        self.number: int = number


# An event as one number: MAX selects the earliest step, then the lowest rank; 0 means none.
_STEPS, _RANKS = 2**42, 2**20


def as_number(step: int, rank: int) -> int:
    """Encodes the event "at this step on this rank"."""
    return (_STEPS - step) * _RANKS - rank


def place_of(number: int, steps_per_epoch: int) -> str:
    """Describes an event in words, with epoch and step counted from 1."""
    steps, rank = divmod(-number, _RANKS)
    epoch, step = divmod(_STEPS + steps, steps_per_epoch)
    return f"in epoch {epoch + 1}, step {step + 1}/{steps_per_epoch}, on rank {rank}"


class LossWatch:
    """Remembers the first step with a loss that is not finite."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        # On a GPU, a copy on the host, which lags by as many steps as the host runs ahead. Pinned
        # memory makes the copy asynchronous; the event marks its end.
        self._arrived = self._first
        self._event: torch.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._event = torch.Event(device)

    def see(self, loss: torch.Tensor, step: int) -> None:
        here = as_number(step, self._rank) * loss.detach().isfinite().logical_not()
        torch.maximum(self._first, here, out=self._first)
        # One copy at a time: while one is in flight, a later step copies this one's result.
        if self._event is not None and self._event.query():
            self._arrived.copy_(self._first, non_blocking=True)
            self._event.record()

    def known(self) -> int:
        """The `as_number` of the first such step if it has arrived, else 0. Does not wait."""
        return int(self._arrived)

    def settled(self) -> int:
        """The `as_number` of the first such step, or 0. Waits for the GPU."""
        return int(self._first)
