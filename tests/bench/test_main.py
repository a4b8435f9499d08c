"""python -m ddp_from_scratch.bench: its options, its jobs, and that it runs on ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.bench import launch, main, ways
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.job import Job
from ddp_from_scratch.bench.workloads import WORKLOADS
from tests.support.ranks import MPIRUN, ROOT

OWN = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).double()
    return model, torch.randn(4, 8).double(), lambda model, batch: model(batch).square().mean()
"""

TIMES = {NO_COMMUNICATION: 10.0, "torch DDP on gloo, views": 20.0, "ddp.SGD on gloo": 12.0}


def bench(*options, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "ddp_from_scratch.bench", *options],
        cwd=ROOT,
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def parse(*arguments):
    return main.parse(list(arguments), "program")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rounds", "1"], "--rounds must be 2 or more, got 1"),
        (["--nproc", "2", "0"], "--nproc must be 1 or more, got 0"),
        (["--seconds", "0"], "--seconds must be more than 0, got 0"),
        (["--seconds", "nan"], "--seconds must be more than 0, got nan"),
        (["--backend", "nccl", "mpi"], "--backend nccl has a table of its own, got nccl mpi"),
    ],
)
def test_options_out_of_their_range(arguments, error):
    with pytest.raises(UsageError) as raised:
        parse(*arguments)
    assert str(raised.value) == error


def test_a_mistake_is_one_line():
    done = bench("--model", "nope", code=2)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_job_for_each_table(monkeypatch):
    monkeypatch.setattr(launch, "available_memory", lambda: None)
    options = parse("--model", "mlp", "layers500", "--nproc", "2", "4", "--backend", "gloo")
    assert [(j.model, j.nproc) for j in main.jobs(options)] == [
        ("mlp", 2),
        ("layers500", 2),
        ("mlp", 4),
        ("layers500", 4),
    ]


def test_a_job_is_an_argument_of_a_command_line():
    job = Job("mlp", ("gloo", "mpi"), 2, chosen=("Reducer",), only="x", way="kept")
    assert Job.parse(job.dumps()) == job
    assert Job.parse(Job("mlp", ("gloo",), 2).dumps()).chosen is None
    assert job.backend == "mpi"
    assert job.file_name == "step_time-mlp-gloo+mpi-2-kept"
    own = Job("some/my_file.py:make", ("gloo",), 4, "adamw")
    assert own.file_name == "step_time-my_file-make-gloo-4-adamw"
    assert own.backend == "gloo"


def test_models_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "available_memory", lambda: 2**30 + 2**21)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch.check_memory(WORKLOADS["mlp"], 2, 2)  # 1 GiB, and 1 MiB for the biases
    with pytest.raises(UsageError, match=r"12 copies of MLP.* on 2 ranks need about 6 GiB"):
        launch.check_memory(WORKLOADS["mlp"], 12, 2)


def test_memory_is_kept_in_the_ranks_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(ways, "interleaved", lambda job: seen.append(dict(os.environ)))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    ways.kept(Job("mlp", ("gloo",), 2))
    assert seen[0]["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    assert seen[0]["MALLOC_TRIM_THRESHOLD_"] == "4294967296"
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "7"
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ


def test_alone_each_contender_has_its_own_backend(monkeypatch):
    started = []

    def run(job):
        started.append((job.only, job.backend, job.seconds))
        sample = {"name": job.only, "milliseconds": [1.0]}
        return {"samples": [sample], "left_out": {}, "disturbed": job.only.partition(" on ")[2]}

    monkeypatch.setattr(ways, "interleaved", run)
    merged = ways.alone(Job("mlp", ("gloo", "mpi"), 2, chosen=("ddp.SGD",), seconds=4.0))
    assert (NO_COMMUNICATION, "gloo", 2.0) in started
    assert ("ddp.SGD on gloo", "gloo", 2.0) in started
    assert ("ddp.SGD on mpi", "mpi", 2.0) in started
    assert [s["name"] for s in merged["samples"]] == [name for name, _, _ in started]
    assert merged["disturbed"] == "gloo, default"  # the first


def test_a_model_of_ones_own_in_all_ways(tmp_path):
    """One table on gloo and mpi, with dropout, and parameters that no flat kernel takes alone."""
    (tmp_path / "mine.py").write_text(OWN)
    model = ["--model", f"{tmp_path / 'mine.py'}:make", "--rounds", "2"]
    chosen = ["--contender", "NodeSharedSGD", "--optimizer", "adamw", "--backend", "gloo", "mpi"]
    done = bench(*model, *chosen, "--results", str(tmp_path))
    assert "mine.py:make, 0 MB; gloo and mpi, 2 ranks; fused AdamW in rows" in done.stdout
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"NodeSharedAdamW on gloo", "NodeSharedAdamW on mpi", NO_COMMUNICATION} <= set(rows)
    assert "for this model: " in done.stdout or "no verdict: the machine was" in done.stdout
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert {len(s["milliseconds"]) for s in content["samples"]} == {2}
    assert content["settings"]["optimizer"] == "adamw"


def test_a_table_in_two_ways_is_summed_up_and_drawn_once(monkeypatch, tmp_path, capsys):
    def measured(job):
        samples = [{"name": name, "milliseconds": [t] * 3} for name, t in TIMES.items()]
        return {"title": f"a model, {job.way}", "samples": samples, "left_out": {}}

    monkeypatch.setattr(main, "WAYS", dict.fromkeys(ways.WAYS, measured))
    monkeypatch.setattr(main, "save", lambda name, content, folder: saved.append(name))
    saved, drawn = [], []
    options = ["--model", "mlp", "--backend", "gloo", "--results", str(tmp_path)]
    options += ["--way", "interleaved", "alone"]

    def draw(job, runs, folder):
        drawn.append((job.model, list(runs), folder))

    assert main.main(options, "program", draw=draw) == 0
    assert drawn == [("mlp", ["interleaved", "alone"], tmp_path)]
    assert saved == ["step_time-mlp-gloo-2", "step_time-mlp-gloo-2-alone"]
    tables = capsys.readouterr().out.split("\na model, ")
    assert [table.partition(";")[0] for table in tables[1:]] == ["interleaved", "alone"]
    assert "\nall ways of running\n" in tables[2]


@pytest.mark.slow
def test_one_contender_by_itself(tmp_path):
    """What `alone` starts for each row, of a model that one contender cannot train."""
    (tmp_path / "half.py").write_text(OWN.replace(".double()", ".bfloat16()"))
    job = Job(f"{tmp_path / 'half.py'}:make", ("gloo",), 2, rounds=2, only="NodeSharedSGD on gloo")
    content = ways.interleaved(job)
    assert content["samples"] == []
    assert "float32 or float64" in content["left_out"]["NodeSharedSGD on gloo"]
    assert len(ways.interleaved(Job("layers500", ("gloo",), 2, rounds=2, only=NO_COMMUNICATION))
               ["samples"][0]["milliseconds"]) == 2  # fmt: skip
