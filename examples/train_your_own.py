"""A training loop of your own on several ranks, with checkpoints and a stop that saves.

    python examples/train_your_own.py                                one process
    torchrun --nproc-per-node 2 examples/train_your_own.py           two ranks on gloo
    mpirun -n 2 python examples/train_your_own.py --backend mpi      two on MPI

The model learns to predict the next letter of a text, Python's own documentation. After each epoch,
and on a signal such as Ctrl-C, all ranks save; the same command continues.
docs/how-to/your-loop.md explains what differs from a loop for one process.
"""

import argparse
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import ddp_from_scratch as ddp

SEEN = 16  # letters, from which the model predicts the next one


def load_text(length: int) -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Returns pieces of the text to train and to test with, and the letters that it has."""
    text = "\n".join(topics[name] for name in sorted(topics))[:length]
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    pieces = torch.tensor([number[letter] for letter in text]).unfold(0, SEEN + 1, 1)
    train, test = pieces.split([len(pieces) * 9 // 10, len(pieces) - len(pieces) * 9 // 10])
    return (
        TensorDataset(train[:, :-1], train[:, -1]),
        TensorDataset(test[:, :-1], test[:, -1]),
        letters,
    )


def make_model(letters: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(letters, 16),
        nn.Flatten(),
        nn.Linear(16 * SEEN, 128),
        nn.ReLU(),
        nn.Linear(128, letters),
    )


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, world: ddp.World) -> tuple[float, float]:
    """Returns the mean loss and the accuracy on the whole test set, on every rank. Collective."""
    mine = Subset(test, range(world.rank, len(test), world.world_size))  # each sample once
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)
    model.eval()
    for x, y in DataLoader(mine, 256):
        x, y = x.to(world.device), y.to(world.device)
        outputs = model(x)
        totals[0] += cross_entropy(outputs, y, reduction="sum")
        totals[1] += (outputs.argmax(1) == y).sum()
        totals[2] += len(y)
    model.train()
    dist.all_reduce(totals)  # sums, because ranks have different numbers of samples
    loss, correct, count = totals.tolist()
    return loss / count, correct / count


@torch.no_grad()
def write(model: nn.Module, letters: list[str], world: ddp.World) -> str:
    """Returns a text that the model writes. For one rank alone: a forward pass sends nothing."""
    text = torch.zeros(1, SEEN, dtype=torch.int64, device=world.device)
    for _ in range(60):
        text = torch.cat([text, model(text[:, -SEEN:]).argmax(1, keepdim=True)], 1)
    return "".join(letters[index] for index in text[0, SEEN:].tolist())


def save(file: Path, state: dict[str, Any], world: ddp.World) -> None:
    """Writes a checkpoint on rank 0. Collective."""
    if world.rank == 0:
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # never half a checkpoint
    dist.barrier()  # the launcher may end all ranks once one has exited


def train(options: argparse.Namespace) -> int:
    """Trains until the end or a signal; returns the exit code."""
    train_set, test_set, letters = load_text(options.length)
    with ddp.process_group(options.backend) as world, ddp.StopSignal() as stop:
        torch.manual_seed(0)  # the same model on every rank
        model = make_model(len(letters)).to(world.device)
        saved: dict[str, Any] = {}  # stays empty without a checkpoint
        if options.checkpoint.exists():
            saved = torch.load(options.checkpoint, world.device, weights_only=True)
            model.load_state_dict(saved["model"])
        dist.barrier()  # all have read before rank 0 writes
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, ready_order=saved.get("ready_order"))
        optimizer = ddp.AdamW(
            model.parameters(), lr=options.lr, reducer=reducer, shard=options.shard
        )
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
        sampler = DistributedSampler(train_set, world.world_size, world.rank)
        loader = DataLoader(train_set, options.batch, sampler=sampler)
        steps = len(loader) // options.accumulate
        epoch, step, number = saved.get("epoch", 0), saved.get("step", 0), 0
        while epoch < options.epochs and not number:
            sampler.set_epoch(epoch)  # another order in each epoch, the same on all ranks
            batches = islice(loader, step * options.accumulate, None)
            while step < steps and not number:
                optimizer.zero_grad()
                for remaining in reversed(range(options.accumulate)):
                    x, y = (part.to(world.device) for part in next(batches))
                    with reducer.no_sync() if remaining else nullcontext():
                        with torch.autocast(world.device.type, torch.bfloat16, options.bf16):
                            loss = cross_entropy(model(x), y)
                        (loss / options.accumulate).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                number = stop.requested()  # on all ranks after the same step
            if not number:
                loss, accuracy = evaluate(model, test_set, world)
                if world.rank == 0:
                    print(f"epoch {epoch + 1}: loss {loss:.3f}, {accuracy:.1%} right", flush=True)
                epoch, step = epoch + 1, 0
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),  # on all ranks: collective with shards
                "ready_order": reducer.ready_order,
                "epoch": epoch,
                "step": step,
            }
            save(options.checkpoint, state, world)
        checksum = ddp.check_sync(model, optimizers=[optimizer])
        if world.rank == 0:
            place = f"stopped in epoch {epoch + 1} after step {step}/{steps}" if number else "done"
            print(f"{place}: parameters {checksum} on {world.world_size} ranks, saved")
            print(f"it writes: {write(model, letters, world)!r}", flush=True)
    return 128 + number if number else 0  # as a shell reports a signal


def main() -> int:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("gloo", "nccl", "mpi"), default="gloo")
    parser.add_argument("--checkpoint", type=Path, default=Path("train_your_own.pt"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="pieces of text on each rank")
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--shard", choices=("none", "node", "world"), default="none")
    parser.add_argument("--length", type=int, default=20_000, help="letters of the text")
    return train(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
