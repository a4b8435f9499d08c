"""Ranks that hold the same bits, and ranks that do not."""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer, check_sync


def model(fill: float = 0.5) -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(1, 2, 2), nn.Linear(2, 2).bfloat16())
    layers.register_parameter("empty", nn.Parameter(torch.zeros(0, 2)))
    layers.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, fill)
    return layers


def one_model(world):
    return check_sync(model())


def test_equal_parameters_give_one_checksum(trio):
    checksums = set(trio(one_model))
    assert len(checksums) == 1
    assert len(checksums.pop()) == 16


def two_models(world):
    return check_sync(model(0.5)), check_sync(model(0.25))


def test_checksum_depends_on_the_values(trio):
    for one, other in trio(two_models):
        assert one != other


def one_bit_off(world, name, odd):
    ours = model()
    if world.rank in odd:
        with torch.no_grad():
            last = ours.get_parameter(name).view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, math.inf)))
    with pytest.raises(RuntimeError) as caught:
        check_sync(ours)
    return str(caught.value)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "2.weight", "scalar"])
def test_one_ulp_in_one_parameter_is_named_on_every_rank(trio, name):
    ulp = "0.00391" if name == "2.weight" else "5.96e-08"  # of 0.5: 2**-8, 2**-24
    text = f"parameter {name} is not the same on all ranks: [2] differ from rank 0 by up to {ulp}"
    assert trio(one_bit_off, name, [2]) == [text] * 3


def test_ranks_are_compared_with_rank_0(trio):
    text = (
        "parameter 0.bias is not the same on all ranks: [1, 2] differ from rank 0 by up to 5.96e-08"
    )
    assert trio(one_bit_off, "0.bias", [0]) == [text] * 3


def signed_zero_and_nan(world):
    told = r"parameter scalar is not the same on all ranks: \[1\] differ from rank 0 by up to 0$"
    ours = model()
    nn.init.constant_(ours.scalar, -0.0 if world.rank == 1 else 0.0)
    with pytest.raises(RuntimeError, match=told):
        check_sync(ours)
    check_sync(model(math.nan))


def test_bits_are_compared_and_not_values(trio):
    """-0.0 == 0.0, but what is computed from them differs; a NaN is unequal to itself."""
    trio(signed_zero_and_nan)


