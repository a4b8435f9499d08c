"""Prints and draws chapter 13's steps by the number of ranks."""

from tutorial import pictures


def show(rows, backward, path):
    """Shows rows of ranks, and in ms the time on the wire, a step in turn, and one with overlap."""
    print("   ranks     wire   in turn  efficiency   overlap  efficiency")
    for ranks, wire, *ways in rows:
        shown = "".join(f" {ms:9,.1f} {100 * backward / ms:9.0f} %" for ms in ways)
        print(f"{ranks:8,} {wire:8,.1f}{shown}")
    ranks, _, in_turn, overlap = zip(*rows, strict=True)
    curves = {"in turn": in_turn, "overlap": overlap, "backward": [backward] * len(rows)}
    curves = {label: (ranks, ms) for label, ms in curves.items()}
    pictures.lines(path, "backward and all-reduces, computed", "ranks", "ms", {}, curves)
