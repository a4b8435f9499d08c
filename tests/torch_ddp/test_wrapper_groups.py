"""Copies of the wrapper, and wrappers on other process groups and meshes."""

import copy
import pickle

import pytest
import torch.distributed as dist

from ddp_from_scratch import DistributedDataParallel as Ours
from tests.support.terms import Terms, mean, own, recorded


def copies(world, how):
    model = Ours(Terms(1, 2), find_unused_parameters=True, bucket_cap_mb=0)
    model(own(world), (0,)).backward()
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for m in (model, other):
        m.zero_grad()
        with recorded("all_reduce") as sent:
            m(own(world), (0,)).backward()
        assert sent == [2, 1, 2]
        assert m.module.p0.grad.tolist() == [mean(world)]
        assert m.module.p1.grad is None
    other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_average_on_their_own(pair, how):
    pair(copies, how)


def copy_on_one_rank(world):
    model = Ours(Terms(1, 2), find_unused_parameters=True)
    model(own(world), (0,)).backward()
    other = None
    if world.rank == 0:
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        other.eval()(own(world), (0,))
        repr(other.reducer)
    dist.barrier()
    # The others make theirs later; together they average.
    other = other or copy.deepcopy(model)
    other.zero_grad()
    other.train()(own(world), (0,)).backward()
    assert other.module.p0.grad.tolist() == [mean(world)]


def test_a_copy_needs_no_other_rank(pair):
    pair(copy_on_one_rank)


def copy_in_a_group(world):
    group = dist.new_group()
    model = Ours(Terms(1, 2), process_group=group)
    with pytest.raises(RuntimeError, match="default process group"):
        copy.deepcopy(model)
    dist.destroy_process_group(group)


def test_a_wrapper_on_another_group_is_not_copied(ranks):
    ranks("gloo", 2)(copy_in_a_group)


def wrapped_anew(world):
    """Its hooks go with the wrapper; the module stays."""
    model = Terms(1, 2)
    for _ in range(3):
        wrapped = Ours(model)
        wrapped.zero_grad()
        with recorded("all_reduce") as sent:
            wrapped(own(world)).backward()
        assert sent == [3]
    del wrapped
    model.zero_grad()
    model(own(world)).backward()
    assert model.p0.grad.tolist() == [own(world)]


def test_a_module_may_be_wrapped_anew(pair):
    pair(wrapped_anew)


def in_a_mesh(world):
    mesh = dist.init_device_mesh("cpu", (world.world_size,))
    model = Ours(Terms(1, 2), device_mesh=mesh)
    model(own(world)).backward()
    assert model.module.p0.grad.tolist() == [mean(world)]
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        Ours(Terms(1), process_group=mesh.get_group(), device_mesh=mesh)


def test_device_mesh(ranks):
    ranks("gloo", 2)(in_a_mesh)


def other_ranks(world):
    """First ranks 0 and 1 average, then all three; the hooks of the first group are gone."""
    pair = dist.new_group([0, 1])
    x = float(world.rank + 1)
    if world.rank < 2:
        model = Ours(Terms(1, 2), process_group=pair)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        model(x).backward()
        assert model.module.p1.grad.tolist() == [3, 3]  # 2 * (1 + 2) / 2
        model.zero_grad()
        model._update_process_group(dist.group.WORLD)
    else:
        model = Ours(Terms(1, 2), init_sync=False)
    for _ in range(3):
        model(x).backward()
        assert model.module.p1.grad.tolist() == [4, 4]  # 2 * (1 + 2 + 3) / 3
        model.zero_grad()
    assert model.logging_data()["world_size"] == 3
    if world.rank < 2:
        assert model.logging_data()["comm_hook"] == str(dist.BuiltinCommHookType.ALLREDUCE)
    model._update_process_group(dist.new_group([2]))  # for rank 2 alone
    assert model.logging_data()["world_size"] == (1 if world.rank == 2 else 3)


def test_another_process_group(ranks):
    ranks("gloo", 3)(other_ranks)
