"""nccl on a GPU (`pytest -m gpu`): one rank, and two with a GPU each, or with one that they share.

Two ranks on one GPU take turns, so nothing here looks at durations. Where there is no GPU, what
needs none of its kernels runs on a simulated one.
"""

import contextlib
import copy
import gc
import io
import json
import re
import signal
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import ddp_from_scratch as ddp
from ddp_from_scratch.watch.timeline import Timeline
from tests.gpu import test_programs as programs
from tests.support.failing_run import LAUNCHERS, RUN_PY, Run
from tests.support.on_ranks import on
from tests.support.ranks import on_gpu
from tests.watch.test_stall import AFTER_S, Layers, store, until

REAL = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, *([] if REAL else [pytest.mark.slow])]
real = pytest.mark.skipif(not REAL, reason="needs a GPU")

DEVICE = "cuda"
WIDTH, DEPTH = 256, 6
CAP_MB = 0.5  # two layers: three buckets
VIEWS = {"gradient_as_bucket_view": True}
LATER = {"overlap": False}
each_view = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
each_sgd = pytest.mark.parametrize("flat_sgd", [False, True], ids=["torch's sgd", "flat sgd"])


@pytest.fixture
def backend(request):
    if not REAL:
        request.getfixturevalue("built")
    return "nccl" if REAL else "nccl2"


@pytest.fixture(params=[1, 2])
def crew(ranks, backend, request):
    return ranks(backend, request.param)


@pytest.fixture
def pair(ranks, backend):
    return ranks(backend, 2)


def network(seed: int = 0, width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    # Multiples of 64 elements: in flat memory and outside cuBLAS has the same kernels and bits.
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def batch(rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, width, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(model: nn.Module, optimizer: Any, x: torch.Tensor, in_one_call: bool = False) -> None:
    optimizer.zero_grad()
    if in_one_call:
        optimizer.backward_and_step(loss_of(model, x))
    else:
        loss_of(model, x).backward()
        optimizer.step()


def bits(tensors: Any) -> bytes:
    return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)


def assert_alike(mine: Any) -> None:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone), "ranks have drifted apart"


# Our wrapper or a bare Reducer, its options, our optimizer's name if it is ours, and its one call.
BESIDE_TORCH = {
    "copies": (False, {}, None, False),
    "views": (False, VIEWS, None, False),
    "wrapper, copies": (True, {}, None, False),
    "wrapper, views": (True, VIEWS, None, False),
    "at the end, copies": (False, LATER, None, False),
    "at the end, views": (False, LATER | VIEWS, None, False),
    "SGD": (False, VIEWS, "SGD", False),
    "SGD in one call": (False, VIEWS, "SGD", True),
    "SGD, wrapper": (True, VIEWS, "SGD", False),
    "SGD in one call, wrapper": (True, VIEWS, "SGD", True),
    "AdamW": (False, VIEWS, "AdamW", False),
    "AdamW in one call": (False, VIEWS, "AdamW", True),
    "AdamW in one call, wrapper": (True, VIEWS, "AdamW", True),
}


@real
@pytest.mark.parametrize("name", BESIDE_TORCH)
@on("crew")
def test_as_torch_bit_for_bit(world, name):
    wrapped, options, kind, in_one_call = BESIDE_TORCH[name]
    views = options.get("gradient_as_bucket_view", False)
    theirs = TorchDDP(network(world.rank), device_ids=[0], gradient_as_bucket_view=views)
    ours = network(world.rank)  # both begin with rank 0's
    if wrapped:
        model = ddp.DistributedDataParallel(ours, [0], bucket_cap_mb=CAP_MB, **options)
        reducer = model.reducer
    else:
        ddp.broadcast_parameters(ours)
        model, reducer = ours, ddp.Reducer(ours, bucket_cap_mb=CAP_MB, **options)
    settings = {"lr": 0.01} if kind == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    settings["weight_decay"] = 0.01
    fused = partial(getattr(torch.optim, kind or "SGD"), fused=True)
    reference = fused(theirs.parameters(), **settings)
    make = fused if kind is None else partial(getattr(ddp, kind), reducer=reducer)
    optimizer = make(ours.parameters(), **settings)
    for step in range(5):
        x = batch(world.rank, step)
        train(theirs, reference, x)
        train(model, optimizer, x, in_one_call)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"gradient of {name} in step {step}"
            assert torch.equal(p, q), f"{name} after step {step}"
    assert len(reducer.buckets) == 3
    assert_alike(bits(ours.parameters()))


