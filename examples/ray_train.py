"""Ray Train: its TorchTrainer starts two workers and their group; the Reducer averages.

python examples/ray_train.py
"""

import argparse
import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddp_from_scratch as ddp


def train(options: dict[str, int]) -> None:
    """Runs on every worker, in a group that Ray has opened."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)  # in place of ray.train.torch.prepare_model
    optimizer = ddp.AdamW(model.parameters(), lr=1e-2, reducer=reducer)
    for epoch in range(options["epochs"]):
        loader.sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
    checksum = ddp.check_sync(model, optimizers=[optimizer])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    print(
        f"rank {rank}: {len(loader)} batches, loss {loss.item():.3f}, "
        f"parameters {checksum} on {world_size} ranks"
    )


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={"epochs": options.epochs},
            scaling_config=ScalingConfig(num_workers=options.workers),
            run_config=RunConfig(storage_path=folder),  # on a cluster, a folder that all nodes see
            torch_config=TorchConfig(backend="gloo"),
        ).fit()


if __name__ == "__main__":
    main()
