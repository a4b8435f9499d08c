"""benchmarks/two_hosts.py, scaling.py, network.py: what they refuse, that they run, and where."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as run_set
from benchmarks import allreduce, scaling, two_hosts
from benchmarks.harness import deepspeed, network
from benchmarks.harness.costs import Shape
from benchmarks.harness.report import RESULTS, pyplot
from benchmarks.harness.wire_contenders import BF16, POWER_SGD, REDUCER, SGD, TORCH
from benchmarks.harness.wire_meter import Meter, Result, check_crossed, limit_ms, with_computing
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench import launch
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from tests.support.failing_run import Run
from tests.support.ranks import MPIRUN, ROOT, Crew


def result(sent, milliseconds=100.0, must_cross=1000):
    return Result("ours", [milliseconds], must_cross, [[sent], [1100]], None)


def test_what_crossed_the_wire_counts():
    check_crossed([result(1050)], gbit=1.0)


def test_what_went_round_the_wire_is_refused():
    with pytest.raises(RuntimeError, match=r"ours sent 900 bytes from host 0 .* went round"):
        check_crossed([result(900)], gbit=1.0)


def test_what_was_too_fast_for_the_wire_is_refused():
    # 100 ms of 1 Gbit/s are 12.5 MB.
    check_crossed([result(12_500_000)], gbit=1.0)
    with pytest.raises(RuntimeError, match=r"more than 1 Gbit/s"):
        check_crossed([result(15_000_000)], gbit=1.0)


def test_meter_attributes_bytes_to_the_step_that_sent_them(monkeypatch):
    counter = [0]
    monkeypatch.setattr(network, "crossed_bytes", lambda: (counter[0], 0))

    def sends(name, nbytes):
        def step():
            counter[0] += nbytes

        return Contender(name, None, step)

    meter = Meter()
    counter[0] += 7  # before the first step
    for step in [meter.before(sends("a", 10)), meter.before(sends("b", 20))] * 2:
        step()
    meter.read()
    assert {name: sent for name, sent in meter.sent.items() if name} == {
        "a": [10, 10],
        "b": [20, 20],
    }


def test_the_wires_limit():
    assert limit_ms(125e6, 1.0) == pytest.approx(1000)
    assert limit_ms(125e6, 0.1) == pytest.approx(10000)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (two_hosts, ["--ranks", "3"]),
        (two_hosts, ["--gbit", "0"]),
        (two_hosts, ["--rounds", "1"]),
        (two_hosts, ["--quick", "--full"]),
        (scaling, ["--nproc", "0"]),
        (scaling, ["--rounds", "1"]),
    ],
)
def test_mistakes_in_arguments(module, arguments):
    with pytest.raises(UsageError, match="--"):
        module.parse(arguments)


def test_without_its_tools_it_says_so_and_ends_with_2(tmp_path):
    with Run(sys.executable, "-m", "benchmarks.two_hosts", PATH=str(tmp_path)) as run:
        assert run.wait() == 2
        assert run.err.startswith("error: two hosts on one machine: "), run.text
        assert run.err.count("\n") == 1, run.text


def test_shapes_are_measured_once_and_share_one_batch():
    for ranks in (1, 2, 4, 8):
        found = scaling.shapes(ranks)
        assert len(set(found)) == len(found)
        assert Shape(16, 512, 64 // ranks) in found


def a_case(world):
    shape = Shape(2, 32, 4)
    case = scaling.measure_steps(shape, 2, world.device)
    assert [len(case[kind]) for kind in scaling.KINDS] == [2, 2, 2]
    assert case["parameters"] == shape.parameters == 2 * 32 * 33
    assert sorted(case["memory"]) == sorted(scaling.KINDS)


def test_a_rank_measures_steps(ranks):
    ranks("gloo", 2)(a_case)


def test_memory_grows_with_the_model():
    # Ranks of its own: others may have freed memory that is used again.
    crew = Crew("gloo", 2)
    (small, large), _ = crew(memory_of_two)
    crew.end()
    # Parameters, gradients and momentum of 16.8 MB; and not ten times that. The allocator may give
    # one of the twelve tensors (4.2 MB) memory that the run before has left.
    assert 2.5 * 16.8e6 < large < 10 * 16.8e6
    assert small < large / 3


def memory_of_two(world):
    import torch

    grown = []
    for width in (64, 1024):
        batch = torch.randn(2, width), torch.randint(width, (2,))
        scaling.grown(Shape(4, width, 2), batch, "averaged")
        grown.append(scaling.grown(Shape(4, width, 2), batch, "averaged"))
    return grown


# In the set -----------------------------------------------------------------------------------


def a_two_hosts_rank(options):
    (backend,), (gbit,) = options.backend, options.gbit
    for ranks in options.ranks:
        milliseconds = {NO_COMMUNICATION: 50.0, TORCH: 200.0, REDUCER: 100.0, BF16: 20.0}
        samples = [
            asdict(Result(name, [milliseconds.get(name, 160.0)] * 3, crosses, [[9]] * 2, 80.0))
            for name in (NO_COMMUNICATION, TORCH, REDUCER, SGD, BF16, POWER_SGD)
            for crosses in [0 if name == NO_COMMUNICATION else 8]
        ]
        settings = {"benchmark": "two_hosts", "model": options.model, "backend": backend}
        settings |= {"nproc": ranks, "gbit": gbit}
        name = two_hosts.file_name(options.model, backend, ranks, gbit)
        keep(options.results, name, {"settings": settings, "samples": samples})


def a_scaling_rank(options):
    (backend,), (ranks,) = options.backend, options.nproc
    cases = [
        {"layers": s.layers, "width": s.width, "batch": s.batch}
        | {kind: [1e-6 * s.parameters] * 2 for kind in scaling.KINDS}
        | {"memory": dict.fromkeys(scaling.KINDS, s.parameters)}
        for s in scaling.shapes(ranks)
    ]
    samples = {
        "ranks": ranks,
        "cores": 2,
        "all_reduce": {n: [1e-4 + 1e-9 * n] for n in scaling.SIZES},
        "add": {n: [1e-10 * n] for n in scaling.SIZES},
        "cases": cases,
    }
    keep(options.results, scaling.file_name(backend, ranks), {"samples": samples})


def keep(folder, name, content):
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_the_set_has_the_ranks_write_where_it_reads(tmp_path, monkeypatch, capsys):
    programs = {
        "benchmarks.two_hosts": (two_hosts, a_two_hosts_rank),
        "benchmarks.scaling": (scaling, a_scaling_rank),
    }

    def benchmark(command):
        monkeypatch.setattr(sys, "argv", command[2:])
        return programs[command[2]][0].main()

    def rank(command):
        module, of_rank = programs[command[2]]
        of_rank(module.parse(command[3:]))
        return 0

    monkeypatch.setattr(shutil, "which", lambda tool, **_: f"/bin/{tool}")
    monkeypatch.setattr(network, "missing", lambda *_: None)
    monkeypatch.setattr(network, "two_hosts", lambda gbit: nullcontext([]))
    monkeypatch.setattr(network, "run_ranks", lambda hosts, each, backend, c: rank(c))
    monkeypatch.setattr(launch, "start_ranks", lambda command, counts: rank(command))
    monkeypatch.setattr(launch, "start_mpirun", lambda nproc, command: rank(command))
    monkeypatch.setattr(run_set, "run", benchmark)
    monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
    set_of_two = ["two_hosts", "scaling", "--full", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *set_of_two])
    before = set(RESULTS.iterdir())
    assert run_set.main() == 0
    assert set(RESULTS.iterdir()) == before
    names = {path.name for path in tmp_path.glob("*.json")}
    both = ("gloo", "mpi")
    assert names == {"cost_model.json"} | {
        f"scaling-{backend}-{n}.json" for backend in both for n in (1, 2, 4, 8)
    } | {
        f"two_hosts-resnet18-{backend}-{n}-{gbit}gbit.json"
        for backend in both
        for n in (2, 4)
        for gbit in ("0.1", "1", "10")
    }
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    if pyplot is not None:
        assert {"cost_model", "scaling-gloo", "two_hosts-resnet18-mpi-4"} < pictures
    lines = capsys.readouterr().out.splitlines()
    told = [line.split()[-11:] for line in lines if "Gbit/s, gloo, 2 ranks: " in line]
    # No communication, torch's DDP and its multiple of the bound; both ratios of each of ours.
    row = ["50.0", "200.0", "2.50", "0.50", "1.25", "0.80", "2.00", "0.10", "0.25", "0.80", "2.00"]
    assert told == [row] * 3


def test_hosts_are_left_out_where_they_cannot_be(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool, **_: f"/bin/{tool}")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert run_set.needs_two_hosts() == "network namespaces need root"


# As root ------------------------------------------------------------------------------------


@pytest.fixture
def root():
    why = network.missing("tc")
    if why is not None:
        pytest.skip(why)


def namespaces(pid):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ddp-{pid}-")]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("root")
def test_ctrl_c_leaves_no_host_behind():
    command = [sys.executable, "-m", "benchmarks.two_hosts", "--gbit", "0.01", "--quick"]
    with Run(*command) as run:
        pid = run.process.pid
        end = time.monotonic() + 60
        children, before = [], None
        while not children or children != before:  # the ranks, and no `ip` in passing
            assert run.process.poll() is None, run.text
            assert time.monotonic() < end, run.text
            time.sleep(0.2)
            children, before = ranks_of(pid), children
        os.kill(pid, signal.SIGINT)
        assert run.wait() == 130, run.text
    assert namespaces(pid) == []
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def ranks_of(pid):
    """Processes on the first host of the benchmark with that pid."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"ddp-{pid}-0"], capture_output=True, text=True
    ).stdout
    return [int(line) for line in listed.split()]


