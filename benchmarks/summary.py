"""Summary of a set of benchmarks: the ratios of training steps, read from their files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_from_scratch.bench.results import Run, Samples, fastest, text_table

Content = Mapping[str, Any]  # of a file


def summarise(folder: Path, since: float) -> str:
    """Tables this library's fastest contenders of the steps timed since `since`, a `time.time()`.

    Each model, backend and way has a row, with a ratio for each kind of contender.
    """
    paths = sorted(folder.glob("step_time-*.json"), key=lambda path: path.stat().st_mtime)
    # Older files are from another run.
    contents = [json.loads(path.read_text()) for path in paths if path.stat().st_mtime >= since]
    if not contents:
        return ""
    rows, notes = [], []
    for content in contents:
        samples = [Samples(**sample) for sample in content["samples"]]
        settings = content["settings"]
        run = Run(samples, settings["way"] != "alone", content.get("disturbed"))
        for backend in settings["backend"].split():
            row = [f"{_model(content)}; {backend}, {settings['nproc']} ranks, {settings['way']}"]
            row += [_median(run.alone), _median(run.torch_ddp)]
            for what in _OURS:
                own = (s for s in run.ours if _is_of(s.name, what) and _is_on(s.name, backend))
                best = fastest(own)
                row += [_ratio_in(run, best, run.torch_ddp), _ratio_in(run, best, run.alone)]
            # A ratio from a busy machine is no result.
            rows.append([*row[:1], *("?" for _ in row[1:])] if run.disturbed else row)
        if run.disturbed:
            notes.append(f"no verdict, {content['title']}: {run.disturbed}")
    headers = ["a training step", "no comm., ms", "torch DDP, ms"]
    for what in _OURS:
        headers += [f"{what} / torch", "/ no comm."]
    notes.append("the fastest setting of each, torch's DDP on gloo (nccl); AdamW where it says so")
    return "\n".join([text_table(headers, rows), *notes])


def _ratio_in(run: Run, one: Samples | None, other: Samples | None) -> str:
    ratio = None if one is None else run.ratio(one, other)
    return "-" if ratio is None else f"{ratio[0]:.2f}"


# Columns: the fastest Reducer with torch's optimizer, this library's optimizer, and that divided.
_OURS = ("Reducer", "ddp.SGD", "ddp.SGD, shard")


def _is_of(name: str, what: str) -> bool:
    kind = "Reducer" if name.startswith("Reducer") else "ddp.SGD"
    return what == kind + ", shard" * ("shard=" in name)


def _is_on(name: str, backend: str) -> bool:
    return name.partition(", ")[0].endswith(f" on {backend}")


def _model(content: Content) -> str:
    # The title begins with the workload's name.
    name: str = content["title"].partition("; ")[0]
    optimizer = content["settings"]["optimizer"]
    return name if optimizer == "sgd" else f"{name}, {optimizer}"


def _median(samples: Samples | None) -> str:
    return "-" if samples is None else f"{samples.quartiles[1]:.1f}"
