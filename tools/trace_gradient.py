"""python tools/trace_gradient.py [views]: print the package's functions that a backward pass calls.

One Linear layer, gloo, a world of one, every option off, the fourth step; in the order of the first
call. The last line counts calls, functions and files: what a reader of the way has to follow.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

import torch

import ddp_from_scratch as ddp

PACKAGE = "ddp_from_scratch/"
STEPS = 4


def trace(views: bool) -> Counter[tuple[str, str]]:
    """The calls of the last step's backward pass, by file and function."""
    called: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            file = frame.f_code.co_filename.rpartition(PACKAGE)[2]
            called[file, frame.f_code.co_qualname] += 1

    with ddp.process_group("gloo"):
        model = torch.nn.Linear(200, 200)
        ddp.Reducer(model, gradient_as_bucket_view=views, shared_memory=False)
        for step in range(STEPS):
            model.zero_grad()
            loss = model(torch.randn(4, 200)).sum()
            if step == STEPS - 1:
                threading.setprofile(note)  # autograd's threads
                sys.setprofile(note)
            loss.backward()
            sys.setprofile(None)
            threading.setprofile(None)
    return called


def main() -> None:
    """Print a line for each function, and the counts."""
    called = trace(views="views" in sys.argv)
    for (file, name), count in called.items():
        print(f"{count:4} {file:40} {name}")
    files = {file for file, _ in called}
    print(f"{called.total()} calls, {len(called)} functions, {len(files)} files")


if __name__ == "__main__":
    main()
