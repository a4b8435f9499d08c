"""Who calls the Reducer, and that it goes when its module goes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_from_scratch import Reducer

pytestmark = pytest.mark.usefixtures("alone")


def test_a_reducer_that_goes_while_an_optimizer_steps_disturbs_nobody():
    model = nn.Linear(2, 2)
    reducer = weakref.ref(Reducer(model))
    models, other = [model], nn.Parameter(torch.ones(1))
    del model
    other.grad = torch.ones(1)

    def forget(*_: object) -> None:
        models.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (forget, lambda *_: None)]
    try:
        torch.optim.SGD([other], lr=1.0).step()
    finally:
        for handle in handles:
            handle.remove()
    assert reducer() is None
    assert other.item() == 0.0


def test_the_nodes_that_accumulate_gradients_are_those_of_the_time_of_construction():
    """On a GPU a node runs on the stream of the time when it was made."""
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    for p in model.parameters():
        torch.autograd.graph.get_gradient_edge(p).node.metadata["made"] = "early"
    gc.collect()
    for p in model.parameters():
        assert torch.autograd.graph.get_gradient_edge(p).node.metadata == {"made": "early"}
    assert len(reducer.buckets) == 1
