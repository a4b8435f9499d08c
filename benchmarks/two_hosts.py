"""A training step across a slow wire: this library and torch's DDP beside what the wire allows.

Examples:
    sudo python -m benchmarks.two_hosts              1 Gbit/s, gloo and mpi, 2 and 4 ranks
    sudo python -m benchmarks.two_hosts --quick      gloo, 2 ranks, few rounds
    sudo python -m benchmarks.two_hosts --full       0.1, 1 and 10 Gbit/s
    sudo python -m benchmarks.two_hosts --gbit 0.5 --backend mpi --ranks 4 --model mlp

Needs Linux, root, `ip` and `tc`, and for mpi Open MPI. Two network namespaces on this machine are
the hosts, a veth pair with a token bucket at both ends is the wire (benchmarks/network.py); they
are removed at the end, after Ctrl-C and after a failure. The contenders take turns in one process
group. How to read the table:

    bound      the time until the first bucket is ready, plus the wire's limit: the bytes that must
               cross over its speed. Overlapping cannot do better. Two hosts that sum N bytes send
               N each: half of the summands, and the sums of the other half. With compression N is
               what is left of the gradients; torch's PowerSGD does not tell.
    MB sent    by the host that sent more, in a step, by its interface's counter, headers and all;
               x is that as a multiple of what must cross. A flat ring of 2 ranks on each of 2 hosts
               (gloo) sends 1.5 N over the wire, sums taken in each host first (mpi) send N.

TCP, IP and Ethernet headers take 4 % of the wire's speed. It refuses results that cannot have come
through the wire: fewer bytes on the interface than must cross, or more than its speed lets through.
Ranks that compute on this machine's few cores compute at the same time as they communicate: on slow
wires (1 Gbit/s and less) that costs little, at 10 Gbit/s the processor is what limits. torch's
PowerSGD gets one bucket for all gradients: with several on gloo, each rank's callbacks start their
collectives in an order of their own, and it fails.
"""

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

import ddp_from_scratch as ddp
from benchmarks import network
from benchmarks.measure import Samples, interleave
from benchmarks.report import RESULTS, draw_lines, on_terminal, write
from benchmarks.strategies import NO_COMMUNICATION, WORKLOADS, Contender
from ddp_from_scratch import UsageError, launch, process_group
from ddp_from_scratch.exit import run_to_exit

TORCH, REDUCER, SGD = "torch DDP, views", "Reducer, overlapped", "Reducer and ddp.SGD"
BF16, POWER_SGD = "Reducer, bf16", "Reducer, PowerSGD rank 4"
TORCH_POWER_SGD = "torch DDP, PowerSGD rank 4"
COMPRESSED = (BF16, POWER_SGD, TORCH_POWER_SGD)

# What is called, and what steps it.
Training = tuple[nn.Module, torch.optim.Optimizer]

WARM_UP = 3  # rounds that `interleave` does not count
_ROUNDS = {0.1: 5, 1.0: 15, 10.0: 30}  # by the wire's speed, about a minute each


@dataclass(frozen=True)
class Result:
    """One contender across one wire.

    Attributes:
        name: the contender's.
        milliseconds: of the slowest rank, round by round.
        must_cross: bytes that each host must send in a step; None where that is not known.
        sent: bytes that left each host in a step, by the counter of its interface: one list a
            host, round by round.
        bound: milliseconds that a step needs at least, by the wire and the time until the first
            bucket is ready; None where `must_cross` is.
    """

    name: str
    milliseconds: list[float]
    must_cross: int | None
    sent: list[list[int]]
    bound: float | None

    @property
    def most_sent(self) -> float:
        """Median bytes in a step of the host that sends more."""
        return max(float(np.median(of_host)) for of_host in self.sent)


