"""Arguments of a wrong kind: the error names the value, and what was expected."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer
from ddp_from_scratch.common.arguments import check_ignore
from tests.support.on_ranks import on
from tests.support.terms import Terms, assert_grads, mean, own


class Tied(nn.Module):
    """Two names for one tensor, and a buffer that is None at first."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", None)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.head(self.embed(x))


@pytest.mark.unit
def test_names_to_ignore_are_names_of_the_module():
    model = Tied()
    both = {"embed.weight", "head.weight"}
    assert check_ignore((), model) == frozenset()
    assert check_ignore(["head.weight"], model) == both
    assert check_ignore({"embed.weight", "seen"}, model) == both | {"seen"}
    assert check_ignore(["cache"], model) == {"cache"}
    with pytest.warns(UserWarning, match=r"ignore has 'head\.wieght', .*: did you mean head\.wei"):
        check_ignore(["seen", "head.wieght"], model)
    with pytest.warns(
        UserWarning, match=r"ignore has 'zzz', no parameter or buffer of this rank's module$"
    ):
        check_ignore(iter(["zzz"]), model)
    with pytest.raises(TypeError, match=r"must be a list of names, got 'seen': write \['seen'\]$"):
        check_ignore("seen", model)
    with pytest.raises(TypeError, match=r"got b'seen'"):
        check_ignore(b"seen", model)
    with pytest.raises(TypeError, match="got one with Parameter"):
        check_ignore([model.head.weight], model)


IGNORING = {
    "Reducer": Reducer,
    "broadcast_parameters": ddp.broadcast_parameters,
    "broadcast_buffers": ddp.broadcast_buffers,
    "check_sync": ddp.check_sync,
}


@pytest.mark.parametrize("name", IGNORING)
@on("gloo-2")
def test_whatever_takes_names_to_ignore_refuses_a_text_and_an_unknown_name(world, name):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    for ignore in ("10.weight", b"10.weight"):
        with pytest.raises(TypeError, match=re.escape(f"got {ignore!r}: write [{ignore!r}]")):
            IGNORING[name](model, ignore=ignore)
    with pytest.warns(UserWarning, match=r"ignore has '10\.wieght', .* did you mean 10\.weight\?$"):
        IGNORING[name](model, ignore=["10.wieght"])


@on("gloo-2")
def test_the_wrapper_takes_torchs_marks_also_of_names_that_the_module_lacks(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mark = ddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    with pytest.raises(TypeError, match=r"got '0\.bias': write \['0\.bias'\]"):
        mark(model, "0.bias")
    model._ddp_params_and_buffers_to_ignore = "0.bias"
    with pytest.raises(TypeError, match=r"got '0\.bias': write \['0\.bias'\]"):
        ddp.DistributedDataParallel(model)
    mark(model, ["0.bias", "gone"])
    wrapper = ddp.DistributedDataParallel(model)
    assert wrapper.parameters_to_ignore == {"0.bias", "gone"}
    assert wrapper.reducer.ignore == {"0.bias"}


@on("gloo-2")
def test_a_tensor_is_ignored_under_all_its_names(world):
    model = Tied()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.seen):
            tensor.fill_(world.rank)
    ddp.broadcast_parameters(model, ignore=["head.weight"])
    assert model.embed.weight.eq(world.rank).all()
    assert model.head.bias.eq(0).all()
    ddp.check_sync(model, ignore=["head.weight"])
    assert Reducer(model, ignore=["head.weight"]).buckets == (("head.bias",),)


@on("gloo-2")
def test_join_ends_when_an_ignored_parameter_is_gone(world):
    model = Terms(2, 3)
    model.extra = nn.Parameter(torch.zeros(2))
    reducer = Reducer(model, ignore=["extra"])
    del model.extra
    with ddp.join(reducer):
        for _ in range(1 + world.rank):
            model.zero_grad()
            model(own(world)).backward()


