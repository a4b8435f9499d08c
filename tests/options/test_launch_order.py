"""Backward passes in two threads: one launch order in one group, none between two groups."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer, power_sgd
from ddp_from_scratch.core.observer import Observer
from tests.support.on_ranks import on


class Early(Observer):
    """Counts the buckets that are launched before the end of backward."""

    count = 0

    def on_launch(self, bucket):
        self.count += self._reducer().backward is not None


def power(reducer):
    state = power_sgd.PowerSGDState(rank=1, start=0, process_group=reducer.process_group)
    reducer.register_comm_hook(state, power_sgd.power_sgd_hook)


def train(model, world, steps=1):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(1, 2) + world.rank).square().mean().backward()


@pytest.mark.parametrize("hook", [power, None])
@pytest.mark.parametrize("groups", [1, 2])
@on("gloo-2")
def test_a_pass_waits_for_one_in_another_thread_only_if_they_share_a_group(world, hook, groups):
    first, second = [dist.new_group([0, 1]) for _ in range(groups)] * (3 - groups)
    older, newer = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    early = Early()
    reducers = [
        Reducer(older, first, bucket_cap_mb=0, observers=[early], check_first_average=False),
        Reducer(newer, second, bucket_cap_mb=0, check_first_average=False),
    ]
    for reducer in reducers if hook is not None else ():
        hook(reducer)
    paused, resume = threading.Event(), threading.Event()

    def pause(gradient):
        paused.set()
        resume.wait(20)

    newer[0].register_forward_hook(lambda _layer, _x, y: y.register_hook(pause) and None)
    thread = threading.Thread(target=train, args=(newer, world))
    thread.start()
    assert paused.wait(20)  # the newer Reducer has launched its first bucket, and not the others
    train(older, world)
    resume.set()
    thread.join()
    assert early.count == (0 if groups == 1 else 4)
    assert [reducer.iteration for reducer in reducers] == [1, 1]


@on("gloo-2")
def test_two_threads_train_with_a_hook_that_allows_one_bucket_in_flight(world):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)]) for _ in groups]
    errors = []

    def train_long(model):
        try:
            train(model, world, steps=50)
        except RuntimeError as error:
            errors.append(error)

    for model, group in zip(models, groups, strict=True):
        power(Reducer(model, group, bucket_cap_mb=0, check_first_average=False))
    threads = [threading.Thread(target=train_long, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@on("gloo-2")
def test_two_threads_train_with_unused_parameters(world):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]) for _ in groups]
    errors = []

    def train_long(model, group):
        try:
            reducer = Reducer(model, group, find_unused_parameters=True, check_first_average=False)
            for step in range(200):
                model(torch.full((4, 64), float(world.rank + step))).square().mean().backward()
            reducer.remove()
        except RuntimeError as error:
            errors.append(error)

    pairs = zip(models, groups, strict=True)
    threads = [threading.Thread(target=train_long, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