def main() -> int:
    options = parse(sys.argv[1:])
    if launch.launcher() != "none":
        measure(options)
        return 0
    network.check_available(options.backend)
    found: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = {}
    with network.stoppable():
        for gbit in options.gbit:
            for backend in options.backend:
                for ranks in options.ranks:
                    rank = [sys.executable, "-m", "benchmarks.two_hosts", "--backend", backend]
                    rank += ["--gbit", str(gbit), "--model", options.model]
                    if options.cap:
                        rank += ["--cap", *map(str, options.cap)]
                    rank += ["--rounds", str(options.rounds or rounds_at(gbit))]
                    with network.two_hosts(gbit) as hosts:
                        code = network.run_ranks(hosts, ranks // 2, backend, rank)
                    if code:
                        return code
                    part = json.loads(
                        (
                            RESULTS / f"{file_name(options.model, backend, ranks, gbit)}.json"
                        ).read_text()
                    )
                    found.setdefault((backend, ranks), {})[gbit] = part["samples"]
    for (backend, ranks), by_speed in found.items():
        draw(options.model, backend, ranks, by_speed)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: a value out of its range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gbit", type=float, nargs="+", help="the wire's speed in Gbit/s, each way (default: 1)"
    )
    parser.add_argument(
        "--backend", nargs="+", choices=("gloo", "mpi"), help="(default: gloo and mpi)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="on both hosts together (default: 2 and 4)"
    )
    parser.add_argument("--model", choices=("resnet18", "mlp"), default="resnet18")
    parser.add_argument(
        "--rounds", type=int, help="timed steps of each contender (default: 15 at 1 Gbit/s)"
    )
    parser.add_argument(
        "--cap",
        type=float,
        nargs="+",
        default=[],
        metavar="MB",
        help="torch DDP and Reducer with buckets of so many MiB, beside their defaults",
    )
    parser.add_argument("--quick", action="store_true", help="gloo, 2 ranks, 5 rounds, 1 Gbit/s")
    parser.add_argument("--full", action="store_true", help="0.1, 1 and 10 Gbit/s")
    options = parser.parse_args(arguments)
    if options.quick and options.full:
        raise UsageError("--quick and --full exclude each other")
    options.gbit = options.gbit or ([0.1, 1.0, 10.0] if options.full else [1.0])
    options.backend = options.backend or (["gloo"] if options.quick else ["gloo", "mpi"])
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    if options.rounds is None and options.quick:
        options.rounds = 5
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks):
        raise UsageError(f"--ranks must be even and 2 or more, got {options.ranks}")
    if not all(0.001 <= gbit <= 100 for gbit in options.gbit):
        raise UsageError(f"--gbit must be 0.001 to 100, got {options.gbit}")
    if options.rounds is not None and options.rounds < 2:
        raise UsageError(f"--rounds must be 2 or more, got {options.rounds}")
    return options


def rounds_at(gbit: float) -> int:
    """How many rounds are worth their time at this speed."""
    return next((rounds for speed, rounds in _ROUNDS.items() if gbit <= speed), 30)


def file_name(model: str, backend: str, ranks: int, gbit: float) -> str:
    return f"two_hosts-{model}-{backend}-{ranks}-{gbit:g}gbit"


