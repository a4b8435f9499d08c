"""Flat optimizers beside schedulers, scalers, clipping and changes to parameters, as torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ddp_from_scratch import SGD, AdamW, Reducer
from tests.support.optimizer_pair import Net, Pair, each_kind, inputs

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),  # momentum, too
    ],
)
@each_kind
def test_schedulers(make, options):
    pair = Pair(**options)
    schedulers = [make(optimizer) for _, optimizer in pair.both]
    for x in inputs(6):
        pair.step(x)
        pair.check()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.our_optimizer.param_groups[0]["lr"] != 0.05


@each_kind
def test_grad_scaler_skips_the_same_step(options):
    pair = Pair(**options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in "12"]
    for step, x in enumerate(inputs(6)):
        before = pair.ours.p5.detach().clone()
        for (model, optimizer), scaler in zip(pair.both, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(float("inf") if step == 3 else x)).backward()
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        assert torch.equal(before, pair.ours.p5) == (step == 3)
    assert scalers[0].state_dict() == scalers[1].state_dict()


@each_kind
def test_clipping(options):
    pair = Pair(**options)
    for x in inputs(4):
        pair.backward(x)
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model, _ in pair.both]
        assert norms[0] == norms[1] > 0.1
        for _, optimizer in pair.both:
            optimizer.step()
        pair.check()


@each_kind
def test_closure(options):
    pair = Pair(**options)
    for x in inputs(3):
        losses = []
        for model, optimizer in pair.both:

            def closure(model: nn.Module = model, x: float = x) -> torch.Tensor:
                model.zero_grad()
                loss = model(x)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert losses[0] == losses[1]
        pair.check()


@each_kind
def test_model_loaded_in_the_course(options):
    pair = Pair(**options)
    pair.train(2)
    saved = copy.deepcopy(pair.ours.state_dict())
    pair.train(2)
    for model, _ in pair.both:
        model.load_state_dict(saved)
    pair.train(2)


@each_kind
def test_parameter_without_a_gradient_stays(options):
    pair = Pair(**options)
    for step, x in enumerate(inputs(5)):
        pair.backward(x)
        if step != 2:  # the first steps, too, so that only some members have momentum
            for model, _ in pair.both:
                model.p1.grad = None
        before = pair.ours.p1.detach().clone()
        for _, optimizer in pair.both:
            optimizer.step()
        pair.check()
        assert torch.equal(before, pair.ours.p1) == (step != 2)


@each_kind
def test_data_that_was_replaced_is_stepped_where_it_lies(options):
    pair = Pair(**options)
    pair.train(2)
    before = [model.p5.data for model, _ in pair.both]
    elsewhere = [model.p5.detach().clone() for model, _ in pair.both]
    for (model, _), data in zip(pair.both, elsewhere, strict=True):
        model.p5.data = data
    pair.train(2)
    assert pair.ours.p5.data_ptr() == elsewhere[0].data_ptr()
    for (model, _), data in zip(pair.both, before, strict=True):
        model.p5.data = data
    pair.train(2)


@each_kind
def test_gradient_that_was_replaced(options):
    pair = Pair(**options)
    for x in inputs(3):
        pair.backward(x)
        for model, optimizer in pair.both:
            model.p5.grad = model.p5.grad * 2
            optimizer.step()
        pair.check()


@each_kind
def test_parameters_in_shared_memory_stay_shared(options):
    def make() -> nn.Module:
        model = Net()
        model.p6 = nn.Parameter(model.p5.data[:17])
        return model

    pair = Pair(make, **options)
    pair.train()
    assert pair.ours.p6.data_ptr() == pair.ours.p5.data_ptr()


def test_autograd_notices_that_parameters_changed():
    for optimizer_of in (
        lambda m, r: SGD(m.parameters(), 0.1, reducer=r),
        lambda m, _: torch.optim.SGD(m.parameters(), 0.1),
    ):
        model = Net()
        reducer = Reducer(model, gradient_as_bucket_view=True)
        optimizer = optimizer_of(model, reducer)
        loss = model(0.5)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        reducer.remove()


@each_kind
def test_a_reducer_taken_off(options):
    pair = Pair(**options)
    pair.train(2)
    pair.reducer.remove()
    pair.train(2)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}],
    ids=str,
)
def test_values_out_of_range_are_refused_as_by_torch(options):
    model = Net()
    reducer = Reducer(model, gradient_as_bucket_view=True)
    with pytest.raises(ValueError) as theirs:  # noqa: PT011  # compared below
        torch.optim.SGD(model.parameters(), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        SGD(model.parameters(), reducer=reducer, **options)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
def test_settings_that_choose_a_kernel_are_refused(name):
    model = Net()
    with pytest.raises(TypeError, match=f"AdamW takes no {name}: it has one kernel"):
        AdamW(model.parameters(), reducer=Reducer(model), **{name: True})


def test_a_reducer_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="none of params is one of the reducer's"):
        SGD(Net().parameters(), reducer=Reducer(Net()))
