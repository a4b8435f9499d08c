"""Reads the options that the tutorial's programs share."""

import argparse
import sys
from pathlib import Path


def read_options(about, nproc=None, **further):
    """Reads --picture, --nproc if it has a default, and further options: `name=(default, help)`.

    A default that is a list has the choices, the default first.
    """
    main = sys.modules["__main__"]
    # A program started by its path has no spec.
    program = f"-m {main.__spec__.name}" if main.__spec__ else sys.argv[0]
    parser = argparse.ArgumentParser(
        prog=f"python {program}",
        description=about.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if nproc:
        few = range(2, 17)
        add = {"type": int, "choices": few, "default": nproc, "metavar": "N"}
        parser.add_argument("--nproc", **add, help="number of ranks, 2 to 16")
    for name, (default, text) in further.items():
        if isinstance(default, list):
            add = {"choices": default, "default": default[0]}
        else:
            add = {"type": number_like(default), "default": default, "metavar": "N"}
        parser.add_argument(f"--{name}", **add, help=text)
    picture = Path("tutorial-pictures") / f"{Path(main.__file__).stem}.png"
    add = {"type": Path, "default": picture, "metavar": "FILE"}
    parser.add_argument("--picture", **add, help="file to draw into, .png or .svg")
    return parser.parse_args()


def number_like(default):
    """Returns a function that reads a number: at least 0 if the default is 0, otherwise more."""

    def read(text):
        value = type(default)(text)
        if not 0 <= value <= 1e9 or value == 0 < default:
            least = "more than 0" if default else "at least 0"
            raise argparse.ArgumentTypeError(f"{text}: give a number of {least}, at most 1e9")
        return value

    read.__name__ = type(default).__name__  # which argparse names if `text` is no number
    return read
