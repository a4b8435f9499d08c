"""Records the times of a model's layers, and writes a page that asks what a step would cost."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch.utils._pytree import tree_map_only

from ddp_from_scratch.bench.contenders import Optimizers
from ddp_from_scratch.bench.step_model import CALL_MS, ITEM, Gradient, Layers
from ddp_from_scratch.bench.workloads import Workload
from ddp_from_scratch.common import gpu
from ddp_from_scratch.core.layout import ALIGNMENT
from ddp_from_scratch.optim.squares import BLOCK
from ddp_from_scratch.optim.update_rules import CACHE_LINE
from ddp_from_scratch.watch.record import Clock, TimeMark
from ddp_from_scratch.watch.render import COLOURS
from ddp_from_scratch.watch.timeline import mark_arrivals

SKIP = 3  # steps in which allocators settle
CORE_GBS = 2.0  # what a core sends, receives and sums; gloo's sockets
_COPIED = 2**24  # elements


def record(
    of: Workload, device: torch.device, optimizers: Optimizers, steps: int = 10, threads: int = 1
) -> Layers:
    """Trains for a few steps without communication, and returns the medians of the times."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = of.model().to(device)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), of.batch())
    optimizer = optimizers.fused(model)
    clock = Clock(device)
    found, handles = mark_arrivals(dict(model.named_parameters()), clock.take)
    parts: list[tuple[float, ...]] = []  # forward, backward, optimizer
    ready: dict[str, list[float]] = {}
    for turn in range(SKIP + steps):
        found.clear()
        marks: list[TimeMark] = [clock.take()]
        loss = of.loss(model, batch)
        optimizer.zero_grad()
        marks.append(clock.take())
        loss.backward()
        marks.append(clock.take())
        optimizer.step()
        marks.append(clock.take())
        if turn < SKIP:
            continue
        begin, forwarded, over, end = map(clock.seconds, marks)
        parts.append((forwarded - begin, over - forwarded, end - over))
        for name, mark in found:
            ready.setdefault(name, []).append(clock.seconds(mark) - forwarded)
    for handle in handles:
        handle.remove()
    # A parameter without a gradient takes no part in the average.
    parameters = {name: p for name, p in model.named_parameters() if name in ready}
    moments = {name: _ms(times) for name, times in ready.items()}
    gradients = [
        Gradient(parameters[n].nbytes, moments[n]) for n in sorted(moments, key=moments.__getitem__)
    ]
    core_gbs = 0.0 if gpu.is_gpu(device) else CORE_GBS
    forward, backward, update = (_ms(column) for column in zip(*parts, strict=True))
    return Layers(of.name, forward, backward, update, gradients, copy_gbs(device), core_gbs)


def copy_gbs(device: torch.device) -> float:
    """Measures copies that miss the cache, in GB/s."""
    source = torch.ones(_COPIED, device=device)
    target = torch.ones_like(source)
    times = []
    for _ in range(5):
        gpu.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        gpu.synchronize(device)
        times.append(time.perf_counter() - began)
    return round(source.nbytes / min(times) / 1e9, 3)


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 3)


def as_html(models: Sequence[Layers]) -> str:
    """Returns a page that opens offline: `what_if.html` with the models in it."""
    data = {
        "models": [asdict(layers) for layers in models],
        "colours": COLOURS,
        "CALL_MS": CALL_MS,
        "ITEM": ITEM,
        "ALIGNMENT": ALIGNMENT,
        "BLOCK": BLOCK,
        "CACHE_LINE": CACHE_LINE,
    }
    template = Path(__file__).with_name("what_if.html").read_text(encoding="utf-8")
    # "</script" would end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{data}}", text)
