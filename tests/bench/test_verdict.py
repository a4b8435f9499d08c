"""bench/verdict.py: the table, and its verdict in words."""

import pytest

from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.bench.verdict import Run, is_reference, kind, table, verdict, ways_table

DEFAULT, VIEWS = "torch DDP on gloo, default", "torch DDP on gloo, views"


def run(**settings):
    times = {
        NO_COMMUNICATION: 10.0,
        DEFAULT: 40.0,
        VIEWS: 20.0,
        "torch DDP on node, views": 1.0,  # of this library's backend: no reference
        "ddp.SGD on gloo": 15.0,
        "Reducer on mpi, views": 16.0,
        "ddp.SGD on mpi": 10.0,
    } | settings.pop("times", {})
    return Run([Samples(name, [time] * 3) for name, time in times.items()], **settings)


def test_names_say_whose_a_contender_is():
    assert kind(NO_COMMUNICATION) == "reference"
    assert kind("torch DDP on mpi, views") == "torch"
    assert kind("NodeSharedSGD on gloo") == "ours"
    found = [is_reference(name) for name in (VIEWS, "torch DDP on nccl, default", "torch DDP")]
    assert found == [True, True, True]
    others = ("torch DDP on mpi, views", "torch DDP on node, views", "Reducer on gloo")
    assert not any(map(is_reference, others))


@pytest.mark.parametrize("paired", [True, False])
def test_the_table_compares_with_the_fastest_of_torchs_settings(paired):
    lines = table(run(paired=paired)).splitlines()
    assert lines[0].split("  ")[-1].strip() == "/ no comm."
    row = next(line for line in lines if line.startswith("ddp.SGD on gloo"))
    assert "0.75 (0.75 to 0.75)" in row
    assert row.endswith("1.50 (1.50 to 1.50)")
    assert next(line for line in lines if line.startswith(VIEWS)).split()[-5] == "1"


def test_a_verdict_for_each_backend():
    assert verdict(run()).splitlines() == [
        "for this model: ddp.SGD on gloo is 1.33 times as fast as torch's DDP (1.33 to 1.33); of "
        "its 15.0 ms 10.0 are compute",
        "for this model: ddp.SGD on mpi is 2.00 times as fast as torch's DDP (2.00 to 2.00); the "
        "rest is compute",
    ]


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (8.0, "2.50 times as fast as torch's DDP (2.50 to 2.50); that is 0.80 x a step without"),
        (20.0, "no difference is shown between ddp.SGD on gloo and torch's DDP (1.00)"),
        (25.0, "torch's DDP is 1.25 times as fast as ddp.SGD on gloo (1.25 to 1.25)"),
    ],
)
def test_verdicts(time, text):
    assert text in verdict(run(times={"ddp.SGD on gloo": time})).splitlines()[0]


def test_a_busy_machine_gets_no_verdict():
    assert verdict(run(disturbed="someone ran")) == (
        "no verdict: the machine was not quiet (someone ran)"
    )
    assert verdict(Run([Samples(NO_COMMUNICATION, [1.0])])) == ""  # nothing to compare


def test_ratios_of_all_ways_of_running():
    alone = Run(run(times={"ddp.SGD on mpi": 5.0}).samples, paired=False)
    lines = ways_table({"interleaved": run(), "alone": alone}).splitlines()
    assert lines[-1].split()[-4:] == ["0.50", "1.00", "0.25", "0.50"]
    headers = ["interleaved / torch DDP", "interleaved / no comm."]
    assert [h.strip() for h in lines[0].split("  ") if h][:2] == headers
