"""Prints and draws chapter 7: two tables by cap, and the timelines of three caps."""

from itertools import pairwise
from math import inf

from tutorial import pictures

DRAWN = 0, 2, inf  # caps of the timelines, in MB


def show(rows, path):
    """Shows `{cap: (buckets, steps on the wire, its messages, on gloo, of torch's, same bits)}`."""
    print("a wire that takes no core; the fastest step")
    print(" cap, MB  buckets  backward ms  exposed ms  together")
    wire, cores, timelines = {}, {}, {}
    for cap, (buckets, steps, in_flight, *_) in rows.items():
        times, fastest = by_step(steps, 0)  # one that nothing interrupted
        print(f"{name(cap):>8} {buckets:>8} {columns(times)}")
        wire[name(cap)] = times
        if cap in DRAWN:
            begin = fastest[0]
            own = [(what, *span) for what, span in zip(times, pairwise(fastest), strict=True)]
            sent = [("in flight", *span) for span in in_flight if span[0] > begin][:buckets]
            spans = {"rank 0": own, "its buckets": sent}
            timelines[f"buckets' cap in MB: {name(cap)}"] = {
                row: [(what, 1000 * (b - begin), 1000 * (e - begin)) for what, b, e in bars]
                for row, bars in spans.items()
            }
    print("\ngloo, on this machine's cores; the median step")
    print(" cap, MB  buckets  backward ms  exposed ms  together  torch's  same bits")
    for cap, (buckets, _, _, steps, of_torch, same) in rows.items():
        times, _ = by_step(steps, len(steps) // 2)
        torchs = sum(by_step(of_torch, len(steps) // 2)[0].values())
        print(f"{name(cap):>8} {buckets:>8} {columns(times)} {torchs:8.1f}  {same}")
        cores[name(cap)] = times
    panels = {("a wire that takes no core, by cap in MB", "ms"): wire}
    panels[("gloo on this machine's cores", "ms")] = cores
    pictures.bars(path, panels)
    pictures.timelines(path.with_stem(f"{path.stem}_timeline"), timelines)


def name(cap):
    """Names a cap."""
    return "all in 1" if cap == inf else f"{cap:g}"


def by_step(steps, place):
    """Returns the ms of backward and wait in the step at this place by length, and its marks."""
    step = sorted(steps, key=lambda marks: marks[-1] - marks[0])[place]
    spans = [1000 * (end - begin) for begin, end in pairwise(step)]
    return dict(zip(("backward", "wait"), spans, strict=True)), step


def columns(times):
    """Formats backward, wait, and their sum."""
    return f"{times['backward']:12.1f} {times['wait']:11.1f} {sum(times.values()):9.1f}"
