"""The in-library benchmark: rows, ratios, verdicts, and what it refuses."""

import os

import pytest
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.bench import contenders as c
from ddp_from_scratch.bench import launch, main, ways
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.job import Job
from ddp_from_scratch.bench.quiet import busy_seconds, disturbance, parse_busy
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.bench.verdict import Run, is_reference, kind, table, verdict, ways_table
from ddp_from_scratch.bench.workloads import WORKLOADS, workload

RUNGS = [spec.name for spec in c.CONTENDERS]
VIEWS = "torch DDP on gloo, views"


def test_a_ratio_is_taken_pair_by_pair():
    other = Samples("b", [1.0, 10.0, 100.0])  # a machine that gets slower
    assert Samples("a", [2.0, 20.0, 200.0]).ratio_to(other) == (2.0, 2.0, 2.0)
    assert Samples("a", [1.0, 20.0, 300.0]).ratio_to(other) == (2.0, 1.0, 3.0)
    assert Samples("a", [2.0, 11.0, 101.0]).minus(other) == (1.0, 1.0, 1.0)
    # Runs that share no rounds are compared by their medians.
    one, other = Samples("a", [3.0, 1.0, 2.0]), Samples("b", [4.0, 4.0])
    assert one.unpaired_ratio_to(other) == (0.5, 0.25, 0.75)
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


def test_the_table_compares_with_the_fastest_of_torchs_settings():
    kinds = {NO_COMMUNICATION: "reference", VIEWS: "torch", "NodeSharedSGD on gloo": "ours"}
    assert {name: kind(name) for name in kinds} == kinds
    names = (VIEWS, "torch DDP on mpi, views", "torch DDP on node, views", "Reducer on gloo")
    assert [*map(is_reference, names)] == [True, False, False, False]
    for paired in (True, False):
        lines = table(run(paired=paired)).splitlines()
        row = next(line for line in lines if line.startswith("ddp.SGD on gloo"))
        assert "0.75 (0.75 to 0.75)" in row
        assert row.endswith("1.50 (1.50 to 1.50)")
    alone = Run(run(times={"ddp.SGD on mpi": 5.0}).samples, paired=False)
    last = ways_table({"interleaved": run(), "alone": alone}).splitlines()[-1]
    assert last.split()[-4:] == ["0.50", "1.00", "0.25", "0.50"]


def test_verdicts():
    for time, text in (
        (8.0, "2.50 times as fast as torch's DDP (2.50 to 2.50); that is 0.80 x a step without"),
        (15.0, "1.33 times as fast as torch's DDP (1.33 to 1.33); of its 15.0 ms 10.0 are compute"),
        (20.0, "no difference is shown between ddp.SGD on gloo and torch's DDP (1.00)"),
        (25.0, "torch's DDP is 1.25 times as fast as ddp.SGD on gloo (1.25 to 1.25)"),
    ):
        of_gloo, of_mpi = verdict(run(times={"ddp.SGD on gloo": time})).splitlines()
        assert text in of_gloo
        assert "ddp.SGD on mpi is 2.00 times as fast" in of_mpi
    assert verdict(run(disturbed="someone ran")).startswith("no verdict: ")
    assert verdict(Run([Samples(NO_COMMUNICATION, [1.0])])) == ""  # nothing to compare


# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 1 2 4 500 500 500 500 8 500 500
cpu12 100 200 400 500 500 500 500 800 500 500
intr 1 2 3
"""


def test_ticks_of_the_processors_that_may_be_used():
    assert [parse_busy(STAT, processors) for processors in ({0}, {0, 12})] == [15, 1515]
    with pytest.raises(ValueError, match="invalid literal"):
        parse_busy("cpu0 one two three", {0})
    if os.path.exists("/proc/stat"):
        assert busy_seconds(os.sched_getaffinity(0)) > 0


def test_disturbance():
    for alone, others, ranks, expected in (
        ((12.9, 10.0), 0.5, 2, None),  # its ranks had their cores
        ((13.1, 10.0), 0.0, 2, "a step without communication takes 1.31 x its CPU time"),
        ((29.0, 10.0), 0.1, 4, None),  # they take turns
        ((25.0, 10.0), 0.2, 4, "other processes took 20 % of the processors' time"),
        ((25.0, 10.0), None, 4, None),
        (None, 0.05, 2, None),
        (None, 0.2, 2, "other processes took 20 %"),
    ):
        steps = alone and Samples("no communication", [alone[0]] * 3, [alone[1]] * 3)
        found = disturbance(steps, others, ranks, cores=2)
        assert found is None if expected is None else expected in found


def test_rows_are_named_after_contender_and_backend():
    def names(*arguments):
        return [spec.name for spec in c.rows(*arguments)]

    found = names(["gloo", "mpi"], "sgd", ["ddp.SGD, one flat bucket", "torch DDP, views"])
    references = [name.replace("DDP", "DDP on gloo") for name in c.REFERENCES]
    assert set(references[:2]) <= set(found)  # of every version of torch
    ours = {f"ddp.SGD on {backend}, one flat bucket" for backend in ("gloo", "mpi")}
    others = {f"torch DDP on {backend}, views" for backend in ("mpi", "node")}
    assert set(found) - set(references) == {NO_COMMUNICATION} | ours | others
    assert not any("per parameter" in name or "Zero" in name for name in names(["gloo"]))
    adamw = {"NodeSharedAdamW on gloo", "torch DDP on gloo, ZeroRedundancyOptimizer"}
    assert adamw <= set(names(["gloo"], "adamw", RUNGS))
    assert VIEWS in names(["mpi"], "sgd", [])
    assert names(["nccl"], "sgd", ["NodeSharedSGD"])[1] == "torch DDP on nccl, default"
    assert not any("gloo" in name or "NodeShared" in name for name in names(["nccl"]))


def test_options_out_of_their_range():
    for arguments, error in (
        ("--rounds 1", "--rounds must be 2 or more, got 1"),
        ("--nproc 2 0", "--nproc must be 1 or more, got 0"),
        ("--seconds nan", "--seconds must be more than 0, got nan"),
        ("--backend nccl mpi", "--backend nccl has a table of its own, got nccl mpi"),
        ("--model nope", "there is no model 'nope': --model takes mlp, "),
    ):
        with pytest.raises(UsageError, match=error):
            main.jobs(main.parse(arguments.split(), "program"))


def test_models_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "available_memory", lambda: 2**30 + 2**21)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launch.check_memory(WORKLOADS["mlp"], 2, 2)  # 1 GiB, and 1 MiB for the biases
    with pytest.raises(UsageError, match=r"12 copies of MLP.* on 2 ranks need about 6 GiB"):
        launch.check_memory(WORKLOADS["mlp"], 12, 2)


def test_alone_each_contender_has_its_own_backend(monkeypatch):
    started = []

    def run(job):
        started.append((job.only, job.backend, job.seconds))
        sample = {"name": job.only, "milliseconds": [1.0]}
        return {"samples": [sample], "left_out": {}, "disturbed": job.only.partition(" on ")[2]}

    monkeypatch.setattr(ways, "interleaved", run)
    merged = ways.alone(Job("mlp", ("gloo", "mpi"), 2, chosen=("ddp.SGD",), seconds=4.0))
    expected = {(NO_COMMUNICATION, "gloo", 2.0)}
    expected |= {(f"ddp.SGD on {backend}", backend, 2.0) for backend in ("gloo", "mpi")}
    assert expected <= set(started)
    assert [s["name"] for s in merged["samples"]] == [name for name, _, _ in started]
    assert merged["disturbed"] == "gloo, default"  # the first


@pytest.mark.slow
def test_models_have_a_row_of_logits_for_each_label():
    for name, built_in in WORKLOADS.items():
        with torch.device("meta"):
            model = built_in.model()
            inputs, labels = built_in.batch()
            assert model(inputs).shape[0] == labels.numel(), name
        assert f" {built_in.parameter_bytes / 2**20:.0f} MB" in built_in.name


OWN = """
import torch
import neighbour

def make():
    model, batch = torch.nn.Linear(256, 1024), (torch.randn(2, 256), torch.tensor([0, 9]))
    return model, batch, lambda model, batch: neighbour.FACTOR * model(batch[0]).sum()

def wrong():
    return torch.nn.Linear(1, 1)
"""


def test_a_model_of_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # undone at the end, with what the import adds
    (tmp_path / "neighbour.py").write_text("FACTOR = 3")
    own = tmp_path / "my_file.py"
    own.write_text(OWN)
    found = workload(f"{own}:make")
    assert found.name == "my_file.py:make, 1 MB"
    assert found.parameter_bytes == 4 * (256 * 1024 + 1024)
    assert found.loss(lambda x: torch.ones(2), [None]) == 6
    for name, error in (
        ("nope", "there is no model 'nope': --model takes mlp, "),
        ("none.py:make", "cannot take make from none.py: .*No such file"),
        (f"{own}:other", "cannot take other from .*my_file.py: module 'my_file' has no"),
        (f"{own}:wrong", "must return a module and a batch, optionally a loss, got Linear"),
        ("readme.md:make", "cannot take make from readme.md: readme.md is no Python file"),
    ):
        with pytest.raises(UsageError, match=error) as raised:
            workload(name)
        assert "\n" not in str(raised.value)
