"""The Trainer of transformers under mpirun, on the mpi backend.

    mpirun -n 2 python examples/trainer_mpi.py

A GPT-2 of two small layers learns to repeat a sequence of numbers; nothing is downloaded.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ddp_from_scratch.mpi as mpi  # registers the backend


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Eight numbers, and the same eight again."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(16, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in torch.cat([halves, halves], 1)]


def main() -> None:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    config = GPT2Config(
        vocab_size=16,
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            ddp_backend=mpi.BACKEND,
            ddp_find_unused_parameters=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sequences(2048))
        loss = trainer.train().training_loss
        if trainer.is_world_process_zero():
            print(
                f"loss {loss:.3f} on {arguments.world_size} ranks, backend {arguments.ddp_backend}"
            )


if __name__ == "__main__":
    main()
