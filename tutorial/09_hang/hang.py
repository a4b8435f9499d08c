"""Four programs that hang with gloo, each with a tool that says where.

python -m tutorial.09_hang.hang
"""

import io
import os
import pickle
import sys
import tempfile
import threading
import traceback
from contextlib import redirect_stderr
from datetime import timedelta
from time import perf_counter, sleep

import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
import ddp_from_scratch.node  # the backend "node", which compares calls
from tutorial import pictures
from tutorial.options import read_options
from tutorial.ranks import start

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
    """Rank 1 has one batch less than the others; the library's Reducer averages."""
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


PROGRAMS = {checkpoint: "gloo", uneven: "gloo", other_order: "node", lost_error: "gloo"}


class Sampler(threading.Thread):
    """Looks at the main thread two hundred times per second, and records its line."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begin, self.seen, self.ended = perf_counter(), [], threading.Event()

    def run(self):
        """Samples until `ended` is set."""
        while not self.ended.wait(0.005):
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            own = [frame for frame in stack if frame.filename == __file__ and frame.name != "run"]
            if own:
                self.seen.append((perf_counter() - self.begin, own[-1]))

    def at(self, moment):
        """Returns the main thread's line at a moment; None if the program had ended."""
        later = [frame for time, frame in self.seen if time >= moment]
        return f"{later[0].name}, line {later[0].lineno}: {later[0].line}" if later else None

    def spans(self):
        """Yields times of computing and of waiting in collectives, in ms, for the picture."""
        for (begin, frame), (end, _) in zip(self.seen, self.seen[1:], strict=False):
            waits = "dist." in frame.line or "backward" in frame.line
            yield "wait" if waits else "computing", 1000 * begin, 1000 * end


def recorded():
    """Returns what torch's flight recorder has recorded on this rank."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
    calls = [entry for entry in entries if entry["profiling_name"] == "gloo:all_reduce"]
    return f"{len(calls)} calls of all_reduce, sizes {calls[-1]['input_sizes']}" if calls else ""


def run(name, backend):
    """Runs one of the programs; returns what the tools report on this rank."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=PATIENCE))
    sampler, printed, error = Sampler(), io.StringIO(), "ends well"
    sampler.start()
    try:
        with redirect_stderr(printed):
            globals()[name](group)
    except RuntimeError as raised:
        error = f"gives up after {perf_counter() - sampler.begin:.1f} s"
        if "failed: " in str(raised):  # gloo's own errors contain nothing more
            error += ":\n    " + str(raised).split("failed: ")[1].replace("; ", ";\n    ")
    sampler.ended.set()
    sampler.join()
    return sampler.at(2 * STALL), list(sampler.spans()), printed.getvalue(), recorded(), error


def main():
    """Prints how each program ends, and what its tool reports; draws when ranks waited."""
    options = read_options(__doc__, nproc=2)
    panels = {}
    for program, backend in PROGRAMS.items():
        name = program.__name__
        ranks = list(enumerate(start(run, options.nproc, name, backend)))
        print(name)
        for rank, (line, _, printed, record, error) in ranks:
            print(f"  rank {rank}: {error}")
            if program is checkpoint:
                print(f"    in {line}")
            if program is uneven and printed:
                print("    " + printed.strip().replace("\n", "\n    "))
            if program is lost_error:
                print(f"    {record}")
        panels[name] = {f"rank {rank}": spans for rank, (_, spans, *_) in ranks}
    pictures.timelines(options.picture, panels)


if __name__ == "__main__":
    main()
