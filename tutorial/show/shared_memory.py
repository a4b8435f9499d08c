"""Prints and draws chapter 10: an all-reduce by size, of gloo and in shared memory."""

from tutorial import pictures


def show(rows, nproc, path):
    """Shows `{numbers: (ms of gloo, of shared memory, of a copy, same sum)}`."""
    print("        kB  gloo, ms  shared, ms  a copy, ms  same sum")
    for size, (gloo, shared, copy, same) in rows.items():
        print(f"{4 * size / 1024:10.0f} {gloo:9.3f} {shared:11.3f} {copy:11.3f}  {same}")
    kb = [4 * size / 1024 for size in rows]
    *times, _ = zip(*rows.values(), strict=True)
    names = "gloo", "shared memory", "a copy"
    measured = {name: (kb, ms) for name, ms in zip(names, times, strict=True)}
    pictures.lines(path, f"an all-reduce of {nproc} ranks", "kB", "ms", measured, {})
