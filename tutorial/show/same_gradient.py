"""Prints and draws chapter 2: distances from the batch's gradient."""

from tutorial import pictures


def show(found, path):
    """Shows `{way to split: distance}`."""
    for what, far in found.items():
        print(f"{what:<24}{far:.0e}")
    names = {what.replace(", ", ",\n"): {"": far} for what, far in found.items()}
    pictures.bars(path, {("distance from the batch's gradient", ""): names}, log=True)
