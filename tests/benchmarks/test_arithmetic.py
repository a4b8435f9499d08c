"""What the benchmarks compute from samples, with numbers that can be checked by hand."""

from contextlib import nullcontext

import pytest

from benchmarks import overlap, step_time
from benchmarks.harness.network import Result, check_crossed, limit_ms
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.results import Run, Samples


def test_overlap_is_the_share_of_the_average_that_backward_hides():
    times = {NO_COMMUNICATION: 10.0}
    for cap, during, at_end, of_torch in ((1, 12.0, 14.0, 13.0), (25, 11.0, 14.0, 16.0)):
        times |= {f"during backward, {cap} MB": during, f"at its end, {cap} MB": at_end}
        times |= {f"torch DDP, {cap} MB": of_torch}
    samples = [Samples(name, [time] * 4) for name, time in times.items()]
    small, large = overlap.overlaps(samples, [1.0, 25.0])
    assert (small.exposed, small.hidden[0], small.torch_hidden[0]) == (2.0, 0.5, 0.25)
    assert (large.exposed, large.hidden[0], large.torch_hidden[0]) == (1.0, 0.75, -0.5)


def test_step_time_draws_torchs_fastest_and_what_a_reader_chooses_from():
    ours = ("Reducer on {}, views", "ddp.AdamW on {}", "ddp.AdamW on {}, shard=world")
    more = ("ddp.AdamW on {}, shard=node", "ddp.AdamW on {}, shard=node, fuse_wgrad")
    left_out = ("Reducer on {}", "ddp.AdamW on {}, fuse_wgrad")
    names = [name.format(on) for name in ours + more + left_out for on in ("gloo", "mpi")]
    times = {NO_COMMUNICATION: 5.0, "torch DDP on gloo, views": 10.0, "torch DDP on gloo": 20.0}
    times |= {"torch DDP on node, views": 6.0} | dict.fromkeys(names, 8.0)
    bars = step_time.bars(Run([Samples(name, [time] * 4) for name, time in times.items()]))
    shown = [name.replace(" on {}", "") for name in ours + more]
    assert [bar.name for bar in bars] == ["torch DDP, views", *shown]
    assert [bar.label for bar in bars] == ["1.00", *["0.80"] * 5]


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
