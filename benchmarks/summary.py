"""Summary of a set of benchmarks: the few numbers that matter, read from their files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory, overlap
from benchmarks.harness.contenders import GLOO_REFERENCES, NO_COMMUNICATION, REFERENCES
from benchmarks.harness.text_table import text_table
from benchmarks.harness.timing import Samples
from benchmarks.harness.wire_contenders import BF16, POWER_SGD, REDUCER, SGD, TORCH
from benchmarks.harness.wire_meter import Result, with_computing
from benchmarks.harness.workloads import WORKLOADS
from benchmarks.step_time import reference

Content = Mapping[str, Any]  # of a file


def summarise(folder: Path, since: float) -> str:
    """A table for each benchmark that has written files since then (`time.time()`)."""
    contents = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        if path.stat().st_mtime >= since  # older ones are another run's
    ]
    texts = []
    for name, table in TABLES.items():
        own = [c for c in contents if c.get("settings", {}).get("benchmark") == name]
        if own:
            texts.append(table(own))
    return "\n\n".join(texts)


def step_times(contents: Sequence[Content]) -> str:
    """A row for each model on each backend: the fastest Reducer, and of each SGD here."""
    rows = []
    for content in contents:
        samples = [Samples(**sample) for sample in content["samples"]]
        bases = (*REFERENCES, *GLOO_REFERENCES, NO_COMMUNICATION)
        ours = [s.name for s in samples if s.name not in bases]
        flat = reference(samples, tuple(n for n in ours if n.startswith("ddp.SGD")))
        shared = reference(samples, tuple(n for n in ours if n.startswith("NodeSharedSGD")))
        others = tuple(n for n in ours if not n.startswith(("ddp.SGD", "NodeSharedSGD")))
        averaged = reference(samples, others)
        torch_ddp = reference(samples, REFERENCES)
        # In a gloo job torch's DDP on gloo is torch's DDP.
        on_gloo = torch_ddp if content["settings"]["backend"] == "gloo" else None
        on_gloo = on_gloo or reference(samples, GLOO_REFERENCES)
        alone = reference(samples, (NO_COMMUNICATION,))
        row = [_place(content), _median(alone), _median(torch_ddp)]
        row += [_ratio(averaged, torch_ddp), _ratio(averaged, alone)]
        row += [_ratio(flat, torch_ddp), _ratio(flat, on_gloo), _ratio(flat, alone)]
        row += [_ratio(shared, on_gloo), _ratio(shared, alone)]
        rows.append(row)
    headers = ["a training step", "no comm., ms", "torch DDP, ms", "Reducer / torch"]
    headers += ["/ no comm.", "ddp.SGD / torch", "/ it on gloo", "/ no comm."]
    headers += ["NodeSharedSGD / torch on gloo", "/ no comm."]
    note = "the fastest setting of each; a Reducer with torch's SGD, torch's DDP with the same"
    return f"{text_table(headers, rows)}\n{note}"


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
        # The better of torch's settings, as in ratios of times.
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
        results = {r.name: r for r in with_computing([Result(**s) for s in content["samples"]])}
        samples = {name: Samples(name, r.milliseconds) for name, r in results.items()}
        torch_ddp = samples[TORCH]
        row = [f"{content['settings']['gbit']:g} Gbit/s, {_place(content)}"]
        row += [_median(samples[NO_COMMUNICATION]), _median(torch_ddp)]
        for name in (TORCH, REDUCER, SGD, BF16, POWER_SGD):
            over_bound = results[name].over_bound
            row += [_ratio(samples[name], torch_ddp)] if name != TORCH else []
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


def _ratio(samples: Samples | None, other: Samples | None) -> str:
    return "-" if samples is None or other is None else f"{samples.ratio_to(other)[0]:.2f}"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"
