"""The answers on the pages, which a reader opens after a guess, are what the programs compute."""

from importlib import import_module

import pytest
import torch

from tests.support.pages import TUTORIAL_PAGES


def of(number, name):
    folder = TUTORIAL_PAGES[number].parent.name
    return import_module(f"tutorial.{folder}.{name}")


def gradients_of_chapter_1():
    program = of(1, "one_process")
    return 4 * program.LAYERS * (program.WIDTH + 1) * program.WIDTH / 1e6


def on_the_wire(messages):
    """Messages of 1 ms each, and the bytes at 1 GB/s, in ms."""
    return messages + gradients_of_chapter_1()


def arrives(buckets):
    """When the last of equal buckets arrives that become ready in 11 ms of backward, in ms."""
    end = 0.0
    for ready in range(1, buckets + 1):
        end = max(end, 11 / buckets * ready) + on_the_wire(buckets) / buckets
    return f"{end:.1f}"


def share_of_rank_0():
    program = of(16, "muon")
    shapes = zip(program.WIDTHS[1:], program.WIDTHS, strict=False)
    costs = [program.cost(torch.empty(shape)) for shape in shapes]
    owners = program.by_turns(costs, 2)
    return sum(c for c, owner in zip(costs, owners, strict=True) if owner == 0) / sum(costs), costs


def end_of(way):
    program = of(18, "streams")
    _, compute, _, _ = program.run(getattr(program, way), 0.0, 3.0, 2.0)
    return f"{compute.end:.0f}"


def parameters_of_chapter_20():
    return list(of(20, "language_model").Model().parameters())


def held_in_chapter_21():
    """With the program's defaults, in MB: what comes and goes, and all together."""
    program = of(21, "shard_it")
    counts = [(program.WIDTH + 1) * program.WIDTH] * program.LAYERS
    held = of(21, "solution").predict_memory(counts, 2)
    return held["whole"] / 1e6, sum(held.values()) / 1e6


def step_of_chapter_13(ranks):
    """With the defaults of scaling.py: on the wire, in turn and with overlap, in ms."""
    rows = of(13, "scaling").steps(100.0, 120.0, 20.0, 25.0, ranks, 4)
    return {n: times for n, *times in rows}[ranks]


MB = gradients_of_chapter_1()
SHARE, COSTS = share_of_rank_0()
WHOLE, TOGETHER = held_in_chapter_21()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, f"8 layers and {MB / 4:.1f} million parameters"),
        (5, f"48 * 0.6 + 6300 / 1400 = {48 * 0.6 + 6300 / 1400:.0f} ms"),
        (7, f"16 messages take 16 ms and the bytes {MB:.1f} ms"),
        (7, f"end after {arrives(4)}: {float(arrives(4)) - 11:.0f} ms are exposed"),
        (7, ", ".join(map(arrives, (16, 8, 4, 2))) + f" and {arrives(1)} ms"),
        (7, f"the message of {on_the_wire(1):.1f} ms"),
        (12, f"2 P + 2 P = {4 * 33.6:.0f} MB. One copy: P + 2 P = {3 * 33.6:.0f} MB"),
        (13, f"{526_300 * 8 / 5e4:.0f} ms and {0.02 * 526_300 * 8 / 5e4:.1f} ms"),
        (13, "in turn {1:.1f} ms, with overlap {2:.1f} ms".format(*step_of_chapter_13(2))),
        (13, f"take {4 * 1022 * 0.02:.1f} ms, and the bytes {1.022e5 / 512 * 8 / 25:.1f} ms"),
        (15, f"{MB:.1f} + {MB:.1f} + 2 * {MB:.1f} = {4 * MB:.1f} MB"),
        (15, f"{MB:.1f} + {MB:.1f} + {MB:.1f} = {3 * MB:.1f} MB"),
        (16, f"first matrix alone has {100 * COSTS[0] / sum(COSTS):.0f} % of the cost"),
        (16, f"the third {100 * COSTS[2] / sum(COSTS):.0f} %"),
        (16, "two thirds" if abs(SHARE - 2 / 3) < 0.01 else "?"),
        (17, f"{4 * MB:.1f} MB and {MB:.1f} MB"),
        (18, f"{end_of('overlap')} ms: 12 of backward"),
        (18, f"And {end_of('future_at_once')} ms"),
        (20, f"about {round(sum(p.numel() for p in parameters_of_chapter_20()), -4):,} parameters"),
        (20, f"in {len(parameters_of_chapter_20())} tensors"),
        (21, f"{MB:.1f} of gradients and {2 * MB:.1f} of state, {4 * MB:.1f} together"),
        (21, f"half of each, {2 * MB:.1f}"),
        (21, f"4 times {WHOLE / 4:.2f} MB, {TOGETHER:.1f} together"),
        (21, f"the {WHOLE:.1f} MB stay"),
    ],
)
def test_answers_are_what_the_programs_compute(number, said):
    page = TUTORIAL_PAGES[number].read_text()
    assert " ".join(said.split()) in " ".join(page.split())
