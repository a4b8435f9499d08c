"""What a reader of one training step has to follow: the package's functions that it calls.

    python tools/trace_gradient.py

A model of four layers in four buckets on two gloo ranks, with the Reducer's defaults: the first
`backward()`, a later one, and a later `backward_and_step`. Prints the functions of the later steps
in the order of the first call, and for all the number of calls, functions and files.
tests/test_api.py holds them down.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch

import ddp_from_scratch as ddp

PACKAGE = "ddp_from_scratch/"
Called = Counter[tuple[str, str]]  # file and function


class Steps(NamedTuple):
    """What this rank calls in three steps, forward and backward."""

    first: Called
    later: Called
    backward_and_step: Called


def trace() -> Steps:
    """Traces on this rank."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            file = frame.f_code.co_filename.rpartition(PACKAGE)[2]
            steps[-1][file, frame.f_code.co_qualname] += 1

    def traced(step: Callable[[torch.Tensor], object]) -> None:
        steps.append(Counter())
        threading.setprofile(note)  # autograd's threads
        sys.setprofile(note)
        step(model(torch.randn(4, 200)).sum())
        sys.setprofile(None)
        threading.setprofile(None)
        model.zero_grad()

    gc.collect()  # Reducers of earlier programs in this process would share the launch order
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    ddp.broadcast_parameters(model)
    steps: list[Called] = []
    reducer = ddp.Reducer(model, bucket_cap_mb=4 * 201 * 200 / 2**20)  # a layer each
    for _ in range(4):
        traced(torch.Tensor.backward)
    assert len(reducer.buckets) == 4
    optimizer = ddp.SGD(model.parameters(), lr=0.1, reducer=reducer)
    for _ in range(4):
        traced(optimizer.backward_and_step)
    reducer.remove()
    return Steps(steps[0], steps[3], steps[-1])


def told(called: Called) -> str:
    """The counts of a step in one line."""
    files = {file for file, _ in called}
    return f"{called.total()} calls, {len(called)} functions, {len(files)} files"


def on_a_rank() -> None:
    """Traces, and prints on rank 0."""
    with ddp.process_group("gloo") as world:
        steps = trace()
        if world.rank == 0:
            for name, called in steps._asdict().items():
                print(f"{name}: {told(called)}")
                for (file, function), count in called.items() if name != "first" else ():
                    print(f"{count:4} {file:40} {function}")


if __name__ == "__main__":
    sys.exit(ddp.start_ranks(on_a_rank, [2]))
