"""What the benchmarks compute from samples, at numbers that one can work out by hand."""

import json
import math
import re
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from benchmarks import breakdown, compare, memory, overlap, survive, timelines
from benchmarks.harness import network
from benchmarks.harness.wire_meter import Meter, Result, check_crossed, limit_ms, with_computing
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, Contender
from ddp_from_scratch.bench.samples import Samples
from tests.support.ranks import ROOT

NOISE = np.random.default_rng(3)


def samples(times):
    return [Samples(name, [time] * 4) for name, time in times.items()]


def test_overlap_of_each_cap():
    unknown = overlap.hidden_share(np.full(5, 1.0), np.full(5, -1.0))
    assert all(map(math.isnan, unknown))
    times = {NO_COMMUNICATION: 10.0}
    for cap, during, at_end, of_torch in ((1, 12.0, 14.0, 13.0), (25, 11.0, 14.0, 16.0)):
        times |= {f"during backward, {cap} MB": during, f"at its end, {cap} MB": at_end}
        times |= {f"torch DDP, {cap} MB": of_torch}
    assert {s.name for s in overlap.specs([1.0, 25.0], "mpi")} == times.keys()
    small, large = overlap.overlaps(samples(times), [1.0, 25.0])
    assert (small.exposed, small.hidden[0], small.torch_hidden[0]) == (2.0, 0.5, 0.25)
    assert (large.exposed, large.hidden[0], large.torch_hidden[0]) == (1.0, 0.75, -0.5)
    # torch's class is compared with a Reducer that sends by gloo as it does.
    times |= {"by gloo at its end, 1 MB": 16.0, "by gloo at its end, 25 MB": 16.0}
    assert {s.name for s in overlap.specs([1.0, 25.0], "gloo")} == times.keys()
    small, large = overlap.overlaps(samples(times), [1.0, 25.0])
    assert (small.hidden[0], small.torch_hidden[0], large.torch_hidden[0]) == (0.5, 0.5, 0.0)
    # The best is not compared in the rounds that made it the best.
    auto = Samples("auto", [10.0] * 4)
    lucky = [Samples("first", [5.0, 10.0, 5.0, 10.0]), Samples("then", [10.0, 5.0, 10.0, 5.0])]
    assert overlap.ratio_to_best(auto, lucky) == (1.0, 1.0, 1.0)


def test_memory_counts_no_files_and_what_is_shared_once():
    rows = "Rss: 900\nPss: 500\nPss_Anon: 100\nPss_File: 380\nPss_Shmem: 20\nPrivate_Clean: 300"
    rollup = "".join(f"{row} kB\n" for row in [*rows.split("\n"), "Private_Dirty: 90"])
    assert memory.parse_rollup(rollup) == memory.Memory(90 * 1024, 120 * 1024)
    # Two ranks, before and in five phases; the peak of the node is that of one phase.
    phases = [[10, 15, 90, 30, 30, 30], [20, 70, 25, 30, 30, 31]]
    sample = {"name": "a", "private": phases, "node": phases}
    assert [memory.growth(sample, of) for of in ("private", "node")] == [80, 85]
    assert [memory.growth(sample, of, steady=True) for of in ("private", "node")] == [20, 31]


def test_the_parts_of_a_step_take_over_from_each_other(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0])
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: next(now))
    clock = breakdown.StepClock()

    def wait():
        with clock.part("waiting"):
            pass

    with clock.part("forward"):  # from 0.0
        with clock.part("packing"):  # from 1.0 to 3.0
            pass
        elsewhere = threading.Thread(target=wait)  # another thread's time is not the step's
        elsewhere.start()
        elsewhere.join()
    assert clock._step == {"forward": 1.0 + 7.0, "packing": 2.0}  # to 10.0


def result_file(path, times, *, slower_machine=1.0, **settings):
    """A file of 40 rounds in which each contender takes its time, within 5 %."""
    weather = slower_machine * (1 + 0.5 * NOISE.random(40))  # slows all contenders of a round
    rows = [
        {"name": name, "milliseconds": list(t * weather * (1 + 0.05 * NOISE.random(40)))}
        for name, t in times.items()
    ]
    settings = {"benchmark": "step_time", "nproc": 2, **settings}
    path.write_text(json.dumps({"settings": settings, "machine": {"cores": 2}, "samples": rows}))
    return path


def verdicts(old, new, reference=None, **options):
    old, new = compare.read(old), compare.read(new)
    reference = compare.common_reference(old, new, reference)
    return {c.name: c.verdict for c in compare.compare(old, new, reference, **options)}


