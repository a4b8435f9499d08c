"""Programs on a simulated GPU: the numbers are the CPU's, and no stream runs too early."""

import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from tests.support.fuzz_case import watched
from tests.support.tiers import slow

STEPS = 4


def plain():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])


def normed():
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))


def synced():
    return ddp.convert_sync_batchnorm(normed())


class Branches(nn.Module):
    """The second layer is used on rank 0 alone, and there in every other step."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(32, 32), nn.Linear(32, 32), 0

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        used = torch.distributed.get_rank() == 0 and self.calls % 2
        return self.second(x) if used else x


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(32, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(self.first(x.argmax(1)))


class TwoStreams(nn.Module):
    """Two layers, each on a stream of its own, of which the first to be registered is slow."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        if x.device.type == "cpu":
            return self.slow(x).tanh() + self.fast(x).tanh()
        outputs, main = [], torch.accelerator.current_stream()
        for layer in (self.slow, self.fast):
            stream = torch.Stream(x.device)
            stream.wait_stream(main)
            with stream:
                inner = x * 1.0
                if layer is self.slow:  # on the stream of this part of backward
                    inner.requires_grad_().register_hook(lambda _: delay())
                outputs.append(layer(inner).tanh())
            main.wait_stream(stream)
        return outputs[0] + outputs[1]


def delay():
    """Some 10 ms on the current stream of a real GPU; the host goes far ahead."""
    if "tests.support.simgpu.device" not in sys.modules:
        torch.cuda._sleep(20_000_000)


def of_a_user(state, bucket):
    compressed = bucket.buffer().div(2)
    future = torch.distributed.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def made_by_hand(state, bucket):
    torch.distributed.all_reduce(bucket.buffer(), async_op=True).wait()
    future = torch.futures.Future()  # which knows of no stream
    future.set_result(bucket.buffer().div_(2))
    return future


of_a_user.one_collective = made_by_hand.one_collective = True
powersgd = ddp.power_sgd.power_sgd_hook
fp16, of_torch = ddp.comm_hooks.fp16_compress_hook, ddp.comm_hooks.allreduce_hook
PROGRAMS = {
    "copies": {},
    "start": {"start": True},
    "views": {"gradient_as_bucket_view": True},
    "no overlap": {"overlap": False},
    "static": {"static_graph": True},
    "all used": {"find_unused_parameters": True},
    "unused": {"make": Branches, "find_unused_parameters": True},
    "sparse": {"make": Rows},
    "stall watch": {"stall_after": 60.0},
    "stragglers": {"straggler_every": 2},
    "check sync": {"check_every": 2},
    "buffers": {"make": normed, "sync_buffers": True},
    "sync batch norm": {"make": synced},
    "flat SGD": {"optimizer": ddp.SGD},
    "flat AdamW": {"optimizer": ddp.AdamW},
    "divided SGD": {"optimizer": partial(ddp.SGD, shard="world")},
    "PowerSGD": {"hook": powersgd},
    "PowerSGD, views": {"hook": powersgd, "gradient_as_bucket_view": True},
    "fp16": {"hook": fp16},
    "weights": {"weigh": True},
    "torch's hook": {"hook": of_torch},
    "hook of a user": {"hook": of_a_user},
    "future made by hand": {"hook": made_by_hand},
    "side stream": {"side": True},
    "side stream, views": {"side": True, "gradient_as_bucket_view": True},
    "side stream, no overlap": {"side": True, "overlap": False},
    "side stream, PowerSGD": {"side": True, "hook": powersgd},
    "forward on a side stream": {"side": "forward alone"},
    "forward on a side stream, no overlap": {"side": "forward alone", "overlap": False},
    "forward on a side stream, PowerSGD": {"side": "forward alone", "hook": powersgd},
    "two streams": {"make": TwoStreams},
    "two streams, views": {"make": TwoStreams, "gradient_as_bucket_view": True},
    "two streams, no overlap": {"make": TwoStreams, "overlap": False},
    "side stream, sync batch norm": {"side": True, "make": synced},
    "side stream, virtual ranks": {"side": True, "make": normed, "virtual_ranks": 4},
    "virtual ranks by speed": {"make": normed, "virtual_ranks": 4, "balance": True},
}


