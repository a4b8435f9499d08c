"""Result files: JSON with every sample, and the machine."""

import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_from_scratch.bench.machine import describe


def write(
    name: str, title: str, samples: Any, *, settings: Mapping[str, Any], folder: Path
) -> None:
    """Writes every sample, and the machine, to a JSON file: a list of numbers is one line of it.

    Args:
        name: of the file.
        title: for people.
        samples: for `benchmarks.compare` a list of dicts with `name` and `milliseconds`, the
            contenders' samples of the same rounds.
        settings: of the measurement. `benchmarks.compare` compares files with equal ones.
        folder: where to.
    """
    save(name, content_of(title, samples, settings), folder)


def content_of(title: str, samples: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file; see `write`."""
    # Every sample and not the medians alone: `benchmarks.compare` takes ratios round by round.
    return {
        "title": title,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "machine": describe(),
        "samples": samples,
    }


def save(name: str, content: Mapping[str, Any], folder: Path) -> None:
    """Writes a content into a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(compact_json(content) + "\n")
    print(f"written to {os.path.relpath(path)}", flush=True)


def compact_json(value: Any, indent: str = "") -> str:
    """JSON with a line for each key, and a list of numbers on one line; floats of 6 digits."""
    inner = indent + " "
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(str(k))}: {compact_json(v, inner)}" for k, v in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        entries = [compact_json(entry, inner) for entry in value]
        opening, closing = "[]"
    else:
        return json.dumps(_rounded(value))
    separator = f",\n{inner}"
    return f"{opening}\n{inner}{separator.join(entries)}\n{indent}{closing}"


def _rounded(value: Any) -> Any:
    # 6 digits of a time are far below the noise of any measurement, and a third of the file.
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def on_terminal() -> bool:
    """True where standard error is a terminal; under mpirun only once the group is open."""
    return sys.stderr.isatty()
