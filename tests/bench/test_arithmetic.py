"""The in-library benchmark: ratios, verdicts, and models of a file."""

import re

import torch

from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.results import Run, Samples, verdict
from ddp_from_scratch.bench.workloads import workload
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
    told = refusal(found.loss, found.model(), found.batch())
    assert re.search(
        "two_inputs returns no loss, .* raises ValueError: too many values .*: return", told
    )