# A rank ---------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """A rank's part: times every contender and, on rank 0, prints and writes."""
    (backend,), (gbit,) = options.backend, options.gbit
    torch.set_num_threads(1)
    with process_group(backend) as world:
        workload = WORKLOADS[options.model]
        torch.manual_seed(world.rank)
        batch = workload.batch()
        ready = until_first_bucket(workload.model, batch)
        meter = Meter()
        powers = ddp.power_sgd.PowerSGDState(rank=4, start=WARM_UP - 1)
        compared = contenders(workload.model, batch, backend, powers, options.cap)
        metered = [Contender(c.name, c.model, meter.before(c)) for c in compared]
        rounds = tqdm(
            range(options.rounds),
            desc=f"{gbit:g} Gbit/s, {backend}, {world.world_size} ranks",
            disable=world.rank != 0 or not on_terminal(),
            leave=False,
        )
        samples = interleave(metered, rounds, world.device)
        meter.read()
        check_alike(compared, workload.model)
        sent = gather_sent(meter, world.local_rank == 0)
        if world.rank == 0:
            nbytes = sum(p.numel() * p.element_size() for p in compared[0].model.parameters())
            per_step = 4 * powers.sent // max(1, powers.iteration - powers.start)
            crossing: dict[str, int | None] = {
                NO_COMMUNICATION: 0,
                BF16: nbytes // 2,
                POWER_SGD: per_step,
                TORCH_POWER_SGD: None,
            }
            results = []
            for s in samples:
                must_cross = crossing.get(s.name, nbytes)
                bound = None if must_cross is None else ready + limit_ms(must_cross, gbit)
                results.append(Result(s.name, s.milliseconds, must_cross, sent[s.name], bound))
            check_crossed(results, gbit)
            title = (
                f"{workload.name}; {backend}, {world.world_size} ranks on 2 hosts, {gbit:g} Gbit/s"
            )
            wire = limit_ms(nbytes, gbit)
            print(f"\n{title}, {options.rounds} steps each")
            print(
                f"first bucket ready after {ready:.0f} ms; the wire needs {wire:.0f} ms for the "
                f"{nbytes / 1e6:.1f} MB of gradients"
            )
            print(table(results, samples), flush=True)
            name = file_name(options.model, backend, world.world_size, gbit)
            write(name, title, [asdict(r) for r in results])


def limit_ms(nbytes: float, gbit: float) -> float:
    """Milliseconds that the wire needs for so many bytes, without headers."""
    return nbytes * 8 / (gbit * 1e9) * 1e3


class Meter:
    """Counts what crosses this host's end of the wire, step by step.

    It reads before each step, when the ranks have met: then the bytes of the step before have all
    arrived. (That counts their meeting in, some hundred bytes.)
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._last, self._name = network.crossed_bytes()[0], ""

    def before(self, contender: Contender) -> Callable[[], None]:
        """The contender's step, counted."""

        def step() -> None:
            self.read()
            self._name = contender.name
            contender.step()

        return step

    def read(self) -> None:
        """Attributes what has crossed since to the step before."""
        now = network.crossed_bytes()[0]
        self.sent.setdefault(self._name, []).append(now - self._last)
        self._last = now


@torch.no_grad()
def check_alike(compared: Sequence[Contender], model: Callable[[], nn.Module]) -> None:
    """Refuses to compare what did not compute the same. Collective.

    Each contender's parameters must be equal over ranks to the bit. Those in full precision may be
    a twentieth of the way that training has gone apart: sums differ in their order, and rounding
    grows from step to step. Compressed ones have gone another way.

    Raises:
        RuntimeError: they are not.
    """
    synchronised = [c for c in compared if c.name != NO_COMMUNICATION]
    for contender in synchronised:
        ddp.check_sync(contender.model)
    torch.manual_seed(0)
    start = parameters_to_vector(model().parameters()).double()
    exact = [c for c in synchronised if c.name not in COMPRESSED]
    ends = [parameters_to_vector(c.model.parameters()).double() for c in exact]
    moved = (ends[0] - start).norm().item()
    for contender, end in zip(exact[1:], ends[1:], strict=True):
        apart = (end - ends[0]).norm().item()
        if not (moved > 0 and apart <= 0.05 * moved):  # also what is not a number
            raise RuntimeError(
                f"{contender.name} and {exact[0].name} have trained to different parameters, "
                f"{apart:.2g} apart where training moved them by {moved:.2g}: their times cannot "
                f"be compared"
            )


