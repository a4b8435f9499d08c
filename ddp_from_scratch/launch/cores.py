"""Divides the cores of a machine among its ranks, by sockets and NUMA nodes.

    socket 0                          socket 1
    | 0   1   2   3   4   5   6   7 | 8   9  10  11  12  13  14  15 |    cores
    |   rank 0      |    rank 1     |    rank 2     |    rank 3     |

`read` finds the cores in Linux's /sys, `divide` makes a plan, and `bind_to` carries it out in a
rank. Does not import torch, since what starts ranks does without it.

A "CPU" is a hardware thread, as the system numbers them. A core has one or several.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch import environment

BINDS = ("auto", "none", "cores", "socket")
OMP = "OMP_NUM_THREADS"  # read by torch, and by what else computes, when they are imported


@dataclass(frozen=True)
class Core:
    """A physical core: those of its CPUs that may be used, and its place."""

    cpus: tuple[int, ...]
    socket: int
    node: int  # of NUMA: cores that are near to the same memory


@dataclass(frozen=True)
class Cores:
    """The cores that a job may use on this machine, neighbours beside each other."""

    cores: Sequence[Core]
    quota: float = math.inf  # of a cgroup: as many CPUs' time may be used
    cpus_of_core: int = 1  # also those that may not be used

    @property
    def most_threads(self) -> int:
        """How many threads can compute at a time, each on a core."""
        return max(1, math.floor(min(len(self.cores), self.quota)))


@dataclass(frozen=True)
class Plan:
    """What the ranks of a machine get. All have as many threads, since bits depend on these."""

    threads: int  # of each rank
    cpus: Sequence[str] = ()  # of each rank, as in "0-7,64-71"; empty: no rank is bound
    # The CPUs of the ranks' data loaders, as in "0,1,2": all of them. "": no rank is bound.
    workers: str = ""
    text: str = ""  # a line for the user; "": there is nothing to say


# Lists of CPUs ------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Parses a list as Linux writes it: "0-2,8" is [0, 1, 2, 8]."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def as_text(cpus: Iterable[int]) -> str:
    """Writes such a list."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


# The machine --------------------------------------------------------------------------------------


def own_cpus() -> set[int]:
    """Returns the CPUs that this process may use; all where the system cannot say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def read(cpus: Collection[int], root: Path = Path("/")) -> Cores:
    """Finds the cores of these CPUs, and the quota of this process's cgroup, below `root`.

    Where the system does not say more, each CPU is a core of one socket.
    """
    system = root / "sys/devices/system"
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in numbers(_text(folder / "cpulist"))
    }
    online = numbers(_text(system / "cpu/online")) or cpus
    siblings: dict[str, list[int]] = {}
    for cpu in sorted({*cpus} & {*online}):
        core = _text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(core or str(cpu), []).append(cpu)
    found = [
        Core(
            tuple(of_core),
            int(_text(system / f"cpu/cpu{of_core[0]}/topology/physical_package_id") or 0),
            node_of.get(of_core[0], 0),
        )
        for of_core in siblings.values()
    ]
    ordered = sorted(found, key=lambda core: (core.socket, core.node, core.cpus))
    return Cores(ordered, _quota(root), max((len(numbers(s)) for s in siblings), default=1))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _quota(root: Path) -> float:
    """Returns the least quota of this process's cgroup and those around it, in CPUs."""
    found = math.inf
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")  # v1 has a tree of its own
        group = top / path.lstrip("/")  # in a container it may be missing, and `top` is its own
        for folder in (group, *group.parents):
            if controllers:
                limits = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            else:
                limits = _text(folder / "cpu.max").split()
            if len(limits) == 2 and all(limit.isdecimal() for limit in limits):  # not max, not -1
                found = min(found, int(limits[0]) / int(limits[1]))
            if folder == top:
                break
    return found


# Plans --------------------------------------------------------------------------------------------


