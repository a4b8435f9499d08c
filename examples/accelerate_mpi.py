"""accelerate under mpirun, on the mpi backend.

    mpirun -n 2 python examples/accelerate_mpi.py

The import of `ddp_from_scratch.mpi` registers the backend; accelerate then finds it by itself.
Nothing else in the program is specific to MPI.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddp_from_scratch.mpi  # noqa: F401  # registers the backend


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
    backend = dist.get_backend() if dist.is_initialized() else "none"
    accelerator.print(f"loss {mean:.3f} on {accelerator.num_processes} ranks, backend {backend}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
