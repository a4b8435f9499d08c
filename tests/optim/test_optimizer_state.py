"""State of flat optimizers: saved, loaded, copied and handed over."""

import copy
import io
from typing import Any

import pytest
import torch

from tests.support.optimizer_pair import (
    Pair,
    assert_same,
    each_kind,
    each_option,
    inputs,
    ours,
    torchs,
)

pytestmark = pytest.mark.usefixtures("alone")


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_option
@pytest.mark.parametrize("how", [copy.deepcopy, saved_and_loaded])
def test_state_goes_both_ways(options, how):
    pair = Pair(**options)
    pair.train(3)
    ours, theirs = pair.our_optimizer.state_dict(), pair.their_optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert [group.keys() for group in ours["param_groups"]] == [
        group.keys() for group in theirs["param_groups"]
    ]
    other = Pair(**{**options, "lr": 7.0})  # comes from the state
    for (model, optimizer), state in zip(
        other.both, (copy.deepcopy(theirs), how(ours)), strict=True
    ):
        model.load_state_dict(pair.ours.state_dict())
        optimizer.load_state_dict(state)
    other.check()
    other.train(3)
    pair.train(3)  # the one that was saved goes on from where it was
    assert_same(pair.ours, other.ours)


@each_kind
def test_copied_state_stays(options):
    pair = Pair(**options)
    pair.train(2)
    state = copy.deepcopy(pair.our_optimizer.state_dict())["state"]
    before = copy.deepcopy(state)
    pair.train(2)
    for index, entry in state.items():
        for key, value in entry.items():
            assert torch.equal(value, before[index][key]), key


@each_kind
def test_a_file_is_no_larger_for_it(options):
    pair = Pair(**options)
    pair.train(2)
    sizes = []
    for model, optimizer in pair.both:
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        sizes.append(file.tell())
    assert sizes[0] <= sizes[1]


@each_kind
def test_a_copy_steps_its_own_parameters(options):
    pair = Pair(**options)
    pair.train(2)
    before = copy.deepcopy(pair.ours)
    model, optimizer = copy.deepcopy((pair.ours, pair.our_optimizer))
    for x in inputs(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a copy of a ddp\.\w+ has no Reducer"):
        optimizer.backward_and_step(model(0.5))
    assert_same(pair.ours, before)
    pair.train(2)
    assert_same(pair.ours, model)


@each_kind
def test_the_hand_over_to_a_second_optimizer(options):
    pair = Pair(**options)
    pair.train(2)
    mine, other = ours(pair.kind), torchs(pair.kind)
    pair.our_optimizer = mine(pair.ours.parameters(), lr=0.01, reducer=pair.reducer)
    pair.their_optimizer = other(pair.theirs.parameters(), lr=0.01)
    pair.train(2)
