"""The in-library benchmark: ratios, verdicts, and models of a file."""

import re
from unittest.mock import Mock

import torch

from ddp_from_scratch.bench import contenders, layouts, names, timing
from ddp_from_scratch.bench import run as program
from ddp_from_scratch.bench.__main__ import parse
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.results import Run, Samples, verdict
from ddp_from_scratch.bench.workloads import WORKLOADS, Workload, workload
from tests.support.refusal import refusal

VIEWS = "torch DDP on gloo, views"


def test_a_ratio_is_taken_pair_by_pair():
    other = Samples("b", [1.0, 10.0, 100.0])  # a machine that gets slower
    assert Samples("a", [2.0, 20.0, 200.0]).ratio_to(other) == (2.0, 2.0, 2.0)
    # Runs that share no rounds are compared by their medians.
    one, other = Samples("a", [3.0, 1.0, 2.0]), Samples("b", [4.0, 4.0])
    assert Run([one, other], paired=False).ratio(one, other) == (0.5, 0.25, 0.75)


def run(**settings):
    times = {
        NO_COMMUNICATION: 10.0,
        "torch DDP on gloo, default": 40.0,
        VIEWS: 20.0,
        "torch DDP on node, views": 1.0,  # of this library's backend: no reference
        "ddp.SGD on gloo": 15.0,
        "Reducer on mpi, views": 16.0,
        "ddp.SGD on mpi": 10.0,
    } | settings.pop("times", {})
    return Run([Samples(name, [time] * 3) for name, time in times.items()], **settings)


def test_verdicts():
    for time, text in (
        (8.0, "2.50 times as fast as torch's DDP (2.50 to 2.50); that is 0.80 x a step without"),
        (15.0, "1.33 times as fast as torch's DDP (1.33 to 1.33); that is 1.50 x a step without"),
        (20.0, "no difference is shown between ddp.SGD on gloo and torch's DDP (1.00)"),
        (25.0, "torch's DDP is 1.25 times as fast as ddp.SGD on gloo (1.25 to 1.25)"),
    ):
        of_gloo, of_mpi = verdict(run(times={"ddp.SGD on gloo": time})).splitlines()
        assert text in of_gloo
        assert "ddp.SGD on mpi is 2.00 times as fast" in of_mpi
    assert verdict(run(disturbed="someone ran")).startswith("no verdict: ")
    assert verdict(Run([Samples(NO_COMMUNICATION, [1.0])])) == ""  # nothing to compare


OWN = """
import torch
import neighbour

def make():
    model, batch = torch.nn.Linear(256, 1024), (torch.randn(2, 256), torch.tensor([0, 9]))
    return model, batch, lambda model, batch: neighbour.FACTOR * model(batch[0]).sum()

def wrong():
    return torch.nn.Linear(1, 1)

def two_inputs():
    return torch.nn.Bilinear(2, 2, 3), (torch.ones(4, 2), torch.ones(4, 2), torch.ones(4))
"""


def test_a_model_of_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # undone at the end, with what the import adds
    (tmp_path / "neighbour.py").write_text("FACTOR = 3")
    own = tmp_path / "my_file.py"
    own.write_text(OWN)
    found = workload(f"{own}:make")
    assert found.name == "my_file.py:make, 1 MB"
    assert found.loss(lambda x: torch.ones(2), [None]) == 6
    for name, error in (
        ("nope", "there is no model 'nope': --model takes mlp, "),
        (f"{own}:other", "cannot take other from .*my_file.py: it has no such name"),
        (f"{own}:wrong", "must return a module and a batch, optionally a loss, got Linear"),
    ):
        assert re.search(error, refusal(workload, name))
    found = workload(f"{own}:two_inputs")
    told = refusal(found.check)
    assert re.search(
        "two_inputs returns no loss, .* raises ValueError: too many values .*: return", told
    )


