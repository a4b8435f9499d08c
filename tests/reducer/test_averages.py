"""The Reducer on real ranks: exact averages, whatever the parameters and the buckets are."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_from_scratch import Reducer
from tests.support.terms import Terms, assert_grads, each_cap, each_overlap, each_view, mean, own


def average(world, cap, overlap, view):
    for set_to_none in (True, False):
        model = Terms(1, 2, 3, 4)
        Reducer(model, bucket_cap_mb=cap, overlap=overlap, gradient_as_bucket_view=view)
        for step in (1, 2, 3):
            model.zero_grad(set_to_none=set_to_none)
            model(step * own(world)).backward()
            assert_grads(model, step * mean(world))


@each_cap
@each_overlap
@each_view
def test_average_is_exact_on_every_rung(crew, cap, overlap, view):
    crew(average, cap, overlap, view)


def average_of_dtypes(world, view):
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    model = Terms(3, 1, 2, 4, 2, 5, 1, dtypes=dtypes)
    reducer = Reducer(model, gradient_as_bucket_view=view)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, mean(world))
        assert len(reducer.buckets) == len(dtypes)


@each_view
def test_several_dtypes(crew, view):
    crew(average_of_dtypes, view)


def average_of_odd_shapes(world, view):
    model = Terms()
    model.p0 = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    model.p1 = nn.Parameter(torch.zeros(()))
    model.p2 = nn.Parameter(torch.zeros(0, 3))
    model.p3 = nn.Parameter(torch.zeros(40).as_strided((2, 3), (20, 2)))
    for cap in (0, None):
        reducer = Reducer(model, bucket_cap_mb=cap, gradient_as_bucket_view=view)
        for _ in range(3):
            model.zero_grad()
            model(own(world)).backward()
            assert_grads(model, mean(world))
        reducer.remove()


@each_view
def test_every_memory_layout(pair, view):
    pair(average_of_odd_shapes, view)


def average_of_tied(world):
    model = Terms(2, 3)
    model.p2 = model.p0  # its gradient is 1 x + 3 x
    reducer = Reducer(model, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert reducer.buckets in ((("p1",), ("p0",)), (("p0",), ("p1",)))
        assert model.p0.grad.tolist() == [4 * mean(world)] * 2
        assert model.p1.grad.tolist() == [2 * mean(world)] * 3


def test_tied_parameters(pair):
    pair(average_of_tied)


def average_of_submodules(world):
    one, two = Terms(1, 2), Terms(3, 4)
    Reducer(one, bucket_cap_mb=0)
    Reducer(two, gradient_as_bucket_view=True)
    for _ in range(3):
        one.zero_grad(), two.zero_grad()
        (one(own(world)) + two(2 * own(world))).backward()
        assert_grads(one, mean(world))
        assert_grads(two, 2 * mean(world))


def test_several_reducers_on_disjoint_submodules(pair):
    pair(average_of_submodules)


def average_in_subgroup(world):
    """Ranks 0 and 2 average 3 and 9; rank 1 goes on alone."""
    group = dist.new_group([0, 2])
    model = Terms(1, 2, 3)
    if world.rank != 1:
        Reducer(model, group, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        model(own(world)).backward()
        assert_grads(model, 6)
    dist.destroy_process_group(group)


def test_subgroup(trio):
    trio(average_in_subgroup)


def frozen_stays_local(world):
    model = Terms(1, 2)
    model.p0.requires_grad = False
    reducer = Reducer(model)
    model(own(world)).backward()
    assert reducer.buckets == (("p1",),)
    assert model.p0.grad is None
    assert model.p1.grad.tolist() == [2 * mean(world)] * 2


def test_frozen_parameters_take_no_part(pair):
    pair(frozen_stays_local)


def test_module_without_trainable_parameters_is_refused():
    frozen = nn.Linear(1, 1).requires_grad_(False)
    for module in (nn.ReLU(), frozen):
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            Reducer(module)


def test_negative_cap_is_refused():
    with pytest.raises(ValueError, match="bucket_cap_mb must be 0 or more, got -1"):
        Reducer(nn.Linear(1, 1), bucket_cap_mb=-1)
