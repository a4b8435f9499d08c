"""Random generators of a process, and numbers of their own for each shard."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ddp_from_scratch import gpu


def seed_generators(seed: int) -> None:
    """Seeds every generator that a model may draw from: torch's, on GPUs too, Python's, numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    # numpy takes 32 bits at a time, and a seed may have more.
    np.random.seed(np.random.SeedSequence(seed).generate_state(8))


def generator_states() -> tuple[Any, ...]:
    """Returns the states of these generators; on GPUs that of the current one."""
    return torch.get_rng_state(), gpu.generator_state(), random.getstate(), np.random.get_state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Puts all generators back into these states."""
    cpu, of_gpu, python, numpy = states
    torch.set_rng_state(cpu)
    if of_gpu is not None:
        gpu.set_generator_state(of_gpu)
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds all generators from these numbers inside; outside they go on as if nothing had been.

    So what a program draws between shards, such as an order of samples, does not depend on how
    many shards this rank has run.
    """
    before = generator_states()
    seed_generators(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
    try:
        yield
    finally:
        set_generator_states(before)
