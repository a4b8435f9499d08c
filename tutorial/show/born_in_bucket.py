"""Prints and draws chapter 11: time and page faults of both ways."""

from tutorial import pictures


def show(found, path):
    """Shows `{way: (ms of backward, ms of packing, page faults, bucket)}`."""
    times, counts = {}, {}
    for name, (backward, packing, faults, _) in found.items():
        total = f"{backward + packing:6.1f} ms"
        print(f"{name:<16} backward {backward:5.1f}, pack {packing:5.1f}, together {total}", end="")
        print(f"; {faults:6,.0f} page faults")
        times[name] = {"backward": backward, "copy": packing}
        counts[name] = {"page faults": faults}
    one, other = (bucket for *_, bucket in found.values())
    print(f"the same bits: {one.equal(other)}")
    pictures.bars(path, {("time", "ms"): times, ("page faults of a step", ""): counts})
