"""A ResNet on CIFAR-10: AdamW, one cycle of the learning rate, mixed precision, clipping.

    torchrun --nproc-per-node 2 examples/resnet.py              two ranks on gloo
    mpirun -n 2 python examples/resnet.py --backend mpi         on MPI
    torchrun --nproc-per-node 8 examples/resnet.py --backend nccl --data data   eight GPUs, CIFAR-10

Without --data it trains on images of CIFAR-10's shape, made up from the classes' own colours.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision import datasets, models, transforms

import ddp_from_scratch as ddp


def made_up(count: int) -> TensorDataset:
    """Images of shape (3, 32, 32): a colour for each of ten classes, and noise."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.randn(10, 3, 1, 1, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(
        colours[labels] + torch.randn(count, 3, 32, 32, generator=generator), labels
    )


def cifar10(folder: Path) -> Dataset[tuple[torch.Tensor, int]]:
    """CIFAR-10 from a folder, with the usual shifts and flips."""
    steps = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))]
    return datasets.CIFAR10(folder, transform=transforms.Compose(steps))


def small_resnet() -> nn.Module:
    """ResNet-18 for images of 32 x 32: no stride and no pooling at its start."""
    model = models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def train(options: argparse.Namespace) -> None:
    with ddp.process_group(options.backend) as world:
        data = cifar10(options.data) if options.data else made_up(options.images)
        sampler = DistributedSampler(data, drop_last=True)  # asks the open group for its rank
        loader = DataLoader(data, options.batch, sampler=sampler, drop_last=True)
        model = small_resnet().to(world.device, memory_format=torch.channels_last)
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model, gradient_as_bucket_view=True, sync_buffers=True)
        optimizer = ddp.AdamW(model.parameters(), weight_decay=0.05, reducer=reducer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, epochs=options.epochs, steps_per_epoch=len(loader)
        )
        # On a GPU float16 with loss scaling, on a CPU bfloat16, which needs none.
        on_gpu = world.device.type == "cuda"
        dtype = torch.float16 if on_gpu else torch.bfloat16
        scaler = torch.amp.GradScaler(world.device.type, enabled=on_gpu)
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # else every epoch has the same order
            for images, labels in loader:
                images = images.to(world.device, memory_format=torch.channels_last)
                labels = labels.to(world.device)
                with torch.autocast(world.device.type, dtype):
                    loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                scaler.scale(loss).backward()  # here the gradients are averaged
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
            if world.rank == 0:
                print(f"epoch {epoch + 1}  loss of rank 0: {loss.item():.3f}", flush=True)
        checksum = ddp.check_sync(model, optimizers=[optimizer])
        if world.rank == 0:
            print(f"parameters {checksum} on {world.world_size} ranks")


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl", "mpi"])
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10")
    parser.add_argument("--images", type=int, default=512, help="how many to make up without it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="images for each rank in a step")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
