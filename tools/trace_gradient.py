"""What a reader of one training step has to follow: the package's functions that it calls.

    python tools/trace_gradient.py

A model of one layer on two gloo ranks, with the Reducer's defaults; forward and backward, the first
step and a later one. Prints the functions of the later one in the order of the first call, and for
both the number of calls, functions and files. tests/test_api.py holds them down.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

import torch

import ddp_from_scratch as ddp

PACKAGE = "ddp_from_scratch/"
Called = Counter[tuple[str, str]]  # file and function


def trace() -> tuple[Called, Called]:
    """The calls of the first and of the fourth step on this rank."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            file = frame.f_code.co_filename.rpartition(PACKAGE)[2]
            steps[-1][file, frame.f_code.co_qualname] += 1

    model = torch.nn.Linear(200, 200)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    steps: list[Called] = []
    for _ in range(4):
        model.zero_grad()
        steps.append(Counter())
        threading.setprofile(note)  # autograd's threads
        sys.setprofile(note)
        model(torch.randn(4, 200)).sum().backward()
        sys.setprofile(None)
        threading.setprofile(None)
    reducer.remove()
    return steps[0], steps[3]


def told(called: Called) -> str:
    """The counts of a step in one line."""
    files = {file for file, _ in called}
    return f"{called.total()} calls, {len(called)} functions, {len(files)} files"


def on_a_rank() -> None:
    """Traces, and prints on rank 0."""
    with ddp.process_group("gloo") as world:
        first, later = trace()
        if world.rank == 0:
            for (file, name), count in later.items():
                print(f"{count:4} {file:40} {name}")
            print(f"first step: {told(first)}\nlater steps: {told(later)}")


if __name__ == "__main__":
    sys.exit(ddp.start_ranks(on_a_rank, [2]))