def made(name, device):
    options = dict(PROGRAMS[name])
    make, optimizer = options.pop("make", plain), options.pop("optimizer", torch.optim.SGD)
    hook, start, *_ = (options.pop(n, None) for n in ("hook", "start", "side", "weigh"))
    settings = {"lr": 0.01} if optimizer is ddp.AdamW else {"lr": 0.1, "momentum": 0.9}
    torch.manual_seed(0)
    module = make().to(device)
    if start:
        ddp.broadcast_parameters(module)
    reducer = ddp.Reducer(module, bucket_cap_mb=0.005, **options)
    if hook is not None:
        state = ddp.power_sgd.PowerSGDState(rank=2, start=1) if hook is powersgd else None
        reducer.register_comm_hook(state, hook)
    if optimizer is not torch.optim.SGD:
        settings["reducer"] = reducer
    return module, reducer, optimizer(module.parameters(), **settings)


def batch(world, number):
    seed = torch.Generator().manual_seed(10 * number + world.rank)
    return torch.randn(16, 32, generator=seed).to(world.device)


def forward(name, module, reducer, data):
    """Returns what does the backward pass; on virtual ranks, it does both."""

    def loss_of(part):
        return module(part).square().mean()

    if "virtual_ranks" in PROGRAMS[name]:
        parts = data.chunk(4)
        return lambda: reducer.run_virtual_ranks(lambda rank: loss_of(parts[rank]).backward())
    return loss_of(data).backward


def train(world, name):  # noqa: C901
    """Trains for some steps; returns the parameters, and what a simulated GPU has seen."""
    side, simulated = PROGRAMS[name].get("side"), "tests.support.simgpu.device" in sys.modules
    if simulated:
        from tests.support.simgpu import device, trace

        device.clear()
    module, reducer, step = made(name, world.device)
    stream = torch.Stream(world.device) if side and world.device.type == "cuda" else None
    for number in range(STEPS):
        if "weigh" in PROGRAMS[name]:
            reducer.weight(1 + world.rank)
        if simulated and number == STEPS - 1:
            begin, waited = len(device.GUARD.entries()), len(device.HOST_WAITS)
        data = batch(world, number)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream or nullcontext():
            step.zero_grad()
            if stream is not None:
                delay()
            backward = forward(name, module, reducer, data)
            if side != "forward alone":
                backward()
                step.step()
        if stream is not None:
            torch.accelerator.current_stream().wait_stream(stream)
        if side == "forward alone":
            backward()
            with stream or nullcontext():
                data + 1  # at once, in memory that is free on this stream
            step.step()
    found: tuple = [], [], 0, []
    if simulated:
        found = trace.faults(), trace.unexpected_waits(), trace.stalls(begin)
        found += (trace.host_waits(waited),)
    assert name not in FREE or len(reducer.core.flat_buckets) > 2
    reducer.remove()
    return [p.detach().cpu().tolist() for p in module.parameters()], found