@pytest.mark.root
@pytest.mark.usefixtures("root")
def test_hosts_of_a_killed_maker_are_removed():
    ended = subprocess.Popen(["true"])
    ended.wait()
    forgotten = ended.pid
    subprocess.run(["ip", "netns", "add", f"ddp-{forgotten}-0"], check=True)
    with network.two_hosts(1.0) as hosts:
        assert namespaces(forgotten) == []
        assert len(namespaces(os.getpid())) == 2
        shaped = hosts[0].command("tc", "qdisc", "show", "dev", network.INTERFACE)
        told = subprocess.run(shaped, capture_output=True, text=True, check=True).stdout
        assert "tbf" in told
        assert "rate 1Gbit" in told
    assert namespaces(os.getpid()) == []


CROSSING = """
import os, torch, torch.distributed as dist
from ddp_from_scratch import process_group
with process_group(os.environ["CROSSING"]) as world:
    tensor = torch.ones(4_000_000)
    dist.all_reduce(tensor)
    assert tensor.eq(4).all()
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(("backend", "times"), [("gloo", 1.5), ("mpi", 1.0)])
def test_what_a_flat_ring_and_a_hierarchy_send(backend, times, monkeypatch):
    monkeypatch.setenv("CROSSING", backend)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Counted around the whole job: what a rank has sent may still wait in its socket, and the
    # wire has no speed limit, which would drop packets to be sent again.
    with network.two_hosts() as hosts, network.stoppable():
        assert network.run_ranks(hosts, 2, backend, [sys.executable, "-c", CROSSING]) == 0
        sent = [host.sent_bytes() for host in hosts]
    for bytes_of_host in sent:
        assert times * 16e6 <= bytes_of_host <= 1.1 * times * 16e6


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("root")
def test_a_rank_that_fails_ends_all():
    program = (
        "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 60); sys.exit(3)"
    )
    began = time.monotonic()
    with network.two_hosts() as hosts:
        assert network.run_ranks(hosts, 1, "gloo", [sys.executable, "-c", program]) == 3
    assert time.monotonic() - began < 30


def test_result_file_is_what_the_picture_reads(tmp_path):
    alone = asdict(Result(NO_COMMUNICATION, [1.0, 1.0], 0, [[9]], 1.0))
    theirs, ours = (asdict(Result(n, [1.0, 3.0], 8, [[9]], 1.5)) for n in (TORCH, REDUCER))
    by_speed = {gbit: [alone, theirs, ours] for gbit in (0.1, 1.0)}
    two_hosts.draw("mlp", "gloo", 2, by_speed, tmp_path)
    if pyplot is not None:
        assert (tmp_path / "two_hosts-mlp-gloo-2.png").stat().st_size > 0


def test_no_bound_is_below_the_step_without_communication():
    alone = Result(NO_COMMUNICATION, [40.0, 50.0, 90.0], 0, [[9]], 20.0)
    slow, fast = Result(SGD, [80.0], 8, [[9]], 70.0), Result(REDUCER, [80.0], 8, [[9]], 30.0)
    unknown = Result(BF16, [80.0], None, [[9]], None)
    bounds = [r.bound for r in with_computing([alone, slow, fast, unknown])]
    assert bounds == [50.0, 70.0, 50.0, None]


def test_deepspeed_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert deepspeed.missing(2) == "deepspeed is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**27))
    assert deepspeed.missing(2) == "/dev/shm is too small for it"

    def fail():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(deepspeed, "_load", fail)
    assert deepspeed.missing(1) == "it cannot be built: no compiler"
    monkeypatch.setattr(deepspeed, "_load", lambda: None)
    assert deepspeed.missing(1) is None


def test_deepspeed_sums_some_dtypes():
    rival = SimpleNamespace(has=lambda dtype: dtype == torch.float32, all_reduce=torch.neg_)
    assert allreduce.contender_of(rival, 64, torch.float64) == {}
    contender = allreduce.contender_of(rival, 64, torch.float32)[deepspeed.NAME]
    assert contender.call().numel() == 16


@pytest.mark.slow
def test_deepspeed_sums_beside_the_others(tmp_path):
    if reason := deepspeed.missing(2):
        pytest.skip(reason)
    command = ["-m", "benchmarks.allreduce", "--quick", "--bytes", "4096"]
    done = subprocess.run(
        [sys.executable, *command, "--results", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "allreduce-mpi-float32-2.json").read_text())
    assert deepspeed.NAME in content["samples"]["4096"]


def test_a_group_of_one_rank_has_no_bus(tmp_path, monkeypatch, capsys):
    drawn = {}
    monkeypatch.setattr(allreduce, "draw_lines", lambda *_, **named: drawn.update(_[3]))
    seconds = {"mpi": [1e-3], allreduce.ALONE: [1e-3], allreduce.COPY: [1e-3]}
    allreduce.report("mpi", "float32", 4, {10**6: seconds}, tmp_path)
    assert drawn == {"mpi": [(10**6, 1.5)], allreduce.COPY: [(10**6, 1.0)]}
    assert capsys.readouterr().out.splitlines()[-2].split()[1:] == [
        *("1,000", "us", "1.50"),
        *("1,000", "us"),
        *("1,000", "us", "1.00"),
    ]
