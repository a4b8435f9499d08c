"""submitit: a Slurm job from Python, which returns each rank's result.

python examples/submitit_train.py --cluster local
python examples/submitit_train.py --cluster slurm --nodes 2 --ranks 4
"""

import argparse

import submitit
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_from_scratch as ddp


def train(epochs: int) -> str:
    """Runs on every rank."""
    if submitit.JobEnvironment().cluster == "local":  # otherwise srun has set its variables
        submitit.helpers.TorchDistributedEnvironment().export()
    with ddp.process_group("gloo") as world:
        torch.manual_seed(0)
        inputs = torch.randn(512, 16)
        data = TensorDataset(inputs, inputs[:, :4].argmax(1))
        sampler = DistributedSampler(data, world.world_size, world.rank)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        ddp.broadcast_parameters(model)
        reducer = ddp.Reducer(model)
        optimizer = ddp.AdamW(model.parameters(), lr=1e-2, reducer=reducer)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch), labels)
                loss.backward()
                optimizer.step()
        checksum = ddp.check_sync(model, optimizers=[optimizer])
        return (
            f"rank {world.rank}: {len(loader)} batches, loss {loss.item():.3f}, "
            f"parameters {checksum} on {world.world_size} ranks"
        )


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", choices=["local", "slurm"], default="local")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each node")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="runs/submitit", help="folder for the job's logs")
    options = parser.parse_args()
    executor = submitit.AutoExecutor(folder=options.folder, cluster=options.cluster)
    executor.update_parameters(
        nodes=options.nodes, tasks_per_node=options.ranks, timeout_min=10, name="ranks"
    )
    print(*executor.submit(train, options.epochs).results(), sep="\n")


if __name__ == "__main__":
    main()
