"""A small GPT learns to write English text, letter by letter: warm-up, cosine, clipping.

    torchrun --nproc-per-node 2 examples/gpt.py                 two ranks on gloo
    mpirun -n 4 python examples/gpt.py --backend mpi            four on MPI
    python examples/gpt.py --text my.txt --steps 5000           one process, your own text
    python examples/gpt.py --optimizer muon                     Muon for the blocks' matrices

The text is Python's own documentation, which comes with Python. The model is nanoGPT's at the size
of its smallest example.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ddp_from_scratch as ddp


class Block(nn.Module):
    """Causal self-attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (
            part.view(split).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next letter at each place of a text of at most `length` letters."""

    def __init__(self, letters: int, length: int, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight  # tied: one parameter, one gradient
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.letters(text) + self.places(places))))


def make_optimizer(name: str, model: GPT, reducer: ddp.Reducer) -> torch.optim.Optimizer:
    """Makes sgd, adamw or muon. Muon steps the blocks' matrices, and AdamW all else."""
    if name == "sgd":
        return ddp.SGD(model.parameters(), lr=0.1, momentum=0.9, reducer=reducer)
    if name == "adamw":
        return ddp.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, reducer=reducer)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.01},
        {"params": others, "lr": 3e-3, "weight_decay": 0.1, "use_muon": False},
    ]
    return ddp.Muon(groups, reducer=reducer)


def share_of_rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the steps, then down a cosine to a tenth of the learning rate."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def write(model: GPT, begin: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Continues a text of shape (1, letters) by `count` letters."""
    for _ in range(count):
        chances = model(begin[:, -length:])[:, -1].softmax(-1)
        begin = torch.cat([begin, torch.multinomial(chances, 1)], 1)
    return begin


def train(options: argparse.Namespace) -> None:
    text = options.text.read_text() if options.text else "\n".join(topics.values())
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    length, batch = options.length, options.batch
    with ddp.process_group(options.backend) as world:
        torch.manual_seed(world.rank)  # each rank takes other places of the text
        model = GPT(len(letters), length).to(world.device)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
        optimizer = make_optimizer(options.optimizer, model, reducer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: share_of_rate(step, options.steps)
        )
        for step in range(options.steps):
            places = torch.randint(len(data) - length, (batch,))
            taken = torch.stack([data[place : place + length + 1] for place in places])
            taken = taken.to(world.device)
            optimizer.zero_grad()
            loss = cross_entropy(model(taken[:, :-1]).flatten(0, 1), taken[:, 1:].flatten())
            loss.backward()  # .grad holds the averages, so every rank computes the same norm
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if world.rank == 0 and (step + 1) % max(1, options.steps // 10) == 0:
                print(f"step {step + 1:>5}  loss of rank 0: {loss.item():.3f}", flush=True)
        checksum = ddp.check_sync(model)
        if world.rank == 0:
            written = write(model, data[None, :1].to(world.device), length, options.write)
            print(f"parameters {checksum} on {world.world_size} ranks. It writes:")
            print("".join(letters[index] for index in written[0].tolist()))


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl", "mpi"])
    parser.add_argument("--optimizer", default="adamw", choices=["sgd", "adamw", "muon"])
    parser.add_argument(
        "--text", type=Path, help="file to learn from (default: Python's documentation)"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="texts for each rank in a step")
    parser.add_argument("--length", type=int, default=64, help="letters of a text")
    parser.add_argument("--write", type=int, default=200, help="letters that it writes at the end")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
