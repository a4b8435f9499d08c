"""Ranks that begin alike and end together: one rank's mistake, loss or signal is known to all."""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import ddp_from_scratch
from ddp_from_scratch import gpu
from ddp_from_scratch.errors import PeerError, UsageError
from ddp_from_scratch.group import of_member
from ddp_from_scratch.launch.rank_process import is_communication_error
from ddp_from_scratch.training.datasets import ImageData, load_dataset
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.virtual_ranks.tree_reduction import seed_generators
from ddp_from_scratch.waiting import wait
from ddp_from_scratch.world import World

T = TypeVar("T")


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes every rank leave this block in the same way. Collective.

    Where any rank raised a UsageError inside, the lowest such rank raises its own and every other
    one a PeerError.
    """
    mine: UsageError | None = None
    try:
        yield
    except UsageError as error:
        mine = error
    # Else the others would go on to wait for a rank that has gone.
    failed = torch.tensor([int(mine is not None)])
    wait(of_member(dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True)))
    if not failed.item():
        return
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, str(mine) if mine else None, group=group)
    rank = next(r for r, text in enumerate(texts) if text is not None)
    if rank == dist.get_rank(group) and mine is not None:
        raise mine
    raise PeerError(f"rank {rank}: {texts[rank]}")


def on_rank_zero(read: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Calls `read` on rank 0; its result, or its UsageError, is that of every rank. Collective."""
    found: list[Any] = [None]
    with together(group):
        if dist.get_rank(group) == 0:
            found = [read()]
    dist.broadcast_object_list(found, group=group, device=torch.device("cpu"))
    value: T = found[0]
    return value


# Alike from the beginning -------------------------------------------------------------------------


