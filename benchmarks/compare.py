"""python -m benchmarks.compare OLD.json NEW.json: finds what got slower or faster beyond the noise.

Examples:
    python -m benchmarks.compare OLD.json NEW.json
    python -m benchmarks.compare OLD.json NEW.json --reference "torch DDP on gloo, views"

Times do not travel from one machine to another, nor from a busy hour to a quiet one. So each
contender's ratio to a reference that ran in the same rounds is compared: a step without
communication, unless --reference names another. The change is the new median ratio over the old
one. It counts if its bootstrap interval leaves out 1, and if it is larger than --at-least, since
two runs of one program differ by more than the noise within each. The interval is so wide that in
95 of 100 comparisons of a program with itself not one contender falls outside.

Exit code 0: nothing got slower. 1: something did. 2: the files cannot be compared.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.options import make_parser
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.launch.rank_process import run_to_exit

# By preference: a step without communication does not depend on what is compared.
REFERENCES = ("no communication", "torch DDP on gloo, views", "torch DDP on nccl, views")
_DRAWS = 10_000


@dataclass(frozen=True)
class Results:
    """The content of a file."""

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    milliseconds: Mapping[str, np.ndarray]  # by contender; all have the same rounds

    def ratios(self, name: str, reference: str) -> np.ndarray:
        ratios: np.ndarray = self.milliseconds[name] / self.milliseconds[reference]
        return ratios


@dataclass(frozen=True)
class Change:
    """A contender's median ratio to the reference in the old and the new file."""

    name: str
    old: float
    new: float
    low: float  # the ends of the interval of new / old
    high: float
    verdict: str  # "slower", "faster" or ""


def main() -> int:
    parser = make_parser("benchmarks.compare", __doc__, results=False)
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--reference", metavar="NAME", help="default: no communication")
    text = "smaller changes do not count (default: 0.03)"
    parser.add_argument("--at-least", type=float, default=0.03, metavar="PART", help=text)
    options = parser.parse_args()
    if not 0 <= options.at_least < 1:
        raise UsageError(f"--at-least must be 0 or more and less than 1, got {options.at_least:g}")
    old, new = read(options.old), read(options.new)
    reference = common_reference(old, new, options.reference)
    changes = compare(old, new, reference, options.at_least)
    report(old, new, reference, changes)
    return int(any(change.verdict == "slower" for change in changes))


def read(path: Path) -> Results:
    """Reads a file that a benchmark wrote.

    Raises:
        UsageError: it is unreadable, not a result, or has no contenders timed in the same rounds.
    """
    try:
        content = json.loads(path.read_text())
        milliseconds = {
            sample["name"]: np.array(sample["milliseconds"], dtype=float)
            for sample in content["samples"]
        }
        machine, settings = dict(content["machine"]), dict(content["settings"])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:  # ValueError: also JSON and unicode
        raise UsageError(
            f"{path} holds no timed contenders as step_time and overlap write them "
            f"({type(error).__name__}: {error})"
        ) from error
    shapes = {times.shape for times in milliseconds.values()}
    right = len(shapes) == 1 and all(len(s) == 1 and s[0] >= 2 for s in shapes)
    if not right or not all((times > 0).all() for times in milliseconds.values()):
        raise UsageError(f"{path} does not hold two or more times of each contender")
    return Results(settings, machine, milliseconds)


def common_reference(old: Results, new: Results, wanted: str | None) -> str:
    """Returns the reference of the ratios in both files.

    Raises:
        UsageError: the files are of different benchmarks, or the reference is not in both.
    """
    if old.settings != new.settings:
        keys = sorted(old.settings.keys() | new.settings.keys())
        differing = [k for k in keys if old.settings.get(k) != new.settings.get(k)]
        pairs = ", ".join(f"{k} {old.settings.get(k)} and {new.settings.get(k)}" for k in differing)
        raise UsageError(f"the files are of different benchmarks: {pairs}")
    candidates = REFERENCES if wanted is None else (wanted,)
    for name in candidates:
        if name in old.milliseconds and name in new.milliseconds:
            return name
    raise UsageError(f"not in both files: {' or '.join(candidates)}")


def compare(old: Results, new: Results, reference: str, at_least: float = 0.03) -> list[Change]:
    """Returns the change of every contender in both files, in the new file's order."""
    names = [n for n in new.milliseconds if n in old.milliseconds and n != reference]
    chance = 0.05 / max(1, len(names))  # of one contender (Bonferroni), so 5 % of any
    changes = []
    for name in names:
        random = np.random.default_rng(0)  # the same files give the same verdict
        before, after = old.ratios(name, reference), new.ratios(name, reference)
        # Drawn separately, since two files share no rounds.
        drawn = _medians(after, random) / _medians(before, random)
        low, high = np.quantile(drawn, [chance / 2, 1 - chance / 2])
        was, is_now = float(np.median(before)), float(np.median(after))
        verdict = ""
        # A change must exceed the noise and be large enough: two runs of one program differ by more
        # than the noise within each.
        if low > 1 and is_now / was > 1 + at_least:
            verdict = "slower"
        elif high < 1 and was / is_now > 1 + at_least:
            verdict = "faster"
        changes.append(Change(name, was, is_now, float(low), float(high), verdict))
    return changes


def _medians(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn: np.ndarray = np.median(random.choice(values, (_DRAWS, len(values))), axis=1)
    return drawn


def report(old: Results, new: Results, reference: str, changes: list[Change]) -> None:
    for key in sorted(old.machine.keys() | new.machine.keys()):
        if old.machine.get(key) != new.machine.get(key):
            print(f"{key}: {old.machine.get(key)}, then {new.machine.get(key)}")
    rows = [
        [
            c.name,
            f"{c.old:.3f}",
            f"{c.new:.3f}",
            f"{100 * (c.new / c.old - 1):+.1f} %",
            f"{100 * (c.low - 1):+.1f} to {100 * (c.high - 1):+.1f} %",
            c.verdict,
        ]
        for c in changes
    ]
    headers = [f"time / {reference}", "old", "new", "change", "interval", ""]
    print(text_table(headers, rows))
    for word, some, others in (("only in the old", old, new), ("only in the new", new, old)):
        only = [name for name in some.milliseconds if name not in others.milliseconds]
        if only:
            print(f"{word} file: {'; '.join(only)}")
    sys.stdout.flush()


if __name__ == "__main__":
    run_to_exit(main)
