"""Prints and draws chapter 9: how each program ends, and what its tool reports."""

from tutorial import pictures


def show(found, path):
    """Shows `{program: for each rank (line, spans, stall report, flight record, end)}`."""
    for name, ranks in found.items():
        print(name)
        for rank, (line, _, printed, record, error) in enumerate(ranks):
            print(f"  rank {rank}: {error}")
            if name == "checkpoint":
                print(f"    in {line}")
            if name == "uneven" and printed:
                print("    " + printed.strip().replace("\n", "\n    "))
            if name == "lost_error":
                print(f"    {record}")
    panels = {
        name: {f"rank {rank}": spans for rank, (_, spans, *_) in enumerate(ranks)}
        for name, ranks in found.items()
    }
    pictures.timelines(path, panels)
