"""Trains over a slow wire: gradients whole, in 16 bits, their largest part, and of low rank.

python -m tutorial.13_slow_wire.slow_wire
"""

from importlib import import_module
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.slow_wire import show

WIDTH, BATCH, SECONDS, RATE = 256, 64, 2.0, 2.0
SHARE, RANK = 0.01, 2  # of top-k, and of the matrices of low rank


def whole(gradient, state):
    """Returns the mean over ranks, and the bytes that a rank sends for it."""
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size(), gradient.nbytes


def bf16(gradient, state):
    """Like `whole`, in numbers of 16 bits."""
    half = (gradient / dist.get_world_size()).bfloat16()
    dist.all_reduce(half)
    return half.float(), half.nbytes


def top_k(gradient, state):
    """Sends only each rank's largest numbers, with their places; all others count as 0."""
    places = gradient.flatten().abs().topk(max(1, int(SHARE * gradient.numel()))).indices
    values = gradient.flatten()[places]
    all_places = [torch.empty_like(places) for _ in range(dist.get_world_size())]
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_places, places)
    dist.all_gather(all_values, values)
    total = torch.zeros(gradient.numel())
    for its_places, its_values in zip(all_places, all_values, strict=True):
        total.index_add_(0, its_places, its_values)
    # Counts a place as 4 bytes.
    return total.view_as(gradient) / dist.get_world_size(), 8 * len(places)


def low_rank(gradient, state):
    """PowerSGD: sends a matrix as a product of two thin ones (Vogels et al. 2019)."""
    if gradient.dim() < 2:
        return whole(gradient, state)
    if "q" not in state:  # the same on all ranks
        generator = torch.Generator().manual_seed(0)
        state["q"] = torch.randn(gradient.shape[1], RANK, generator=generator)
    p = gradient @ state["q"]
    dist.all_reduce(p)
    p = torch.linalg.qr(p).Q  # orthogonal columns of length 1
    q = gradient.t() @ p / dist.get_world_size()
    dist.all_reduce(q)
    state["q"] = q  # the next step begins with this one's: a step of power iteration
    return p @ q.t(), p.nbytes + q.nbytes


def train(average, keep, mbit):
    """Trains for `SECONDS`; returns a step's bytes and seconds, and the loss after each step."""
    if keep != "nothing":
        average = import_module(f"tutorial.13_slow_wire.{keep}").keep_error(average)
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    test = torch.randn(512, WIDTH)
    states = {parameter: {} for parameter in model.parameters()}
    losses, times, duration = [], [], torch.zeros(())
    while len(losses) * duration < SECONDS:
        generator = torch.Generator().manual_seed(100 * len(losses) + dist.get_rank())
        x = torch.randn(BATCH, WIDTH, generator=generator)
        begin, sent = perf_counter(), 0
        model.zero_grad()
        (model(x) - teacher(x)).square().mean().backward()
        with torch.no_grad():
            for parameter, state in states.items():
                mean, size = average(parameter.grad, state)
                parameter -= RATE * mean
                sent += size
        times.append(perf_counter() - begin)
        duration = torch.tensor(median(times) + 8 * sent / (1e6 * mbit))  # of a step, with the wire
        dist.broadcast(duration, 0)  # so that all ranks stop after the same step
        with torch.no_grad():
            losses.append((model(test) - teacher(test)).square().mean().item())
    return sent, duration.item(), losses


def main():
    """Trains in each way, and shows a row for each."""
    options = read_options(
        __doc__,
        nproc=2,
        mbit=(50.0, "Mbit/s of the wire that is assumed"),
        keep=(["nothing", "exercise", "solution"], "whose keep_error keeps what was not sent"),
    )
    ways = whole, bf16, top_k, low_rank
    arguments = options.keep, options.mbit
    found = {way.__name__: start(train, options.nproc, way, *arguments)[0] for way in ways}
    show(found, options.nproc, options.mbit, options.picture)


if __name__ == "__main__":
    main()
