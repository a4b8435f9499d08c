"""Lightning under mpirun: its own DDP strategy, on the mpi backend.

    mpirun -n 2 python examples/lightning_mpi.py

Lightning wraps the model in torch's DistributedDataParallel; what it sends goes through MPI.
`MPIEnvironment` says that mpirun has started the ranks.
"""

import argparse

import lightning
import torch
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddp_from_scratch.mpi as mpi  # registers the backend


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, sync_dist=True)  # the mean of all ranks
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = Classifier()
    environment = MPIEnvironment()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=mpi.placement().local_world_size,
        strategy=DDPStrategy(cluster_environment=environment, process_group_backend=mpi.BACKEND),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"].item()
        print(f"loss {loss:.3f} on {trainer.world_size} ranks, backend {mpi.BACKEND}")


if __name__ == "__main__":
    main()