NEVER_WAIT = ["copies", "views", "no overlap", "static", "stall watch", "buffers", "fp16"]
NEVER_WAIT += ["sync batch norm", "flat SGD", "flat SGD in one call", "all used", "weights"]


@real
@pytest.mark.parametrize("name", NEVER_WAIT)
@on("crew")
def test_the_host_does_not_wait_within_a_step(world, name):
    """Weights are agreed on beside the GPU: the host waits for ranks, but not for kernels."""
    model, reducer, optimizer = programs.made(name.removesuffix(" in one call"), world.device)
    inputs = [programs.batch(world, number) for number in range(6)]

    def step(x: torch.Tensor) -> None:
        if name == "weights":
            reducer.weight(1 + world.rank)
        train(model, optimizer, x, "in one call" in name)

    for x in inputs[:3]:
        step(x)
    # What makes the host wait for the GPU raises (collectives themselves are not looked into).
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            inputs[0].sum().item()
        for x in inputs[3:]:
            step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@real
@on("crew")
def test_a_graph_is_captured_beside_a_stall_watch(world):
    """The watch's thread looks at events of the GPU while another graph is captured."""
    model = network()
    reducer = ddp.Reducer(model, stall_after=0.3)
    for step in range(3):
        loss_of(model, batch(world.rank, step)).backward()
    x = torch.ones(4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        time.sleep(1.0)  # the watch wakes ten times
    graph.replay()
    assert y.tolist() == [2.0] * 4
    loss_of(model, batch(world.rank, 3)).backward()
    reducer.remove()


@real
@each_view
@on("crew")
def test_a_step_is_captured_in_a_graph(world, views):
    """As torch's DDP asks: the Reducer and eleven steps on the stream of the capture."""
    model, x = network(), batch(world.rank, 0)
    alone = copy.deepcopy(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        reducer = ddp.Reducer(model, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=views)
        optimizer, reference = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
        for _ in range(11):
            train(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss_of(model, x).backward()
        optimizer.step()
    for step in [*[0] * 11, 1, 2, 3]:
        reference.zero_grad()
        loss_of(alone, batch(world.rank, step)).backward()
        for p in alone.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world.world_size
        reference.step()
        if step:
            x.copy_(batch(world.rank, step))
            graph.replay()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()])
    assert_alike(bits(model.parameters()))
    reducer.remove()
    graph.reset()  # NCCL's communicator does not end before the graphs that use it


def profiled_backward(model: nn.Module, inputs: list[torch.Tensor]) -> Any:
    """The last of several backward passes, the layout having settled before."""
    for x in inputs[:-1]:
        model.zero_grad()
        loss_of(model, x).backward()
    model.zero_grad()
    loss = loss_of(model, inputs[-1])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loss.backward()
        torch.cuda.synchronize()
    return profiler


@real
@each_view
@on("crew")
def test_one_copy_for_each_bucket(world, views):
    model = network()
    reducer = ddp.Reducer(model, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=views)
    profiler = profiled_backward(model, [batch(world.rank, step) for step in range(4)])
    called = Counter(event.name for event in profiler.events())
    assert len(reducer.buckets) == 3
    assert called["aten::_foreach_copy_"] == (3 if views else 6)
    # Where torch cannot take one kernel for all it copies one by one, which is seen here.
    assert called["aten::copy_"] < len(list(model.parameters()))


@real
@pytest.mark.parametrize("overlap", [True, False])
@on("pair")
def test_buckets_are_sent_during_backward(world, tmp_path, overlap):
    """Backward still computes while a bucket that is not the last is in flight."""
    model = network(width=1024, depth=8)
    ddp.Reducer(model, bucket_cap_mb=4.0, overlap=overlap, **VIEWS)
    profiler = profiled_backward(model, [torch.randn(2048, 1024, device=DEVICE)] * 4)
    file = tmp_path / f"{world.rank}.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    sent = [k for k in found if "nccl" in k["name"].lower()]
    # One for each layer; others pack, which is not part of the computation.
    computed = [k for k in found if "tanh_backward" in k["name"]]
    assert len(sent) >= 8, [k["name"] for k in found]
    assert len(computed) == 8, [k["name"] for k in found]
    # NCCL's kernel begins when this rank has packed, and ends when the other has, too.
    *earlier, _ = sorted(sent, key=lambda k: k["ts"])
    beside = [k for k in computed for s in earlier if s["ts"] < k["ts"] < s["ts"] + s["dur"]]
    assert bool(beside) == overlap


class Halves(nn.Module):
    """The model-parallel example of torch's tutorials, one half on the CPU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).to(DEVICE)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).to(DEVICE))


@real
@pytest.mark.parametrize("wrapper", [False, True], ids=["reducer", "wrapper"])
@each_sgd
@on("pair")
def test_a_model_on_cpu_and_gpu(world, wrapper, flat_sgd):
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    model = ours = Halves()
    ddp.broadcast_parameters(ours, 0, group)
    whole = copy.deepcopy(ours)
    if wrapper:
        model = ddp.DistributedDataParallel(ours, process_group=group, **VIEWS)
        reducer = model.reducer
    else:
        reducer = ddp.Reducer(ours, group, gradient_as_bucket_view=flat_sgd)
    assert len(reducer.buckets) == 2
    kind = partial(ddp.SGD, reducer=reducer) if flat_sgd else torch.optim.SGD
    optimizer, reference = kind(ours.parameters(), 0.1), torch.optim.SGD(whole.parameters(), 0.1)
    for step in range(4):
        train(model, optimizer, batch(world.rank, step, 64).cpu())
        reference.zero_grad()
        everyone = [loss_of(whole, batch(r, step, 64).cpu()) for r in range(world.world_size)]
        (sum(everyone) / len(everyone)).backward()
        reference.step()
        for (name, p), q in zip(ours.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, msg=f"{name} after step {step}")
    ddp.check_sync(ours, group)
    dist.destroy_process_group(group)
    assert_alike(bits(ours.parameters()))


@each_sgd
@on("crew")
def test_an_overflow_on_one_rank_is_skipped_on_all(world, flat_sgd):
    model = network(width=64, depth=2)
    reducer = ddp.Reducer(model, **VIEWS)
    kind = partial(ddp.SGD, reducer=reducer) if flat_sgd else torch.optim.SGD
    optimizer = kind(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    told = []
    for step in range(3):
        before = bits(model.parameters())
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            y = model(batch(world.rank, step, 64))
        loss = y.float().square().mean()
        if step == 1 and world.rank == world.world_size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append((bits(model.parameters()) != before, scaler.get_scale()))
    assert told == [(True, 1024.0), (False, 512.0), (True, 512.0)]
    assert_alike(bits(model.parameters()))


@each_view
@on("crew")
def test_every_dtype_is_averaged_exactly(world, views):
    """Rank r contributes r + 1: their average is exact in 16 bits, too."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        model = nn.Linear(64, 64, bias=False, device=DEVICE, dtype=dtype)
        ddp.Reducer(model, gradient_as_bucket_view=views)
        for _ in range(3):
            model.zero_grad()
            (model.weight * (world.rank + 1)).sum().real.backward()
            assert torch.all(model.weight.grad == (world.world_size + 1) / 2), dtype


@real
@on("pair")
def test_a_rank_that_lags_is_reported(world):
    """As in test_stall.py, but backward() returns at once, and the GPU waits."""
    model = Layers().to(DEVICE)
    dist.barrier()  # watches that begin together have told each other before one reports
    reducer = ddp.Reducer(model, bucket_cap_mb=0, stall_after=3 * AFTER_S)
    model().backward()
    torch.cuda.synchronize()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        if world.rank == 1:
            until(lambda: store().check(["report 1"]))
        model().backward()
        torch.cuda.synchronize()
    assert model.a.grad.tolist() == [4, 4]
    reducer.remove()
    text = told.getvalue()
    assert (text == "") == (world.rank == 1)
    if text:
        assert re.match(r"step 1, rank 0: has waited \d+ s for bucket 0\n", text)
        assert "\n  rank 0: all gradients of step 1 have arrived, and since then 0 of 3" in text
        assert "\n  rank 1: 0 of 3 gradients have arrived, bucket 0 waits for c\n" in text


@on("crew")
def test_a_timeline_has_the_times_of_the_gpu(world):
    """The GPU's moments are in the order of its stream."""
    model = network()
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model, bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timeline = Timeline(reducer, None, steps=2, skip=2)
    for step in range(6):
        train(model, optimizer, batch(world.rank, step))
    timeline.close()
    assert [step.iteration for step in timeline.record.steps] == [2, 3]
    for step in timeline.record.steps:
        for rank in step.ranks:
            (forward,), (backward,) = rank.forward, rank.backward
            moments = [rank.begin, *forward, *backward, *rank.optimizer, rank.end]
            assert moments == sorted(moments)
            assert len(rank.buckets) == len(reducer.buckets)
            assert {name for name, _ in rank.arrived} == {n for n, _ in model.named_parameters()}
            for bucket in rank.buckets:
                assert bucket.pack[0] <= bucket.pack[1] <= bucket.sent[1] <= bucket.unpack[1]


def peak(kind: Any) -> int:
    """Bytes at the peak of a step, beyond those in use before the model is made."""
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    model = kind(network(width=1024, depth=24), device_ids=[0], **VIEWS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for step in range(5):
        if step == 3:  # the buckets are rebuilt, and momentum exists
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, batch(0, step, 1024))
    return torch.cuda.max_memory_allocated() - base


@real
@on("nccl-1")
def test_memory_with_views_is_that_of_torch(world):
    """A bucket's gradients are packed together, so they lie beside it until it is full."""
    peak(ddp.DistributedDataParallel)  # cuBLAS takes its workspaces
    ours, theirs = peak(ddp.DistributedDataParallel), peak(TorchDDP)
    assert theirs > 250e6  # parameters, gradients, momentum
    # Buckets are 25 MB and begin with 1 MB; one of them and the workspace lie beside.
    assert ours <= 1.2 * theirs


@real
def test_a_rank_that_never_comes():
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "2"}
    command = sys.executable, RUN_PY, "--backend", "nccl", "--timeout", "10"
    with Run(*command, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **meet) as run:
        assert run.wait(90) == 2
        assert "not all have started" in run.err
        assert "Traceback" not in run.err


