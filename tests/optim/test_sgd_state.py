"""State of ddp.SGD: saved, loaded, copied and handed over."""

import copy
import io
from typing import Any

import pytest
import torch

from ddp_from_scratch import SGD
from tests.support.sgd_pair import MOMENTUM, Pair, assert_same, each_option, inputs

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
    ours, theirs = pair.our_sgd.state_dict(), pair.their_sgd.state_dict()
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


def test_copied_state_stays():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    state = copy.deepcopy(pair.our_sgd.state_dict())["state"]
    before = {index: entry["momentum_buffer"].clone() for index, entry in state.items()}
    pair.train(2)
    for index, entry in state.items():
        assert torch.equal(entry["momentum_buffer"], before[index])


def test_a_file_is_no_larger_for_it():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    sizes = []
    for model, optimizer in pair.both:
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        sizes.append(file.tell())
    assert sizes[0] <= sizes[1]


def test_a_copy_steps_its_own_parameters():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    before = copy.deepcopy(pair.ours)
    model, optimizer = copy.deepcopy((pair.ours, pair.our_sgd))
    for x in inputs(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a copy of a ddp\.SGD has no Reducer"):
        optimizer.backward_and_step(model(0.5))
    assert_same(pair.ours, before)
    pair.train(2)
    assert_same(pair.ours, model)


def test_the_hand_over_to_a_second_optimizer():
    pair = Pair(**MOMENTUM)
    pair.train(2)
    options = {"lr": 0.01, "momentum": 0.5}
    pair.our_sgd = SGD(pair.ours.parameters(), reducer=pair.reducer, **options)
    pair.their_sgd = torch.optim.SGD(pair.theirs.parameters(), foreach=False, **options)
    pair.train(2)
