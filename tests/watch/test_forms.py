"""The forms of a record of one step of two ranks: text, picture, page."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from ddp_from_scratch.watch.record import (
    BucketMarks,
    Clock,
    Event,
    EventMark,
    GradientMark,
    Record,
    StepMarks,
    rank_times,
    step_times,
)
from ddp_from_scratch.watch.render import COLOURS, WIDTH, as_html, as_text, draw
from tests.support.ranks import ROOT

HOST = Clock(torch.device("cpu"))
LAYOUT = (("b",), ("a",))
NBYTES = {"a": 2**21, "b": 2**20}
FIELDS = {  # by which the script of the page reads a record
    "rank": ["rank", "forward", "backward", "arrived", "buckets", "optimizer", "begin", "end"],
    "bucket": ["index", "pack", "sent", "wait", "unpack", "met", "last", "moving"],
}


def marks(late: float = 0.0) -> StepMarks:
    """A step of 100 ms; gradients come `late` seconds later."""

    def bucket(pack: float, landed: float, waited: float) -> BucketMarks:
        return BucketMarks(
            pack,
            launched=pack + 0.002,
            landed=landed,
            wait=0.070 + late,
            waited=waited,
            unpack=waited,
            unpacked=waited + 0.001,
        )

    events = {
        Event.FORWARD: 0.0,
        Event.FORWARDED: 0.030,
        Event.BACKWARD: 0.030,
        Event.ALL_LAUNCHED: 0.070 + late,
        Event.AVERAGED: 0.082,
        Event.STEP: 0.085,
        Event.STEPPED: 0.100,
    }
    return StepMarks(
        iteration=7,
        layout=LAYOUT,
        events=[EventMark(event, at) for event, at in events.items()],
        arrived=[GradientMark("b", 0.040 + late), GradientMark("a", 0.060 + late)],
        buckets={
            0: bucket(0.040 + late, 0.064, 0.070 + late),
            1: bucket(0.060 + late, 0.080, max(0.080, 0.070 + late)),
        },
    )


def record(late: float = 0.010) -> Record:
    """Rank 1 launches each bucket `late` seconds after rank 0."""
    ranks = [rank_times(r, HOST, marks(late * r)) for r in range(2)]
    steps = (step_times(7, LAYOUT, ranks),)
    return Record("Net, 3 MiB of gradients, 2 ranks by gloo", NBYTES, ("host", "host"), 0.0, steps)


def test_text_of_a_step():
    whole = record()
    text = as_text(whole, whole.typical)
    lines = text.splitlines()
    assert lines[:3] == ["Net, 3 MiB of gradients, 2 ranks by gloo", "step 7: 100.0 ms", ""]
    assert {len(line) for line in lines[3:9]} == {WIDTH}
    assert max(map(len, lines)) <= WIDTH
    labels, bars = zip(*(line.split("|")[:2] for line in lines[3:6]), strict=True)
    assert [label.rstrip() for label in labels] == [
        *("rank 0", "  bucket 0, 1 MiB", "  bucket 1, 2 MiB")
    ]
    # All have launched the second bucket, and it waits for the one before it: the blank.
    shapes = r"F{23,26}B+p+B+p+B+u?!+u *O+", r" {32,35}p+-+=+ +u+ *", r" {48,52}p+-+=+u? *"
    for shape, bar in zip(shapes, bars, strict=True):
        assert re.fullmatch(shape, bar), bar
    assert "\n".join(lines[3:6]) in (ROOT / "docs" / "how-to" / "timeline.md").read_text()
    (step,) = whole.steps
    ranks = tuple(replace(rank, buckets=rank.buckets[:1]) for rank in step.ranks)
    step = replace(step, layout=(("a", "b"),), ranks=ranks)
    text = as_text(replace(whole, clock_error=0.25), step)
    assert "may differ by 0.25 ms" in text
    assert "1 bucket of 3 MiB: it is full near the end of backward" in text


def test_text_says_what_is_exposed_and_who_was_late():
    whole = record(late=0.015)
    text = as_text(whole, whole.typical)
    assert (
        "rank 0: communication 38.0 ms, 74% hidden; exposed 10.0 ms\n"
        "rank 0 waited 10.0 ms for bucket 1, of which 7.0 until rank 1 launched it\n"
        "rank 1: communication 10.0 ms, 100% hidden; exposed 0.0 ms\n"
        "rank 1 was late: the others waited 7.0 ms for it in all"
    ) in text


def test_page_holds_the_record_and_loads_nothing():
    (step,) = record().steps
    steps = [
        replace(step, iteration=n, ranks=tuple(replace(r, end=length) for r in step.ranks))
        for n, length in enumerate((5.0, 90.0, 20.0))
    ]
    page = as_html(replace(record(), steps=tuple(steps)))
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])
    assert [step["iteration"] for step in data["steps"]] == [0, 1, 2]
    (rank, _), begin = data["steps"][0]["ranks"], pytest.approx(0)
    assert list(rank) == FIELDS["rank"]
    assert list(rank["buckets"][0]) == FIELDS["bucket"]
    assert rank["forward"] == [[begin, pytest.approx(30)]]
    assert rank["arrived"][0] == ["b", pytest.approx(40)]
    assert data["typical"] == 2
    assert not re.search(r"(src|href)=(?!\"data:)|@import|fetch\(", page)
    assert '<link rel="icon" href="data:' in page  # else the browser asks for /favicon.ico
    assert re.findall(r"https?://\S+?(?=\")", page) == ["http://www.w3.org/2000/svg"]
    # The second would hide the end of the script from the browser.
    for name in ("</script><b>", "<!--<script>"):
        assert name not in as_html(replace(record(), title=name))


@pytest.mark.program  # matplotlib's first import on a machine runs fc-list
def test_pictures_are_drawn_where_matplotlib_is(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert draw(record(), record().typical, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert [part for part in ("bucket 1, 2 MiB", *COLOURS.values()) if part not in text] == []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw(record(), record().typical, tmp_path / "b.png")


def test_a_callback_or_a_thread_that_is_late_hides_nothing():
    """A thread that wakes up late waits on after the last bucket has landed."""
    late = marks()
    late.buckets[1].waited = late.buckets[1].unpacked = 0.090
    times = rank_times(0, HOST, late)
    assert (times.exposed, times.hidden) == pytest.approx((20, 1 - 10 / 38))
    late = marks()
    late.buckets[1].landed = 0.200
    assert rank_times(0, HOST, late).buckets[1].sent == pytest.approx((62, 80))


def test_clocks_of_several_machines():
    # Another machine's clock may be off by more than the way takes.
    times = rank_times(0, HOST, marks())
    bucket = step_times(7, LAYOUT, [times, times.moved(50.0)]).ranks[0].buckets[0]
    assert bucket.sent[0] <= bucket.met <= bucket.sent[1]
    # A step begins at 0 on the rank that begins first.
    ranks = [times.moved(1000.0 + rank) for rank in range(2)]
    first, second = step_times(7, LAYOUT, ranks).ranks
    assert (first.begin, second.begin) == pytest.approx((0, 1))
    assert second.arrived == (("b", pytest.approx(41)), ("a", pytest.approx(61)))
    assert second.buckets[0].pack == pytest.approx((41, 43))
    # A bucket moves after those before it.
    _, second = record(late=0.0).steps[0].ranks[0].buckets
    assert (second.met, second.moving, second.sent[1]) == pytest.approx((62, 64, 80))
