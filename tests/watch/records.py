"""A record of one step of two ranks, with numbers that are easy to follow."""

from dataclasses import replace

import torch

from ddp_from_scratch.watch.recorder import Marks, Record, StepMarks, rank_times, step_times

HOST = Marks(torch.device("cpu"))
LAYOUT = (("b",), ("a",))
PASS = [("forward", 0.0), ("forwarded", 0.030), ("backward", 0.030)]
NBYTES = {"a": 2**21, "b": 2**20}


def marks(late: float = 0.0) -> StepMarks:
    """A step of 100 ms; gradients come `late` seconds later."""

    def bucket(pack: float, landed: float, waited: float) -> dict[str, float]:
        launched, wait, unpacked = pack + 0.002, 0.070 + late, waited + 0.001
        return {
            **{"pack": pack, "launched": launched, "landed": landed, "wait": wait},
            **{"waited": waited, "unpack": waited, "unpacked": unpacked},
        }

    return StepMarks(
        iteration=7,
        layout=LAYOUT,
        arrived=[("b", 0.040 + late), ("a", 0.060 + late)],
        buckets={
            0: bucket(0.040 + late, 0.064, 0.070 + late),
            1: bucket(0.060 + late, 0.080, max(0.080, 0.070 + late)),
        },
        events=[
            *PASS,
            ("all launched", 0.070 + late),
            ("averaged", 0.082),
            *(("step", 0.085), ("stepped", 0.100)),
        ],
    )


def record(late: float = 0.010) -> Record:
    """Rank 1 launches each bucket `late` seconds after rank 0."""
    ranks = [rank_times(r, HOST, marks(late * r)) for r in range(2)]
    steps = (step_times(7, LAYOUT, ranks),)
    return Record("Net, 3 MiB of gradients, 2 ranks by gloo", NBYTES, ("host", "host"), 0.0, steps)


def with_steps(*lengths: float) -> Record:
    (step,) = record().steps
    steps = [
        replace(step, iteration=n, ranks=tuple(replace(r, end=length) for r in step.ranks))
        for n, length in enumerate(lengths)
    ]
    return replace(record(), steps=tuple(steps))
