"""Trains a small language model on this repository's pages: alone, and on ranks in three ways.

python -m tutorial.20_language_model.language_model
"""

from importlib import import_module
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ddp_from_scratch as ddp
from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.language_model import show, write

naive = import_module("tutorial.04_naive.naive")
buckets = import_module("tutorial.07_buckets.buckets")

ROOT = Path(__file__).parents[2]
WIDTH, HEADS, LAYERS, CONTEXT, BYTES = 128, 4, 2, 64, 256


class Block(nn.Module):
    """A layer of a transformer: each place looks at those before it, then computes by itself."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.look, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.compute = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        """Takes and returns a tensor of the shape (windows, places, WIDTH)."""
        heads = self.look(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(-2, 1)
        found = scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        x = x + self.mix(found.transpose(1, 2).flatten(-2))
        return x + self.compute(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next byte of a text at each place."""

    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.next = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))

    def forward(self, text):
        """Takes bytes of the shape (windows, places); returns scores of all bytes at each place."""
        x = self.byte(text) + self.place.weight[: text.shape[1]]
        return self.next(self.blocks(x))


def read_text():
    """Returns the bytes of the repository's pages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tutorial/*/README.md")]
    text = b"".join(page.read_bytes() for page in sorted(pages))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(text, step, batch):
    """Returns this rank's windows of a step's batch, with the byte that follows each window."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
    begins = begins.tensor_split(dist.get_world_size())[dist.get_rank()]
    return torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins.tolist()])


def train(way, steps, batch):
    """Returns the seconds of each step, the mean loss of each, and the model."""
    torch.manual_seed(0)
    text, model = read_text(), Model()
    finish = {
        "alone": lambda: None,
        "naive": lambda: naive.sync_gradients(model),
        "buckets": lambda: parallel.finish(),
        "library": lambda: None,  # at the end of backward, by itself
    }[way]
    parallel = buckets.DataParallel(model, 1) if way == "buckets" else None
    _reducer = ddp.Reducer(model) if way == "library" else None  # averages while it is held
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    times, losses = [], []
    for step in range(steps):
        windows = batch_of(text, step, batch)
        dist.barrier()
        begin = perf_counter()
        optimizer.zero_grad()
        scores = model(windows[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        finish()
        optimizer.step()
        times.append(perf_counter() - begin)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return times, losses, model.state_dict()


def main():
    """Trains in each way, and shows times and losses; lets the last model write."""
    options = read_options(
        __doc__,
        nproc=2,
        steps=(40, "steps of each training"),
        batch=(16, "windows of 64 bytes in a step of each rank; alone takes those of all"),
        write=(0, "bytes that the trained model writes at the end"),
    )
    found, windows = {}, options.nproc * options.batch
    for way in ("alone", "naive", "buckets", "library"):
        nproc = 1 if way == "alone" else options.nproc
        found[way] = start(train, nproc, way, options.steps, windows)[0]
    show(found, windows * CONTEXT, options.picture)
    if options.write:
        model = Model()
        model.load_state_dict(found["library"][2])
        print(write(model, options.write, CONTEXT))


if __name__ == "__main__":
    main()