def test_compare_tells_what_got_slower_and_faster_on_another_machine(tmp_path):
    before = {NO_COMMUNICATION: 10, "a": 20, "b": 20, "c": 20, "gone": 5}
    after = {NO_COMMUNICATION: 10, "a": 20, "b": 24, "c": 16, "new": 5}
    old = result_file(tmp_path / "old.json", before)
    new = result_file(tmp_path / "new.json", after, slower_machine=7.0)
    assert verdicts(old, new) == {"a": "", "b": "slower", "c": "faster"}
    assert verdicts(old, new, at_least=0.3) == {"a": "", "b": "", "c": ""}
    found = verdicts(old, new, reference="b")
    assert found == {NO_COMMUNICATION: "faster", "a": "faster", "c": "faster"}
    same = {NO_COMMUNICATION: 10, **{f"contender {i}": 20 for i in range(8)}}
    old, new = (result_file(tmp_path / f"{name}.json", same) for name in ("one", "two"))
    assert set(verdicts(old, new).values()) == {""}  # nothing but noise


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    good = result_file(tmp_path / "good.json", {NO_COMMUNICATION: 1, "a": 2})
    other = result_file(tmp_path / "other.json", {NO_COMMUNICATION: 1, "a": 2}, nproc=4)
    with pytest.raises(UsageError, match="different benchmarks: nproc 2 and 4"):
        verdicts(good, other)
    with pytest.raises(UsageError, match="not in both files: b"):
        verdicts(good, good, reference="b")
    for text, told in (
        ("{", "no timed contenders"),
        ('{"samples": {"256": {"gloo": [1.0]}}}', "no timed contenders"),
        ('{"samples": [], "machine": {}, "settings": {}}', "two or more times"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=told):
            compare.read(tmp_path / "bad.json")


def test_states_differ_in_one_bit_or_a_missing_tensor():
    state = {"model": {"weight": torch.zeros(3)}, "steps": [torch.ones(())]}
    other = {"model": {"weight": torch.tensor([0.0, 0.0, -0.0])}, "steps": []}
    assert survive.differences(state, state) == []
    assert survive.differences(state, other) == ["/model/weight", "/steps/0"]


def test_each_kill_is_paired_with_what_followed_it():
    killed = survive.Run(
        kills=[10.0, 20.0, 21.0],
        regroupings=[(10.2, 3, 50.0, 60.0), (10.9, 4, 40.0, 30.0), (21.5, 2, 100.0, 100.0)],
        seconds=33.0,
    )
    rows = {name: values for name, *values in survive.table(killed, survive.Run(seconds=30.0), 4)}
    assert {name: [value and round(value) for value in row] for name, row in rows.items()} == {
        **{"noticed": [195, 300], "group": [75, 100], "step": [80, 100], "together": [350, 500]},
        **{"joined": [900, 900], "a kill": [1000, None]},
    }


def test_what_went_round_the_wire_or_too_fast_for_it_is_refused():
    """A step of 100 ms on 1 Gbit/s in which 1000 bytes must cross from each host."""
    for sent, told in (
        (1050, None),
        (900, "ours sent 900 bytes .* went"),
        (15_000_000, "more than 1"),
    ):
        with pytest.raises(RuntimeError, match=told) if told else nullcontext():
            check_crossed([Result("ours", [100.0], 1000, [[sent], [1100]], None)], gbit=1.0)
    assert [limit_ms(125e6, gbit) for gbit in (1.0, 0.1)] == pytest.approx([1000, 10000])


def test_the_meter_gives_bytes_to_the_step_that_sent_them(monkeypatch):
    counter = [7]  # before the first step
    monkeypatch.setattr(network, "crossed_bytes", lambda: (counter[0], 0))

    def sends(name, nbytes):
        return Contender(name, None, lambda: counter.__setitem__(0, counter[0] + nbytes))

    meter = Meter()
    for step in [meter.before(sends("a", 10)), meter.before(sends("b", 20))] * 2:
        step()
    meter.read()
    assert (meter.sent["a"], meter.sent["b"]) == ([10, 10], [20, 20])


def test_no_bound_is_below_the_step_without_communication():
    alone = Result(NO_COMMUNICATION, [40.0, 50.0, 90.0], 0, [[9]], 20.0)
    others = [Result("x", [80.0], 8, [[9]], limit) for limit in (70.0, 30.0)]
    unknown = Result("y", [80.0], None, [[9]], None)
    bounds = [r.bound for r in with_computing([alone, *others, unknown])]
    assert bounds == [50.0, 70.0, 50.0, None]


def test_what_the_guide_reads_in_a_timeline_was_printed_with_it():
    shown = re.findall(
        r"/benchmarks/results/(timeline-[\w-]+)\.png\)\n\n(.*?)\n\n",
        (ROOT / "docs" / "how-to" / "timeline.md").read_text(),
        re.DOTALL,
    )
    assert [name for name, _ in shown] == [f"timeline-resnet18-{p}" for p in timelines.PLACES]
    for name, sentences in shown:
        printed = (ROOT / "benchmarks" / "results" / f"{name}.txt").read_text()
        cited = re.findall(r"\d+\.\d+", sentences)
        assert len(cited) >= 3
        assert [number for number in cited if not re.search(rf"\b{number}\b", printed)] == []
