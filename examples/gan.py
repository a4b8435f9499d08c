"""A GAN: two models, two Reducers, and two optimizers that take turns.

    torchrun --nproc-per-node 2 examples/gan.py                 two ranks on gloo
    mpirun -n 2 python examples/gan.py --backend mpi            on MPI

The generator learns to make points on a circle. Its loss leaves gradients in the discriminator,
too. No optimizer uses them, so `no_sync()` keeps them from being averaged.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ddp_from_scratch as ddp


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def on_circle(count: int, device: torch.device) -> torch.Tensor:
    angles = 2 * math.pi * torch.rand(count, device=device)
    return torch.stack([angles.cos(), angles.sin()], 1)


def judged(logits: torch.Tensor, real: bool) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def train(options: argparse.Namespace) -> None:
    with ddp.process_group(options.backend) as world:
        torch.manual_seed(world.rank)  # each rank draws other points
        generator = network(8, 2).to(world.device)
        discriminator = network(2, 1).to(world.device)
        reducers, optimizers = [], []
        for model in (generator, discriminator):
            ddp.broadcast_parameters(model)
            reducer = ddp.Reducer(model, gradient_as_bucket_view=True)
            reducers.append(reducer)
            optimizers.append(
                ddp.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99), reducer=reducer)
            )
        of_generator, of_discriminator = optimizers
        for _ in range(options.steps):
            real = on_circle(options.batch, world.device)
            fake = generator(torch.randn(options.batch, 8, device=world.device))

            of_discriminator.zero_grad()
            # One forward pass for both: each gradient is then averaged once.
            logits = discriminator(torch.cat([real, fake.detach()]))
            on_real, on_fake = logits.chunk(2)
            (judged(on_real, True) + judged(on_fake, False)).backward()
            of_discriminator.step()

            of_generator.zero_grad()
            with reducers[1].no_sync():
                judged(discriminator(fake), True).backward()
            of_generator.step()
        sums = [ddp.check_sync(model) for model in (generator, discriminator)]
        if world.rank == 0:
            with torch.no_grad():
                made = generator(torch.randn(1000, 8, device=world.device))
            radius = made.norm(dim=1)
            print(f"radius of 1000 points: {radius.mean():.2f} +- {radius.std():.2f}, wanted 1.00")
            print(f"parameters {' and '.join(sums)} on {world.world_size} ranks")


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl", "mpi"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128, help="points for each rank in a step")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