def assert_numbers_of_the_cpu(name, found, expected):
    for (numbers, seen), (reference, _) in zip(found, expected, strict=True):
        faults, unexpected, stalls, waits = seen
        assert faults == unexpected == []
        assert name not in FREE or (stalls, waits) == (0, [])
        # On the CPU, ranks of one machine add up in full precision what PowerSGD compresses here.
        near = {"rtol": 0.05, "atol": 2e-3} if "PowerSGD" in name else {"rtol": 1e-4, "atol": 1e-5}
        if "AdamW" in name:  # divides by the size of the gradient, whose rounding it enlarges
            near = {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(numbers, reference, **near)


# Backward waits for no collective, and the host for nothing, once the buckets are laid out.
FREE = ["copies", "views", "static", "all used", "flat SGD", "fp16", "torch's hook"]
FREE += ["hook of a user"]
FIRST = ["copies", "fp16", "hook of a user", "views", "unused", "sparse", "future made by hand"]
FIRST += [
    "buffers",
    "weights",
    "side stream, PowerSGD",
    "side stream, virtual ranks",
    "virtual ranks by speed",
    "two streams",
]


@pytest.mark.parametrize("name", [n if n in FIRST else slow(n) for n in PROGRAMS])
def test_numbers_of_the_cpu_and_no_race(ranks, sim, name):
    assert_numbers_of_the_cpu(name, sim(train, name), ranks("gloo", 2)(train, name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_the_cpu_on_a_gpu(ranks, name):
    assert_numbers_of_the_cpu(name, *(ranks(b, 2)(train, name) for b in ("nccl", "gloo")))


@pytest.mark.parametrize("count", [6, slow(20)])
def test_random_programs_do_what_one_process_does(sim, count):
    """python -m tests.support.fuzz --backend nccl2 --cases 1000"""
    pytest.importorskip("hypothesis")
    from tests.support.fuzz import check, gpu_cases, run

    assert run(lambda case: check(sim, case), gpu_cases(2), count, seed=4)["cases"] >= count


# The file and function of the library whose collectives are not awaited; what that breaks.
NOT_AWAITED = [
    ("options/sparse.py", "", "sparse"),
    ("options/power_sgd.py", "", "PowerSGD"),
    ("options/buffers.py", "", "buffers"),
    ("sync/sync_batch_norm.py", "", "sync batch norm"),
    ("core/reducer.py", "_agree_on_order", "copies"),
    ("options/unused.py", "", "unused"),
    ("sync/check_sync.py", "", "check sync"),
    ("sync/broadcast.py", "", "start"),
]


def faults_without_waiting(world, file, function, program):
    from tests.support.simgpu.nccl import SimWork

    wait = SimWork.wait

    def forgetful(self, timeout=None):
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            code = frame.f_code
            if code.co_filename.endswith(file) and function in code.co_name:
                return True
        return wait(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimWork, "wait", forgetful)
        return train(world, program)[1][0]


@pytest.mark.parametrize(("file", "function", "program"), NOT_AWAITED)
def test_a_collective_that_is_not_awaited_is_found(sim, file, function, program):
    assert any(sim(faults_without_waiting, file, function, program))


# What an earlier version of the library broke.


def late_loss(world):
    from ddp_from_scratch.training.coordination import LossWatch, as_number

    watch = LossWatch(world.rank, world.device)
    nan, good = (torch.tensor(loss).to("cuda") for loss in (float("nan"), 1.0))
    watch.see(nan, 5)
    early = watch.known()
    watch.see(good, 6)
    return early, watch.known() == watch.settled() == as_number(5, world.rank)


def test_a_loss_that_is_not_finite_is_known_when_the_copy_has_arrived(nccl2):
    assert nccl2(late_loss) == [(0, True)] * 2


def uneven_batches(world):
    from tests.support.simgpu import trace

    module = normed().to(world.device)
    reducer = ddp.Reducer(module, sync_buffers=True)
    with watched(world.device) as faults, ddp.join(reducer):
        for number in range(2 + world.rank):
            module(batch(world, number)).square().mean().backward()
        waits = [wait for wait in trace.host_waits() if "torch_ddp/join.py" in wait]
    reducer.remove()
    return faults, waits


def test_join_does_not_wait_for_the_gpu_while_there_is_data(sim):
    assert sim(uneven_batches) == [([], [])] * 2


def gathered(world):
    objects = [None] * world.world_size
    dist.all_gather_object(objects, "longer than that of rank 0"[: 4 + 22 * world.rank])
    return objects


def test_objects_of_different_sizes_are_gathered(sim):
    assert sim(gathered) == [["long", "longer than that of rank 0"]] * 2