WHOLE = "must be a whole number, got %s$"
# The error, its text, and what is called with a model.
REFUSED = [
    (TypeError, "virtual_ranks " + WHOLE % "4.0", lambda m: Reducer(m, virtual_ranks=4.0)),
    (TypeError, "virtual_ranks " + WHOLE % "'8'", lambda m: Reducer(m, virtual_ranks="8")),
    (TypeError, "check_every " + WHOLE % "2.5", lambda m: Reducer(m, check_every=2.5)),
    (TypeError, "check_every " + WHOLE % "'2'", lambda m: Reducer(m, check_every="2")),
    (
        TypeError,
        "recheck_every " + WHOLE % "1.5",
        lambda m: Reducer(m, virtual_ranks=2, recheck_every=1.5),
    ),
    (TypeError, "rank " + WHOLE % "2.0", lambda m: ddp.power_sgd.PowerSGDState(2.0)),
    (TypeError, "start " + WHOLE % "0.5", lambda m: ddp.power_sgd.PowerSGDState(2, 0.5)),
    (TypeError, "src " + WHOLE % "'0'", lambda m: ddp.broadcast_parameters(m, "0")),
    (
        TypeError,
        "src must be a rank, got a process group: pass process_group=group$",
        lambda m: ddp.broadcast_parameters(m, torch.distributed.group.WORLD),
    ),
    (
        TypeError,
        "src must be a rank, got a process group: pass process_group=group$",
        lambda m: ddp.broadcast_buffers(m, torch.distributed.group.WORLD),
    ),
    (
        TypeError,
        "src must be a rank, got a process group: pass process_group=group$",
        lambda m: ddp.broadcast_state({}, torch.distributed.group.WORLD),
    ),
    (
        TypeError,
        "src must be a rank, got a process group: pass process_group=group$",
        lambda m: ddp.broadcast_optimizer_state(
            torch.optim.SGD(m.parameters()), torch.distributed.group.WORLD
        ),
    ),
    (
        ValueError,
        "src must be a rank of the group, 0 to 1, got 2$",
        lambda m: ddp.broadcast_state({}, 2),
    ),
    (
        TypeError,
        r"optimizers must be a list of optimizers, got SGD: write \[optimizer\]$",
        lambda m: ddp.check_sync(m, optimizers=torch.optim.SGD(m.parameters())),
    ),
    (
        TypeError,
        r"reducer must be a ddp\.Reducer or .*, got a torch\.nn\.modules\.linear\.Linear$",
        lambda m: ddp.SGD(m.parameters(), 0.1, reducer=m),
    ),
    (
        TypeError,
        r"reducer must be .*, got a builtins\.NoneType$",
        lambda m: ddp.Muon([m.weight], reducer=None),
    ),
    (TypeError, "reducer must be .*, got a", lambda m: ddp.join(m).__enter__()),
    (TypeError, "reducer must be .*, got a", lambda m: ddp.JoinableReducer(m)),
    (TypeError, "reducer must be .*, got a", lambda m: ddp.timeline(m, "unused").__enter__()),
    (TypeError, "steps " + WHOLE % "1.5", lambda m: ddp.timeline(Reducer(m), "x", 1.5).__enter__()),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
@on("gloo-2")
def test_an_argument_of_a_wrong_kind_is_named(world, number):
    kind, text, call = REFUSED[number]
    with pytest.raises(kind, match=text) as error:
        call(nn.Linear(2, 2))
    assert "\n" not in str(error.value)


@on("gloo-2")
def test_elastic_refuses_a_wrapper(world):
    wrapper = ddp.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(wrapper.parameters())
    with pytest.raises(TypeError, match=r"takes a ddp\.Reducer with .*, got Distrib"):
        ddp.elastic(world, wrapper, optimizer)


# A wrapper stands for its Reducer ---------------------------------------------------------------


@on("gloo-2")
def test_an_optimizer_takes_a_wrapper(world):
    wrapper = ddp.DistributedDataParallel(Terms(2, 3))
    optimizer = ddp.SGD(wrapper.parameters(), 1.0, reducer=wrapper)
    for step in range(1, 3):
        optimizer.zero_grad()
        wrapper(own(world)).backward()
        optimizer.step()
        assert torch.equal(wrapper.module.p1, torch.full((3,), -2 * step * mean(world)))
    assert optimizer.backward_and_step(wrapper(own(world))) is None


@on("gloo-2")
def test_muon_takes_a_wrapper(world):
    def trained(wrapped):
        torch.manual_seed(0)
        model = nn.Linear(3, 3, bias=False)
        called = ddp.DistributedDataParallel(model) if wrapped else model
        reducer = called if wrapped else Reducer(model)
        optimizer = ddp.Muon(model.parameters(), 0.1, reducer=reducer)
        called(torch.full((2, 3), own(world))).square().sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    assert torch.equal(trained(True), trained(False))


@on("gloo-2")
def test_join_takes_a_wrapper(world):
    wrapper = ddp.DistributedDataParallel(Terms(2, 3))
    with ddp.join(wrapper):
        for step in range(1 + world.rank):
            wrapper.zero_grad()
            wrapper(own(world)).backward()
            assert_grads(wrapper.module, mean(world) if step == 0 else own(world) / 2)


@on("gloo-2")
def test_a_timeline_takes_a_wrapper(world, tmp_path):
    wrapper = ddp.DistributedDataParallel(Terms(2, 3))
    with ddp.timeline(wrapper, tmp_path, steps=2, skip=1) as timeline:
        for _ in range(4):
            wrapper.zero_grad()
            wrapper(own(world)).backward()
    assert len(timeline.record.steps) == 2


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_reducer_cannot_be_copied(alone, copies):
    model = nn.Linear(2, 2)
    reducer = Reducer(model)
    with pytest.raises(TypeError, match=r"a Reducer cannot be copied .* a new Reducer for"):
        copies(reducer)
    copies(model)
    reducer.remove()