def gather_sent(meter: Meter, counts: bool) -> dict[str, list[list[int]]]:
    """By contender, for each host what it sent in each timed step. Collective.

    Args:
        meter: this rank's.
        counts: whether it speaks for its host.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, meter.sent if counts else None)
    hosts = [sent for sent in everyone if sent is not None]
    return {name: [of_host[name][WARM_UP:] for of_host in hosts] for name in hosts[0] if name}


def check_crossed(results: list[Result], gbit: float) -> None:
    """Refuses what did not come through the wire.

    Raises:
        RuntimeError: a host sent less than it must have, or faster than the wire lets it.
    """
    for r in results:
        for host, sent in enumerate(r.sent):
            for milliseconds, nbytes in zip(r.milliseconds, sent, strict=True):
                if nbytes < (r.must_cross or 0):
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in a step, and "
                        f"{r.must_cross:,} must cross: it went round the wire"
                    )
                # What the token bucket has saved up may leave at once.
                if limit_ms(nbytes, gbit) > 1.02 * milliseconds + 10:
                    raise RuntimeError(
                        f"{r.name} sent {nbytes:,} bytes from host {host} in {milliseconds:.0f} "
                        f"ms: more than {gbit:g} Gbit/s"
                    )


def until_first_bucket(
    model: Callable[[], nn.Module], batch: tuple[torch.Tensor, torch.Tensor], rounds: int = 10
) -> float:
    """Milliseconds from the start of a step until its first bucket could be sent. Collective.

    Nothing is sent: the comm hook notes the time and gives the bucket back as it is. Median over
    rounds, of the slowest rank.
    """
    found: list[float] = []

    def note(began: list[float], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            found.append(1e3 * (time.perf_counter() - began[0]))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    torch.manual_seed(0)
    trained, began = model(), [0.0]
    reducer = ddp.Reducer(trained, gradient_as_bucket_view=True)
    reducer.register_comm_hook(began, note)
    for _ in range(WARM_UP + rounds):
        trained.zero_grad()
        dist.barrier()
        began[0] = time.perf_counter()
        cross_entropy(trained(batch[0]), batch[1]).backward()
    reducer.remove()
    slowest = torch.tensor(found[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.median())


def contenders(
    model: Callable[[], nn.Module],
    batch: tuple[torch.Tensor, torch.Tensor],
    backend: str,
    powers: ddp.power_sgd.PowerSGDState,
    caps: Sequence[float] = (),
) -> list[Contender]:
    """Every contender, with equal parameters and, on this rank, an equal batch."""

    def reduced(trained: nn.Module, views: bool = False, cap: float | None = None) -> ddp.Reducer:
        ddp.broadcast_parameters(trained)
        return ddp.Reducer(trained, bucket_cap_mb=cap, gradient_as_bucket_view=views)

    def wrapped(trained: nn.Module, **settings: Any) -> DistributedDataParallel:
        return DistributedDataParallel(trained, **_TORCH_SETTINGS, **settings)

    def bare(trained: nn.Module) -> Training:
        return trained, foreach_sgd(trained)

    def torch_ddp(trained: nn.Module, cap: float | None = None) -> Training:
        return wrapped(trained, bucket_cap_mb=cap), foreach_sgd(trained)

    def reducer(trained: nn.Module, cap: float | None = None) -> Training:
        reduced(trained, cap=cap)
        return trained, foreach_sgd(trained)

    def flat_sgd(trained: nn.Module) -> Training:
        averaging = reduced(trained, views=True)
        sgd = ddp.SGD(trained.parameters(), _LR, _MOMENTUM, reducer=averaging)
        return trained, sgd

    def bf16(trained: nn.Module) -> Training:
        reduced(trained).register_comm_hook(None, ddp.comm_hooks.bf16_compress_hook)
        return trained, foreach_sgd(trained)

    def power_sgd(trained: nn.Module) -> Training:
        reduced(trained).register_comm_hook(powers, ddp.power_sgd.power_sgd_hook)
        return trained, foreach_sgd(trained)

    def torch_power_sgd(trained: nn.Module) -> Training:
        called = wrapped(trained, bucket_cap_mb=1024)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=powers.start
        )
        called.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return called, foreach_sgd(trained)

    ways: dict[str, Callable[[nn.Module], Training]] = {
        NO_COMMUNICATION: bare,
        TORCH: torch_ddp,
        REDUCER: reducer,
        SGD: flat_sgd,
        BF16: bf16,
        POWER_SGD: power_sgd,
    }
    for cap in caps:
        ways[f"{TORCH}, {cap:g} MB buckets"] = partial(torch_ddp, cap=cap)
        ways[f"Reducer, {cap:g} MB buckets"] = partial(reducer, cap=cap)
    if backend == "gloo":  # its callbacks call collectives, which mpi does not put in order
        ways[TORCH_POWER_SGD] = torch_power_sgd
    return [_contender(name, model, prepare, batch) for name, prepare in ways.items()]


# A small step: after some steps of ResNet-18 that are ten times as large, 4 ranks are 2 % of the
# way apart for the order of float32 sums alone, torch's DDP with other buckets from itself as well.
_LR, _MOMENTUM = 1e-4, 0.9

# Buffers stay where they are, as with a Reducer; newer versions warn of the older name.
_SYNC_BUFFERS = {"broadcast_buffers", "forward_sync_buffers"}.intersection(
    inspect.signature(DistributedDataParallel).parameters
)
_TORCH_SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, max(_SYNC_BUFFERS): False}


def foreach_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), _LR, _MOMENTUM, foreach=True)


def _contender(
    name: str,
    model: Callable[[], nn.Module],
    prepare: Callable[[nn.Module], Training],
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Contender:
    torch.manual_seed(0)
    trained = model()
    called, optimizer = prepare(trained)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(called(batch[0]), batch[1])
        if isinstance(optimizer, ddp.SGD):
            optimizer.backward_and_step(loss)
        else:
            loss.backward()
            optimizer.step()

    return Contender(name, trained, step)


# What is shown --------------------------------------------------------------------------------


def table(results: list[Result], samples: list[Samples]) -> str:
    """Times, ratios to torch's DDP and to the bound, and what crossed the wire."""
    by_name = {s.name: s for s in samples}
    rows = []
    for r, s in zip(results, samples, strict=True):
        low, median, high = s.quartiles
        ratio, ratio_low, ratio_high = s.ratio_to(by_name[TORCH])
        multiple = f"{r.most_sent / r.must_cross:.2f}" if r.must_cross else ""
        rows.append(
            [
                s.name,
                f"{median:.0f}",
                f"{low:.0f} to {high:.0f}",
                f"{ratio:.2f}",
                f"{ratio_low:.2f} to {ratio_high:.2f}",
                f"{r.bound:.0f}" if r.bound and r.must_cross else "",
                f"{median / r.bound:.2f}" if r.bound and r.must_cross else "",
                f"{r.most_sent / 1e6:.2f}",
                multiple,
            ]
        )
    headers = ["", "ms", "quartiles", "/ torch DDP", "95 %", "bound", "/ bound", "MB sent", "x"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 8))


def draw(model: str, backend: str, ranks: int, by_speed: dict[float, list[dict[str, Any]]]) -> None:
    """Milliseconds by the wire's speed, one line for each contender and one for the bound."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for gbit, results in sorted(by_speed.items()):
        for r in results:
            lines.setdefault(r["name"], []).append((gbit, float(np.median(r["milliseconds"]))))
            if r["name"] == REDUCER:
                lines.setdefault("bound, full precision", []).append((gbit, r["bound"]))
    title = f"{model}, {backend}, {ranks} ranks on 2 hosts"
    draw_lines(f"two_hosts-{model}-{backend}-{ranks}", title, ("Gbit/s", "ms a step"), lines)


if __name__ == "__main__":
    run_to_exit(main)
