"""The random generators that a model may use: torch's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ddp_from_scratch.common import gpu


def seed_generators(seed: int) -> None:
    """Seeds every generator that a model may use: torch's (also on GPUs), Python's, numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    # A seed may have more bits than the 32 that numpy takes.
    np.random.seed(np.random.SeedSequence(seed).generate_state(8))


def generator_states() -> tuple[Any, ...]:
    """Returns the states of these generators; of GPUs only the current one's."""
    return torch.get_rng_state(), gpu.generator_state(), random.getstate(), np.random.get_state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Restores what `generator_states` returned."""
    cpu, of_gpu, python, numpy = states
    torch.set_rng_state(cpu)
    if of_gpu is not None:
        gpu.set_generator_state(of_gpu)
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds all generators from these numbers inside the context, and restores them after it."""
    before = generator_states()
    seed_generators(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
    try:
        yield
    finally:
        set_generator_states(before)