def test_layouts_use_all_cores():
    assert layouts.layouts_of(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert layouts.layouts_of(1) == [(1, 1)]


def test_batches_are_joined_along_their_first_dimension():
    batch = {"x": torch.arange(6.0).view(2, 3), "scale": torch.tensor(2.0), "kind": "a"}
    of = Workload("two", lambda: torch.nn.Linear(3, 1), lambda: batch)
    joined = of.joined(3).batch()
    assert torch.equal(joined["x"], torch.cat([batch["x"]] * 3))
    assert (joined["scale"], joined["kind"]) == (2.0, "a")
    assert (of.samples(), of.joined(3).samples()) == (2, 6)


def test_the_fastest_layout_is_named_with_the_line_that_starts_it():
    samples = [Samples(VIEWS, [50.0]), Samples("Reducer on gloo, views", [40.0])]
    samples += [Samples("ddp.SGD on gloo", [20.0]), Samples(NO_COMMUNICATION, [1.0])]
    two = layouts.layout(2, 8, 100, samples)  # 100 samples in 50 and in 20 ms
    assert two == layouts.Layout(2, 8, 2000.0, 5000.0, "ddp.SGD on gloo")
    one = layouts.Layout(1, 16, 2500.0, 2400.0, "Reducer on gloo, views")
    fastest, start = layouts.verdict([one, two]).splitlines()
    assert fastest == "fastest: 2 x 8, ddp.SGD on gloo; torch's DDP: 1 x 16"
    assert start.startswith("start it: OMP_NUM_THREADS=8 torchrun --nproc-per-node 2 train.py, or ")
    assert layouts.command_for(one) == "OMP_NUM_THREADS=16 python train.py"
    over_mpi = layouts.Layout(4, 4, 1.0, 2.0, "Reducer on mpi, views")
    assert layouts.command_for(over_mpi) == "mpirun -n 4 --map-by socket:PE=4 python train.py"
    over_mpi = layouts.Layout(3, 4, 1.0, 2.0, "Reducer on mpi, views")  # one in both sockets
    bound = "--bind-to none -x OMP_NUM_THREADS=4"
    assert layouts.command_for(over_mpi, 2) == f"mpirun -n 3 {bound} python train.py"


def test_a_layout_is_shown_before_the_next_one_is_measured(monkeypatch):
    """A run that is cut off keeps what it has measured."""
    monkeypatch.setattr(layouts, "own_cpus", lambda: {0, 1})
    monkeypatch.setattr(layouts, "read", lambda cpus: Mock(most_threads=2, cores=[]))
    ran = []

    def run(job):
        ran.append((job.nproc, job.threads))
        names = VIEWS, "Reducer on gloo, views", NO_COMMUNICATION
        return {"samples": [{"name": n, "milliseconds": [50.0 * len(ran)]} for n in names]}

    lines = layouts.compare(timing.BenchmarkJob("mlp", ["gloo"], 1), run, None)
    first = next(line for line in lines if line.startswith("1 x 2"))
    assert ran == [(1, 2)]
    assert first.split() == ["1", "x", "2", "640", "640", "Reducer", "on", "gloo,", "views"]
    second, said = lines
    assert (ran[1:], second.split()[:4]) == ([(2, 1)], ["2", "x", "1", "320"])
    assert said.startswith("fastest: 1 x 2")


def test_no_layout_is_the_fastest_on_a_busy_machine():
    one = layouts.Layout(1, 2, 2500.0, 2400.0, "ddp.SGD")
    last = layouts.verdict([one], "a step takes 2 x its CPU time")
    assert last == "no verdict: the machine was not quiet (a step takes 2 x its CPU time)"


def test_what_layouts_choose_cannot_be_given():
    for options, text in (
        ("--layouts --nproc 2", "--layouts chooses --nproc: leave it out"),
        ("--layouts --threads 2", "--layouts chooses --threads: leave it out"),
        ("--layouts --backend nccl", "--layouts is for gloo and mpi, in one --way"),
        ("--threads 0", "--threads must be 1 or more, got 0"),
    ):
        assert refusal(parse, options.split(), "bench") == text
    chosen = ["--layouts", "--contender", "torch DDP, views"]
    assert "this library: add one of its contenders, as 'ddp.SGD'" in refusal(parse, chosen, "b")
    assert parse(["--threads", "3"], "bench").threads == 3


NEWER = {
    "torch DDP, batched copies",
    "torch DDP, tapering buckets",
}  # need options of torch's class


def test_the_command_line_offers_what_there_is():
    assert tuple(WORKLOADS) == names.MODELS
    assert tuple(contenders.OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(timing.WAYS) == names.WAYS
    there = [spec.name for spec in contenders.CONTENDERS if spec.name != NO_COMMUNICATION]
    assert there == [name for name in names.CONTENDERS if name in there]
    assert set(names.CONTENDERS) - set(there) <= NEWER


def test_a_contender_that_this_torch_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(program, "CONTENDERS", contenders.CONTENDERS[:3])
    chosen = parse(["--contender", "torch DDP, tapering buckets"], "bench")
    told = refusal(program.run, chosen)
    assert re.fullmatch(
        r"--contender 'torch DDP, tapering buckets' needs a newer torch than \S+", told
    )