def plan_here(ranks: int, bind: str) -> Plan:
    """Divides the cores that this process may use. On macOS, which cannot bind, sets threads."""
    plan = divide(read(own_cpus()), ranks, bind)
    if hasattr(os, "sched_setaffinity"):
        return plan
    if bind in ("cores", "socket"):
        raise UsageError(f"bind={bind!r} is for Linux: this system cannot bind processes; use auto")
    return Plan(plan.threads)


_Place = Callable[[Core], tuple[int, ...]]
# From the narrowest place that should hold a rank to the widest: its name, and a core's.
_PLACES: Mapping[str, _Place] = {
    "NUMA node": lambda core: (core.socket, core.node),
    "socket": lambda core: (core.socket,),
    "": lambda _: (),
}
_PARTS = {2: "half", 3: "third", 4: "quarter"}


def divide(cores: Cores, ranks: int, bind: str = "auto") -> Plan:
    """Gives each of a machine's ranks its own cores, and a thread for each of them.

    "cores": a rank is bound to its cores, "socket": to the whole sockets of its cores. "auto" binds
    to cores where each rank can have one. A quota below the number of cores limits threads, and
    nothing is bound: another container may have chosen the same cores. "none" binds nothing.

    Raises:
        UsageError: `bind` is unknown, or demands what cannot be.
    """
    if bind not in BINDS:
        raise UsageError(f"bind must be one of {', '.join(BINDS)}, got {bind!r}")
    count, quota = len(cores.cores), cores.quota
    threads = max(1, cores.most_threads // ranks)
    possible = ranks <= count <= quota
    if bind in ("cores", "socket") and not possible:
        limit = f"{count} cores" if count <= quota else f"a cgroup's quota of {quota:g} CPUs"
        raise UsageError(
            f"bind={bind!r} needs a core for each rank, got {ranks} ranks and {limit}: use auto"
        )
    if bind == "none" or not possible or ranks == 1:
        text = ""
        if quota < count and threads > 1:
            text = f"{ranks} ranks x {threads} threads, by a cgroup's quota of {quota:g} CPUs"
        return Plan(threads, text=text if ranks > 1 and bind != "none" else "")
    place, parts = _deal(cores.cores, ranks, threads)
    text = ""
    if threads > 1 or bind != "auto":  # a core for each rank is what everybody expects
        text = f"{ranks} ranks x {_count(threads, 'core')}{_described(place, parts)}"
    if bind == "socket":
        sockets = [{core.socket for core in part} for part in parts]
        parts = [[core for core in cores.cores if core.socket in own] for own in sockets]
    lists = [as_text(cpu for core in part for cpu in core.cpus) for part in parts]
    # Fewer cores are left than there are ranks: too few for the workers of all.
    workers = ",".join(map(str, sorted(cpu for core in cores.cores for cpu in core.cpus)))
    return Plan(threads, lists, workers, text)


def _deal(cores: Sequence[Core], ranks: int, each: int) -> tuple[str, list[list[Core]]]:
    """Returns `each` cores for every rank, in as narrow a place as fits all, and its name."""
    for name, place_of in _PLACES.items():
        places: dict[tuple[int, ...], list[Core]] = {}
        for core in cores:
            places.setdefault(place_of(core), []).append(core)
        if sum(len(place) // each for place in places.values()) < ranks:
            continue
        counts = dict.fromkeys(places, 0)
        for _ in range(ranks):  # to where most cores are free
            counts[max(counts, key=lambda p: len(places[p]) - counts[p] * each)] += 1
        return name, [
            places[place][number * each :][:each]
            for place, count in counts.items()
            for number in range(count)
        ]
    raise AssertionError("a machine holds its own cores")


def _described(place: str, parts: Sequence[Sequence[Core]]) -> str:
    """Says where the ranks are, if each has an equal part of a place."""
    sockets = Counter(part[0].socket for part in parts)
    counts = Counter(part[0].node for part in parts) if place == "NUMA node" else sockets
    if len(counts) == len(sockets):
        place, counts = place and "socket", sockets
    if not place or len(counts) == 1 or len({*counts.values()}) > 1:
        return ""
    (equal,) = {*counts.values()}
    if equal == 1:
        return f", a rank for each {place}"
    part = _PARTS.get(equal, f"1/{equal}")
    *others, last = map(str, counts)
    return f", a rank for each {part} of {place}s {', '.join(others)} and {last}"


def share(masks: Sequence[str], cores: Cores) -> int:
    """Returns a rank's threads, equal on all ranks of a machine, given the CPUs of each of them.

    A core that several ranks may use counts for each in part, so ranks without a core of their own
    share what there is.
    """
    ranks = [{*numbers(mask)} for mask in masks]
    users = {core: [bool(own & {*core.cpus}) for own in ranks] for core in cores.cores}
    shares = [sum(1 / sum(of) for of in users.values() if of[rank]) for rank in range(len(ranks))]
    least = min(*shares, cores.quota / len(ranks), len(cores.cores))
    return max(1, math.floor(least + 1e-9))  # three thirds are one


# In a rank ----------------------------------------------------------------------------------------


def variables(plan: Plan, bind: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what all ranks of this plan get in their environment, beside their own CPUs."""
    found = {environment.THREADS: str(plan.threads)}
    if plan.workers:
        found[environment.WORKER_CPUS] = plan.workers
    # A number that the user has set counts, not one that these lines have set for a rank.
    if bind != "none" and environ.get(OMP) in (None, environ.get(environment.OMP_SET)):
        found[OMP] = found[environment.OMP_SET] = str(plan.threads)
    return found


def bind_to(cpus: str) -> None:
    """Binds this thread, and those that it starts, to these CPUs; a no-op for ""."""
    # A cpuset may have changed, and leave nothing of them: the process then stays unbound.
    with suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, numbers(cpus))


@contextmanager
def as_if_bound_to(cpus: str) -> Iterator[None]:
    """Binds this thread in the block, and with it the processes that it starts; a no-op for ""."""
    before = own_cpus()
    bind_to(cpus)
    try:
        yield
    finally:
        bind_to(as_text(before) if cpus else "")


def bind_local_rank(environ: Mapping[str, str] = os.environ) -> None:
    """Binds a rank of `start_mpirun`, which knows the CPUs of all ranks. Idempotent."""
    lists = environ.get(environment.CPUS_OF_RANKS, "").split(";")
    number = next((environ[name] for name in environment.MPI_LOCAL_RANK if name in environ), "")
    if number.isdecimal() and int(number) < len(lists):
        bind_to(lists[int(number)])


# Under a launcher ---------------------------------------------------------------------------------


def options_of_mpirun(ranks: int, threads: int, cores: int, sockets: int) -> str:
    """Returns the options of Open MPI's mpirun for so many threads in each of a machine's ranks."""
    # It has no map for a rank that lies in two sockets.
    if cores // sockets // threads * sockets >= ranks:
        return f"--map-by socket:PE={threads}"
    return f"--bind-to none -x {OMP}={threads}"


def advice(
    launcher: str,
    masks: Sequence[str],
    threads: int,
    cores: Cores,
    all_cores: int,
    sockets: int = 1,
) -> str:
    """Says what a machine's ranks lose by how they were started, and the remedy; "" if nothing.

    Each may use the CPUs of its mask, which together have these cores, and computes with as many
    threads. The job may use `all_cores` of the machine, in so many sockets. Less than a factor of
    two is not worth it.
    """
    ranks, own = len(masks), share(masks, cores)
    possible = max(1, all_cores // ranks)
    who = f"each of the {ranks} ranks here" if ranks > 1 else "this rank"
    if 2 * own <= possible and launcher in ("mpirun", "srun"):
        options = f"--cpus-per-task={possible * cores.cpus_of_core}"
        if launcher == "mpirun":
            options = options_of_mpirun(ranks, possible, all_cores, sockets)
        return (
            f"{launcher} gives {who} {_count(own, 'core')} of {all_cores}: start with {launcher} "
            f"{options}"
        )
    if threads > own or 2 * threads <= own:
        has = f"{_count(threads, 'thread')} for {_count(own, 'core')}"
        return (
            f"{who} computes with {has}: set OMP_NUM_THREADS={own}, or pass threads='auto' to "
            f"process_group"
        )
    return ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
