"""Summary of a set of benchmarks: the few numbers that matter, read from their files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory, overlap
from benchmarks.harness.wire_contenders import BF16, POWER_SGD, REDUCER, SGD, TORCH
from benchmarks.harness.wire_meter import Result
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, REFERENCES
from ddp_from_scratch.bench.samples import Samples
from ddp_from_scratch.bench.verdict import Run, fastest, text_table
from ddp_from_scratch.bench.workloads import WORKLOADS

Content = Mapping[str, Any]  # of a file


def summarise(folder: Path, since: float) -> str:
    """Returns a table for each benchmark that wrote files since `since`, a `time.time()`."""
    contents = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        if path.stat().st_mtime >= since  # older files are from another run
    ]
    texts = []
    for name, table in TABLES.items():
        own = [c for c in contents if c.get("settings", {}).get("benchmark") == name]
        if own:
            texts.append(table(own))
    return "\n\n".join(texts)


def step_times(contents: Sequence[Content]) -> str:
    """A row for each model, backend and way: this library's fastest contender of each kind."""
    rows, notes = [], []
    for content in contents:
        samples = [Samples(**sample) for sample in content["samples"]]
        settings = content["settings"]
        run = Run(samples, settings["way"] != "alone", content.get("disturbed"))
        for backend in settings["backend"].split():
            row = [f"{_model(content)}; {backend}, {settings['nproc']} ranks, {settings['way']}"]
            row += [_median(run.alone), _median(run.torch_ddp)]
            for what in ("Reducer", "ddp.", "NodeShared"):
                own = (s for s in run.ours if s.name.startswith(what) and _is_on(s.name, backend))
                best = fastest(own)
                row += [_ratio_in(run, best, run.torch_ddp), _ratio_in(run, best, run.alone)]
            # A ratio from a busy machine is no result.
            rows.append([*row[:1], *("?" for _ in row[1:])] if run.disturbed else row)
        if run.disturbed:
            notes.append(f"no verdict, {content['title']}: {run.disturbed}")
    headers = ["a training step", "no comm., ms", "torch DDP, ms"]
    for what in ("Reducer", "ddp.SGD", "NodeSharedSGD"):
        headers += [f"{what} / torch", "/ no comm."]
    notes.append("the fastest setting of each, torch's DDP on gloo (nccl); AdamW where it says so")
    return "\n".join([text_table(headers, rows), *notes])


def _ratio_in(run: Run, one: Samples | None, other: Samples | None) -> str:
    ratio = None if one is None else run.ratio(one, other)
    return "-" if ratio is None else f"{ratio[0]:.2f}"


def _is_on(name: str, backend: str) -> bool:
    return name.partition(", ")[0].endswith(f" on {backend}")


def _model(content: Content) -> str:
    # The title begins with the workload's name.
    name: str = content["title"].partition("; ")[0]
    optimizer = content["settings"]["optimizer"]
    return name if optimizer == "sgd" else f"{name}, {optimizer}"


def overlaps(contents: Sequence[Content]) -> str:
    """A row for each model on each backend: the best caps."""
    rows = []
    for content in contents:
        samples = [Samples(**sample) for sample in content["samples"]]
        found = overlap.overlaps(samples, content["settings"]["caps"])
        best = min(found, key=lambda o: o.milliseconds)
        torch_best = min(found, key=lambda o: o.torch_milliseconds)
        row = [_place(content), f"{best.cap:g}", f"{best.milliseconds:.1f}"]
        row += [f"{100 * best.hidden[0]:.0f} %", f"{torch_best.cap:g}"]
        row += [f"{torch_best.torch_milliseconds:.1f}", f"{100 * torch_best.torch_hidden[0]:.0f} %"]
        rows.append(row)
    headers = ["the best bucket size", "MB", "ms", "hidden", "torch DDP, MB", "ms", "hidden"]
    return text_table(headers, rows)


def memories(contents: Sequence[Content]) -> str:
    """A row for each model on each backend: the peak of the node."""
    rows = []
    for content in contents:
        peaks = {s["name"]: memory.growth(s, "node") for s in content["samples"]}
        # The best of torch's settings, as in ratios of times.
        torch_ddp = min((peaks[n] for n in REFERENCES if n in peaks), default=None)
        bases = (*REFERENCES, NO_COMMUNICATION)
        least = min((n for n in peaks if n not in bases), key=peaks.__getitem__, default=None)
        row = [_place(content)]
        row += [_megabytes(peaks.get(NO_COMMUNICATION)), _megabytes(torch_ddp)]
        row += [least or "-", _megabytes(peaks[least] if least else None)]
        rows.append(row)
    headers = ["peak memory of the node", "no comm., MB", "torch DDP, MB", "least of ours", "MB"]
    return text_table(headers, rows)


def wires(contents: Sequence[Content]) -> str:
    """A row for each model across each wire: ratios to torch's DDP and to what the wire allows."""
    rows = []
    for content in contents:
        results = {s["name"]: Result(**s) for s in content["samples"]}
        samples = {name: Samples(name, r.milliseconds) for name, r in results.items()}
        torch_ddp = samples[TORCH]
        row = [f"{content['settings']['gbit']:g} Gbit/s, {_place(content)}"]
        row += [_median(samples[NO_COMMUNICATION]), _median(torch_ddp)]
        for name in (TORCH, REDUCER, SGD, BF16, POWER_SGD):
            over_bound = results[name].over_bound
            row += [f"{samples[name].ratio_to(torch_ddp)[0]:.2f}"] if name != TORCH else []
            row.append("-" if over_bound is None else f"{over_bound:.2f}")
        rows.append(row)
    headers = ["a step between two hosts", "no comm., ms", "torch DDP, ms", "/ bound"]
    for name in ("Reducer", "ddp.SGD", "bf16", "PowerSGD"):
        headers += [f"{name} / torch", "/ bound"]
    note = (
        "bound: the first bucket's time and the wire's, for the bytes that must cross it, and no "
        "less than without communication"
    )
    return f"{text_table(headers, rows)}\n{note}"


TABLES: dict[str, Callable[[Sequence[Content]], str]] = {
    "step_time": step_times,
    "overlap": overlaps,
    "memory": memories,
    "two_hosts": wires,
}


def _place(content: Content) -> str:
    settings = content["settings"]
    model = WORKLOADS[settings["model"]].name
    return f"{settings['backend']}, {settings['nproc']} ranks: {model}"


def _median(samples: Samples | None) -> str:
    return "-" if samples is None else f"{samples.quartiles[1]:.1f}"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"
