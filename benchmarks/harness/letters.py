"""A small GPT (`examples/gpt.py`) that learns Python's documentation, letter by letter."""

from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_from_scratch as ddp
from examples.gpt import GPT, make_optimizer, share_of_rate

LENGTH, BATCH = 64, 16  # letters of a text, texts of a rank

_TEXT = "\n".join(topics.values())
_NUMBER = {letter: index for index, letter in enumerate(sorted(set(_TEXT)))}


def batches(draws: torch.Generator) -> Callable[[], torch.Tensor]:
    """Returns a function that draws a batch: int64, of shape (BATCH, LENGTH + 1)."""
    data = torch.tensor([_NUMBER[letter] for letter in _TEXT])

    def draw() -> torch.Tensor:
        places = torch.randint(len(data) - LENGTH, (BATCH,), generator=draws)
        return torch.stack([data[place : place + LENGTH + 1] for place in places])

    return draw


def make_step(
    optimizer_name: str,
    steps: int,
    seed: int = 0,
    prepare: Callable[[ddp.Reducer], None] = lambda _: None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a GPT; returns a function that takes one of `steps` steps on a batch.

    It returns the loss of this rank, before the step. `prepare` is called with the Reducer.
    """
    torch.manual_seed(seed)
    model = GPT(len(_NUMBER), LENGTH)
    reducer = ddp.Reducer(model)
    prepare(reducer)
    optimizer = make_optimizer(optimizer_name, model, reducer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: share_of_rate(n, steps))

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step