def extra_parameter(world, odd):
    ours = model()
    if world.rank == odd:
        ours.register_parameter("extra", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(RuntimeError) as caught:
        check_sync(ours)
    here, there = "torch.float32 ()", "missing"
    if odd != 0:
        here, there = there, here
    assert str(caught.value) == (
        f"parameter extra is not the same on all ranks: {[1, 2] if odd == 0 else [1]} differ from "
        f"rank 0: {here} there, {there} on rank 1"
    )


@pytest.mark.parametrize("odd", [0, 1])
def test_a_parameter_that_one_rank_lacks_is_named_on_every_rank(trio, odd):
    trio(extra_parameter, odd)


# An optimizer's state ---------------------------------------------------------------------------


def stepped(kind, ours, **options):
    optimizer = kind(ours.parameters(), lr=0.5, **options)
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def error_of(*arguments, **options) -> str:
    with pytest.raises(RuntimeError) as caught:
        check_sync(*arguments, **options)
    return str(caught.value)


def different_states(world):
    ours = model()
    adam = stepped(torch.optim.Adam, ours)
    check_sync(ours, optimizers=[adam])
    told = []
    if world.rank == 1:
        adam.state[ours[1].bias]["exp_avg_sq"][1] += 0.25
    told.append(error_of(ours, optimizers=[adam]))
    check_sync(ours)
    if world.rank == 2:
        adam.state[ours[0].weight]["step"] += 3
    told.append(error_of(ours, optimizers=[adam]))
    check_sync(ours, optimizers=[adam], ignore=["0.weight", "1.bias"])
    if world.rank == 2:
        nn.init.constant_(ours[2].bias, 7.0)
    told.append(error_of(ours, optimizers=[adam])[:16])  # parameters come first
    return told


def test_an_optimizers_state_is_compared(trio):
    for told in trio(different_states):
        assert told == [
            "exp_avg_sq in the state of the optimizer for parameter 1.bias is not the same on all "
            "ranks: [1] differ from rank 0 by up to 0.25",
            "step in the state of the optimizer for parameter 0.weight is not the same on all "
            "ranks: [2] differ from rank 0 by up to 3",
            "parameter 2.bias",
        ]


def odd_states(world):
    ours = nn.Linear(2, 2)
    for p in ours.parameters():
        nn.init.ones_(p)
    optimizer = torch.optim.SGD(ours.parameters())
    kept = {
        "list": [torch.ones(3, dtype=torch.complex64), None],
        "text": object(),
        "deep": {"n": 1},
    }
    optimizer.state[ours.weight] = kept
    if world.rank > 0:  # as of an optimizer that shards its state
        optimizer.state[ours.bias] = {"shard": torch.ones(2)}
    check_sync(ours, optimizers=[optimizer])
    if world.rank == 1:
        kept["deep"]["n"] = 4
    assert "deep.n in the state" in error_of(ours, optimizers=[optimizer])
    if world.rank == 1:
        kept["deep"]["n"] = 1
        kept["list"][0][2] = 1 + 2j
    assert "list.0 in the state of the optimizer for parameter weight" in error_of(
        ours, optimizers=[optimizer]
    )
    if world.rank == 1:
        kept["list"][0][2] = 1
    if world.rank == 2:
        optimizer.state[ours.bias]["shard"][0] = 0
    assert "[2] differ from rank 1 by up to 1" in error_of(ours, optimizers=[optimizer])


def test_states_of_other_kinds_and_sharded_ones(trio):
    trio(odd_states)


# Reducer(check_every=N) -------------------------------------------------------------------------


def training(every, kind=torch.optim.SGD, **options):
    """A model, its Reducer, its optimizer, and a function that takes a step."""
    ours = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for p in ours.parameters():
        nn.init.constant_(p, 0.5)
    reducer = Reducer(ours, check_every=every, gradient_as_bucket_view=kind is ddp.SGD)
    if kind is ddp.SGD:
        options["reducer"] = reducer
    optimizer = kind(ours.parameters(), lr=0.125, **options)

    def step():
        optimizer.zero_grad()
        ours(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    return ours, reducer, optimizer, step


def gathers(step) -> int:
    """How many all_gathers a step issues."""
    called, original = [], dist.all_gather
    dist.all_gather = lambda *args, **options: (called.append(1), original(*args, **options))[1]
    try:
        step()
    finally:
        dist.all_gather = original
    return len(called)


def drift_of_a_parameter(world):
    ours, _, _, step = training(2)
    assert [gathers(step) for _ in range(5)] == [0, 1, 0, 1, 0]
    if world.rank == 1:
        with torch.no_grad():
            ours[1].weight[0, 2] += 2
    with pytest.raises(RuntimeError) as caught:
        step()
    # The engine is whole: the next step averages.
    step()
    return str(caught.value)


def test_a_parameter_that_drifts_is_named(trio):
    text = (
        "average 6: parameter 1.weight is not the same on all ranks: [1] differ from rank 0 "
        "by up to 2"
    )
    assert trio(drift_of_a_parameter) == [text] * 3


def drift_of_a_state(world, kind):
    ours, _, optimizer, step = training(3, kind, momentum=0.5)
    for _ in range(5):
        step()
    if world.rank == 2:
        optimizer.state[ours[0].bias]["momentum_buffer"][1] -= 1
    with pytest.raises(RuntimeError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, ddp.SGD], ids=["torch", "ours"])
def test_a_state_that_drifts_is_named(trio, kind):
    text = (
        "average 6: momentum_buffer in the state of the optimizer for parameter 0.bias is not the "
        "same on all ranks: [2] differ from rank 0 by up to 1"
    )
    assert trio(drift_of_a_state, kind) == [text] * 3


def skipped_step(world):
    """The cause may be in the loop: here a rank leaves out a step that it takes for bad."""
    ours, _, optimizer, _ = training(1, torch.optim.Adam)
    ours(torch.ones(4, 2)).sum().backward()
    if world.rank != 1:
        optimizer.step()
    loss = ours(torch.ones(4, 2)).sum()
    with pytest.raises(RuntimeError, match=r"average 2: parameter 0.weight .*: \[1\] differ"):
        loss.backward()


def test_a_step_that_a_rank_leaves_out_is_found(trio):
    trio(skipped_step)


def alone_and_accumulated(world):
    ours, reducer, _, step = training(1)
    step()
    if world.rank == 0:  # an evaluation, and a backward pass of its own: nobody waits
        ours.eval()
        with torch.no_grad():
            assert gathers(lambda: ours(torch.ones(1, 2))) == 0
        ours.train()
        with reducer.no_sync():
            assert gathers(lambda: ours(torch.ones(1, 2)).sum().backward()) == 0
    step()


def test_what_one_rank_does_alone_is_not_checked(trio):
    trio(alone_and_accumulated)


def uneven(world):
    """Ranks that have run out of data hold parameters of earlier steps until the end."""
    ours, reducer, _, step = training(2)
    with ddp.join(reducer):
        for _ in range(3 + 2 * world.rank):
            step()
    assert reducer.iteration == 7
    check_sync(ours)


def test_ranks_without_data_are_left_out(trio):
    trio(uneven)


def optimizer_is_let_go(world):
    _, _, optimizer, step = training(1)
    step()
    gone = weakref.ref(optimizer)
    del optimizer, step
    gc.collect()
    assert gone() is None


def test_the_check_keeps_no_optimizer_alive(ranks):
    ranks("gloo", 2)(optimizer_is_let_go)


def bad_every(world):
    with pytest.raises(ValueError, match="check_every must be 1 or more, got 0"):
        Reducer(nn.Linear(1, 1), check_every=0)


def test_check_every_must_be_positive(ranks):
    ranks("gloo", 2)(bad_every)