@real
def test_two_ranks_on_one_gpu_are_refused():
    """As where a launcher has shown both the same one."""
    command = *LAUNCHERS["start_ranks"], RUN_PY, "--backend", "nccl"
    with Run(*command, CUDA_VISIBLE_DEVICES="0") as run:
        assert run.wait(90) == 2
        assert "ranks 0 and 1 have the same GPU" in run.err


@real
@pytest.mark.parametrize(
    "options",
    [
        ["--check-sync", "1", "--stall-after", "20"],
        ["--model", "mlp", "--compress", "powersgd", "--bucket-cap-mb", "4"],
        ["--precision", "fp16", "--virtual-ranks", "4", "--stragglers", "5"],
    ],
    ids=lambda options: " ".join(options),
)
def test_run_py_trains(options, tmp_path):
    options = [*options, "--epochs", "1", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    with Run(sys.executable, RUN_PY, "--backend", "nccl", *options) as run:
        assert run.wait(90) == 0, run.text
        trained = run.out
        assert "digits test accuracy" in trained
        assert "Warning" not in run.err
    file = str(tmp_path / "checkpoints" / "checkpoint-000001.pt")
    with Run(sys.executable, RUN_PY, "test", "--backend", "nccl", "--checkpoint", file) as again:
        assert again.wait(60) == 0, again.text
        assert again.out.splitlines()[-1] in trained


@real
def test_ctrl_c_ends_a_run():
    with Run(sys.executable, RUN_PY, "--backend", "nccl", "--epochs", "10000") as run:
        run.wait_for("epoch")
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.text
        assert "stopped in epoch" in run.text
        run.assert_nobody_left()


@real
def test_a_step_is_timed_beside_torchs():
    module = "ddp_from_scratch.bench"
    with Run(sys.executable, "-m", module, "--nproc", "1", "--rounds", "2") as run:
        assert run.wait(90) == 0, run.text
        assert "ddp.SGD on nccl" in run.out


DYING = """
import os, signal, torch, ddp_from_scratch as ddp

with ddp.process_group("nccl", timeout=15) as world:
    model = torch.nn.Linear(4, 4).to(world.device)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    for step in range(100):
        if step == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4, device=world.device)).sum().backward()
        torch.cuda.synchronize()
"""


@real
def test_a_rank_that_is_killed_ends_the_other(tmp_path):
    """After the timeout at the latest, by an error or by torch's watchdog, which aborts."""
    meet = {"DDP_RENDEZVOUS_FILE": str(tmp_path / "meet"), "WORLD_SIZE": "2"}
    environ = [on_gpu(rank) | meet | {"RANK": str(rank)} for rank in range(2)]
    command = sys.executable, "-c", DYING
    with Run(*command, **environ[0]) as first, Run(*command, **environ[1]) as second:
        assert second.wait(120) == 128 + signal.SIGKILL
        assert first.wait(120) != 0, first.text
