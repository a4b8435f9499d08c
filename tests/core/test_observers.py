"""Observers of a program's own: when they are called, and that others cost nothing."""

import pytest
import torch

import ddp_from_scratch as ddp
from ddp_from_scratch import Reducer, broadcast_parameters
from ddp_from_scratch.core.observer import Check, Observer, Tracer
from ddp_from_scratch.options.unused import Unused
from tests.support.on_ranks import on
from tests.support.terms import Terms, own

PHASES = {"on_forward", "on_gradient", "on_launch", "on_packed", "on_unpacked", "on_average"}


class Notes(Observer):
    def __init__(self, called):
        self.called = called

    def attach(self, reducer):
        self.called.append(("attach", len(reducer.flat_buckets)))


for _name in sorted(PHASES):
    setattr(Notes, _name, lambda self, *_, name=_name: self.called.append(name))


def step(model, world):
    model(own(world)).backward()


@on("gloo-2")
def test_each_phase_is_called_in_its_place_until_the_observer_is_removed(world):
    model, called = Terms(1, 2), []
    reducer = Reducer(model, bucket_cap_mb=0, observers=[Notes(called)])
    assert called == [("attach", 2)]
    called.clear()
    in_pass = []
    model.p0.register_hook(
        lambda _: in_pass.append(reducer.core.is_in_pass())
    )  # p1's is ready before
    step(model, world)
    assert (in_pass, reducer.core.is_in_pass()) == ([True], False)
    ready = ["on_gradient", "on_launch", "on_packed"] * 2
    assert called == ["on_forward", *ready, "on_unpacked", "on_unpacked", "on_average"]
    called.clear()
    (notes,) = [e for e in reducer.core.observers if isinstance(e, Notes)]
    reducer.remove_observer(notes)
    step(model, world)
    assert called == []
    reducer.add_observer(notes)
    step(model, world)
    assert called[0] == ("attach", 2)
    assert set(called[1:]) == PHASES


class Once(Observer):
    def on_average(self, iteration, takes_part):
        self._reducer().remove_observer(self)


@on("gloo-2")
def test_an_observer_that_takes_itself_off_hides_no_other(world):
    model, called = Terms(1), []
    Reducer(model, observers=[Once(), Notes(called)])
    for _ in range(3):
        step(model, world)
    assert called.count("on_average") == 3


class Verdicts(Check):
    def __init__(self, name, asked, early, late):
        self.name, self.asked = name, asked
        self.early, self.late = early, late

    def verdict(self):
        self.asked.append(f"{self.name} early")
        return RuntimeError(self.name) if self.early else None

    def late_verdict(self):
        self.asked.append(f"{self.name} late")
        return RuntimeError(f"{self.name} late") if self.late else None


@pytest.mark.parametrize(
    ("early", "late", "raised"),
    [
        ((True, True), (True, True), "b"),  # the last one of `verdict`
        ((True, False), (False, True), "a"),
        ((False, False), (True, True), "a late"),  # the first one of `late_verdict`
        ((False, False), (False, True), "b late"),
    ],
)
@on("gloo-2")
def test_of_several_checks_all_are_asked_and_one_error_counts(world, early, late, raised):
    asked = []
    checks = [Verdicts(name, asked, *found) for name, *found in zip("ab", early, late, strict=True)]
    model = Terms(1)
    Reducer(model, observers=checks)
    with pytest.raises(RuntimeError, match=f"^{raised}$"):
        step(model, world)
    assert asked == ["a early", "b early", "a late", "b late"]


@on("gloo-2")
def test_a_tracer_may_only_look_at_the_ends_of_waits(world):
    class Ends(Tracer):
        ends = 0

        def on_waited(self, bucket):
            self.ends += bucket is not None

    model, ends = torch.nn.Linear(2, 2), Ends()
    broadcast_parameters(model)
    reducer = Reducer(model, observers=[ends])
    model(torch.ones(1, 2)).sum().backward()
    assert ends.ends == len(reducer.buckets) == 1
    reducer.remove()


@on("gloo-2")
def test_a_tracer_is_told_of_the_end_of_a_wait_that_fails(world):
    class Waits(Tracer):
        def __init__(self):
            self.called = []

        def on_wait(self, bucket):
            self.called.append(("begin", bucket))

        def on_waited(self, bucket):
            self.called.append(("end", bucket))

    model, waits = torch.nn.Linear(2, 2), Waits()
    broadcast_parameters(model)
    reducer = Reducer(model, observers=[waits])
    reducer.weight(0)  # on all ranks
    with pytest.raises(ValueError, match="the weights of all ranks are 0"):
        model(torch.ones(1, 2)).sum().backward()
    assert waits.called == [("begin", None), ("end", None)]
    reducer.remove()


@on("gloo-2")
def test_a_policy_that_is_removed_is_not_asked(world):
    model = torch.nn.Linear(2, 2)
    broadcast_parameters(model)
    reducer = Reducer(model, find_unused_parameters=True)
    reducer.remove_observer(reducer.core.observer(Unused))
    assert reducer.core.usage is None
    model(torch.ones(1, 2)).sum().backward()
    model.bias.sum().backward()
    with pytest.raises(RuntimeError, match="no gradient in the last backward pass"):
        model(torch.ones(1, 2))
    reducer.remove()


def ask(reducer, model):
    reducer.core.missing()


def accumulate(reducer, model):
    with reducer.no_sync():
        pass


def add(reducer, model):
    reducer.add_observer(Notes([]))


def run_backward(reducer, model):
    with torch.enable_grad():
        model(1.0).backward()


class CallsBack(Observer):
    def __init__(self, call, model):
        self.call, self.model = call, model

    def on_launch(self, bucket):
        self.call(self.reducer, self.model)


@pytest.mark.parametrize("call", [ask, accumulate, add, run_backward])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("calls", ["observer", "hook"])
@on("gloo-2")
def test_a_reducer_that_is_called_back_during_a_launch_raises(world, call, views, calls):
    model = Terms(*[3] * 4)
    reducer = Reducer(model, bucket_cap_mb=0, gradient_as_bucket_view=views)
    for _ in range(2):  # then autograd calls once for each bucket
        step(model, world)
    if calls == "observer":
        observer = CallsBack(call, model)
        observer.reducer = reducer
        reducer.add_observer(observer)
    else:

        def hook(state, bucket):
            call(reducer, model)
            return ddp.comm_hooks.allreduce_hook(state, bucket)

        reducer.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=r"called back its Reducer on rank \d during"):
        step(model, world)
    reducer.remove()
