"""Prints and draws chapter 3's ring: the chunks after each step."""

from tutorial import pictures


def show(results, path):
    """Shows for each rank `(chunks after each step, MB sent, ms of the ring and of torch)`."""
    nproc = len(results)
    width = nproc + 1
    heads = [f"rank {rank}".ljust(width * nproc) for rank in range(nproc)]
    print(f"{'':<10}" + " | ".join(heads).rstrip())
    panels = {}
    for step, ranks in enumerate(zip(*(steps for steps, _, _ in results), strict=True)):
        name = f"step {step}" if step else "begin"
        cells = ["".join(f"{number:<{width}}" for number in chunks) for chunks in ranks]
        print(f"{name:<10}" + " | ".join(cells).rstrip())
        panels[name] = [[(n, str(n).count("1") / nproc) for n in chunks] for chunks in ranks]
    _, megabytes, (ring, torchs) = results[0]
    print(f"a million numbers: each rank sends {megabytes:.1f} MB")
    print(f"this ring {ring:.1f} ms, torch.distributed.all_reduce {torchs:.1f} ms")
    pictures.tables(path, panels, "darker: more ranks are in the sum")
