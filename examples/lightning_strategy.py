"""Lightning on ranks with different numbers of batches: a strategy with this library's `join`.

    torchrun --nproc-per-node 2 examples/lightning_strategy.py

A rank whose epoch has ended takes part in the other ranks' averages until theirs has, too. Then
all ranks continue with the parameters, optimizer and schedulers of the rank that finished last.
"""

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ddp_from_scratch as ddp


class JoinStrategy(DDPStrategy):
    """Lightning's DDP strategy for uneven data; options are those of `ddp.DistributedDataParallel`.

    Raises:
        ValueError: a setting of the Trainer with which ranks communicate, or stop, within an epoch.
        RuntimeError: a callback or `log(sync_dist=True)` communicates within an epoch.
    """

    joining: Join | None = None  # within an epoch

    def setup(self, trainer: lightning.Trainer) -> None:
        only = {"accumulate_grad_batches": 1, "max_steps": -1, "val_check_interval": 1.0}
        for name, value in only.items():
            if (found := getattr(trainer, name)) != value:
                raise ValueError(
                    f"Trainer({name}={found!r}), but ranks take different numbers of steps in an "
                    f"epoch: JoinStrategy needs {name}={value!r}"
                )
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("JoinStrategy needs automatic_optimization=True, got False")
        self.trainer = trainer
        # Lightning 2.6 and later broadcast before each batch whether rank 0 has received SIGTERM.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> ddp.DistributedDataParallel:
        return ddp.DistributedDataParallel(
            model, self.determine_ddp_device_ids(), **self._ddp_kwargs
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.joining is None:
            self.joining = Join([self.model])

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().optimizer_step(*args, **kwargs)
        if self.trainer.is_last_batch:
            self.joining.__exit__(None, None, None)  # waits until no rank has a batch left
            self.joining = None
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            for holder in [*self.optimizers, *schedulers, self.precision_plugin]:
                last = self.model._authoritative_rank  # the one whose parameters all ranks have now
                holder.load_state_dict(self.broadcast(holder.state_dict(), last))
        return loss

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.check_between_epochs()
        return super().reduce(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.check_between_epochs()
        super().barrier(*args, **kwargs)

    def check_between_epochs(self) -> None:
        if self.joining is not None:
            raise RuntimeError(
                "ranks communicate within an epoch, which some may have left: log with "
                "on_step=False, on_epoch=True, and save at the end of an epoch"
            )


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
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
    rank = int(os.environ.get("RANK", "0"))
    lightning.seed_everything(rank, verbose=False)
    inputs = torch.randn(128 * (rank + 1), 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=32, shuffle=True)  # rank r has 4 (r + 1) batches
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=JoinStrategy(),
        use_distributed_sampler=False,  # which would repeat samples until ranks have equally many
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    checksum = ddp.check_sync(model, optimizers=trainer.optimizers)
    loss = trainer.callback_metrics["loss"].item()
    print(
        f"rank {rank}: {len(loader)} batches, loss {loss:.3f}, "
        f"parameters {checksum} on {trainer.world_size} ranks"
    )


if __name__ == "__main__":
    main()
