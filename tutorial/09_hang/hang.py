"""Five programs that hang with gloo, each with a tool that says where.

python -m tutorial.09_hang.hang
"""

import io
import os
import tempfile
from contextlib import redirect_stderr
from datetime import timedelta
from time import sleep

import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
import ddp_from_scratch.node  # the backend "node", which compares calls
from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.sampler import Sampler, recorded
from tutorial.show.hang import reason, show

PATIENCE, STALL = 2.0, 0.7  # seconds until a rank gives up, and until a tool reports
if __name__ == "__mp_main__":  # on a rank, and before it joins the others
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"


def checkpoint(group):
    """Rank 0 saves after the third step; all ranks should wait for it, but only rank 0 does."""
    model = torch.nn.Linear(4, 1)
    for step in range(5):
        sleep(0.05)  # as long as a larger model computes
        model(torch.randn(8, 4)).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        if step == 2 and dist.get_rank() == 0:
            with tempfile.TemporaryFile() as file:
                torch.save(model.state_dict(), file)
            dist.barrier(group=group)


def uneven(group):
    """Rank 1 has one batch fewer than the others; the library's Reducer averages."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    reducer = ddp.Reducer(model, process_group=group, stall_after=STALL)
    for _ in range(4 if dist.get_rank() == 1 else 5):
        sleep(0.05)
        model(torch.randn(8, 4)).mean().backward()
    dist.barrier(group=group)
    reducer.remove()


def other_order(group):
    """Rank 1 averages its gradients from the end of the model, the others from its beginning."""
    model = torch.nn.Linear(4, 1)
    for _ in range(5):
        sleep(0.05)
        model(torch.randn(8, 4)).mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in reversed(gradients) if dist.get_rank() == 1 else gradients:
            dist.all_reduce(gradient, group=group)


def other_call(group):
    """Rank 0 finds its model good after the third step, and sends it; rank 1 does not expect it."""
    model = torch.nn.Linear(4, 1)
    for step in range(5):
        sleep(0.05)
        model(torch.randn(8, 4)).mean().backward()
        dist.all_reduce(model.weight.grad, group=group)
        if step == 2 and dist.get_rank() == 0:
            dist.broadcast(model.weight.detach(), 0, group=group)


def lost_error(group):
    """Rank 1 finds a spoilt example in its second batch, and continues with the third."""
    model = torch.nn.Linear(4, 1)
    for step in range(5):
        sleep(0.05)
        try:
            if dist.get_rank() == 1 and step == 1:
                raise ValueError("this example cannot be read")
            model(torch.randn(8, 4)).mean().backward()
        except ValueError:
            continue
        dist.all_reduce(model.weight.grad, group=group)


DETAIL = "other_call, with torch's DETAIL"
# By title, a program and its backend.
PROGRAMS = {
    "checkpoint": (checkpoint, "gloo"),
    "uneven": (uneven, "gloo"),
    "other_order": (other_order, "node"),
    "other_call": (other_call, "node"),
    DETAIL: (other_call, "gloo"),
    "lost_error": (lost_error, "gloo"),
}


def run(title):
    """Runs one of the programs; returns what the tools report on this rank."""
    program, backend = PROGRAMS[title]
    if title == DETAIL:  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does for a whole program
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=PATIENCE))
    sampler, printed, error = Sampler(__file__), io.StringIO(), "exits normally"
    sampler.start()
    try:
        with redirect_stderr(printed):
            program(group)
    except RuntimeError as raised:
        error = f"gives up after {sampler.seconds():.1f} s"
        error += reason(str(raised))
    sampler.ended.set()
    sampler.join()
    return sampler.at(2 * STALL), list(sampler.spans()), printed.getvalue(), recorded(), error


def main():
    """Runs the programs, and shows how each ends, and what its tool reports."""
    options = read_options(__doc__, nproc=2)
    found = {title: start(run, options.nproc, title) for title in PROGRAMS}
    show(found, options.picture)


if __name__ == "__main__":
    main()