def prepare_process(settings: Settings, world: World, asked: dict[str, str]) -> dist.ProcessGroup:
    """Compares the options of all ranks, then sets threads, determinism and seeds of this process.

    `asked` holds more values, by name, that must be the same on all ranks; a UsageError on
    every rank says what differs. Returns a group for CPU tensors.
    """
    group: Any = dist.group.WORLD
    if world.backend == "nccl":
        # All that ranks exchange beside gradients must not wait for a GPU.
        timeout = timedelta(seconds=settings.timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    require_alike(settings, group, asked)
    torch.set_num_threads(settings.threads)
    if settings.deterministic:
        # cuBLAS repeats only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not without need: the call imports torch's compiler, which takes a second.
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    seed_generators(settings.seed)
    return group


def require_alike(
    settings: Settings, group: dist.ProcessGroup | None, asked: Mapping[str, str]
) -> None:
    """Raises on every rank if versions, options or what else was asked for differ. Collective."""
    # `asked` comes first in the message, and wins where both name an option.
    _require_same(versions() | dict(asked) | settings.to_compare() | dict(asked), group)


def _require_same(asked: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Ends all ranks unless each was asked for the same, and names what differs. Collective."""
    everyone: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(asked), group=group)
    text = differences(everyone)
    if text is not None:
        raise UsageError(text) if dist.get_rank(group) == 0 else PeerError(text)


def differences(asked: Sequence[Mapping[str, str]]) -> str | None:
    """Each value that some rank does not share with rank 0, as a line; None where there is none."""
    found = []
    for name, value in asked[0].items():
        rank = next((r for r, theirs in enumerate(asked) if theirs.get(name) != value), None)
        if rank is not None:
            found.append(f"{name} is {value} on rank 0 and {asked[rank].get(name)} on rank {rank}")
    if not found:
        return None
    they = "they" if len(found) > 1 else "it"
    return f"{'; '.join(found)}: {they} must be the same on all ranks"


@cache
def versions() -> dict[str, str]:
    """The versions of the code that this rank runs."""
    # Another torch may round, or communicate, in another way.
    source = hashlib.sha256()
    folder = Path(ddp_from_scratch.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        source.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    installed = list(metadata.distributions(name="torchvision"))  # an extra
    return {
        "torch": torch.__version__,
        "torchvision": installed[0].version if installed else "none",
        "ddp_from_scratch's source": source.hexdigest()[:16],
    }


def open_dataset(
    name: str, settings: Settings, world: World, group: dist.ProcessGroup | None
) -> ImageData:
    """The dataset, downloaded where asked by the first rank of each machine while others wait.

    Raises on every rank, as `load_dataset`, or if the ranks' images are not the same.
    """
    with together(group):
        if settings.download and world.local_rank == 0:
            load_dataset(name, settings.data_dir, download=True)
    with together(group):
        # By every rank, after the download: the first `together` is a barrier.
        data = load_dataset(name, settings.data_dir, download=False)
    _require_same({f"--dataset {name}": data.summary()}, group)
    return data


# Known to all after the same step -----------------------------------------------------------------


class StopSignal:
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP, acted on by all ranks after the same step.

    A launcher's signal reaches ranks at different steps. So ranks exchange in each step whether one
    has come, over a group for CPU tensors (None: the default group): `ask` begins it before the
    step, `answer` ends it after. Two other numbers travel along. Inside the `with` block a second
    signal ends the process at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._received = 0
        # The signal's number and `also`: one all-reduce for all, whose MAX leaves the highest.
        self._flags = torch.zeros(3, dtype=torch.int64)
        self._handle: dist.Work | None = None

    def __enter__(self) -> "StopSignal":
        # SIGUSR1 is the one that mpirun hands on without killing the ranks soon after, and that
        # Slurm is commonly set to send before a job's time is up.
        self._previous = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._received and isinstance(error, Exception) and is_communication_error(error):
            # Some rank ended before it could agree on a step with us: we end as asked, too.
            signal.signal(self._received, signal.SIG_DFL)
            os.kill(os.getpid(), self._received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, signal.SIG_DFL)

    def drop(self) -> None:
        """Drops an exchange that a lost rank broke off."""
        # New: the broken one may still write to the old ones.
        self._flags, self._handle = torch.zeros_like(self._flags), None

    def ask(self, *also: int) -> None:
        """Starts the exchange of this step; `also` has at most two numbers."""
        self._flags.zero_()
        self._flags[: 1 + len(also)] = torch.tensor([self._received, *also])
        # Asynchronous: the step hides it.
        self._handle = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def answer(self) -> tuple[int, int, int]:
        """The highest signal number at any rank that asked (0: none), and the highest of `also`."""
        assert self._handle is not None, "answer() without ask()"
        wait(self._handle)
        number, first, second = self._flags.tolist()
        return number, first, second


# An event as one number: a MAX leaves the earliest step, and of that the lowest rank; 0 is none.
_STEPS, _RANKS = 2**42, 2**20


def as_number(step: int, rank: int) -> int:
    """The event "at this step on this rank"."""
    return (_STEPS - step) * _RANKS - rank


def place_of(number: int, steps_per_epoch: int) -> str:
    """An event in words, with its epoch and step counted from 1."""
    steps, rank = divmod(-number, _RANKS)
    epoch, step = divmod(_STEPS + steps, steps_per_epoch)
    return f"in epoch {epoch + 1}, step {step + 1}/{steps_per_epoch}, on rank {rank}"


class LossWatch:
    """Remembers the first step whose loss was not finite."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        # On a GPU, a copy in the host's memory that lags behind by as many steps as the host runs
        # ahead. Pinned, so that the copy is asynchronous; the event marks its end.
        self._arrived: torch.Tensor | None = None
        self._event: torch.Event | None = None
        if gpu.is_gpu(device):
            self._arrived = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._event = torch.Event(device)

    def see(self, loss: torch.Tensor, step: int) -> None:
        here = as_number(step, self._rank) * loss.detach().isfinite().logical_not()
        self._first = torch.maximum(self._first, here)
        # One copy at a time: while the last is on its way, this step's find waits for a later one.
        if self._arrived is not None and self._event is not None and self._event.query():
            self._arrived.copy_(self._first, non_blocking=True)
            self._event.record()

    def known(self) -> int:
        """`as_number` of the first such step, as far as it has arrived, or 0. Does not wait."""
        return int(self._first if self._arrived is None else self._arrived)

    def settled(self) -> int:
        """`as_number` of the first such step of all, or 0. Waits for the GPU."""
        return int(self._first)
