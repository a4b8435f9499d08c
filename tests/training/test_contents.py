"""What stands in a checkpoint that is otherwise whole, and sealed: right, or refused in a line."""

import copy

import pytest
import torch

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch.environment import ALONE
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.loop import load_model
from ddp_from_scratch.world.world import World
from tests.training.test_checkpoint import MODEL, newest, state


def changed(content, path, value):
    """`content` with another value at "key/key", or without that key where it is `...`."""
    key, _, rest = path.partition("/")
    key = int(key) if key.isdecimal() else key
    if isinstance(content, tuple):
        return tuple(changed(list(content), path, value))
    content = copy.copy(content)
    if rest:
        content[key] = changed(content[key], rest, value)
    elif value is ...:
        del content[key]
    else:
        content[key] = value
    return content


def check(content):
    checkpoint.check_contents(content)
    checkpoint.check_fit(content, MODEL)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("epoch", 11, "epochs must be 11 or more, got 10"),
        ("settings/dataset", 3, "dataset of settings must be str, got 3"),
        ("model_spec/depth", 8, "model_spec has more"),
        ("scaler/scale", float("nan"), "scale of scaler must be 0 or more, got nan"),
        ("buckets/bucket_cap_mb", "big", "bucket_cap_mb is not a size"),
        ("rng/0/python", (3, (1, 2), None), "python of rng of rank 0 must have 625 entries"),
        ("rng/0/torch", torch.zeros(5056, dtype=torch.uint8), "rng of rank 0 cannot be used"),
        # What does not fit the model.
        ("model/bias", ..., "the model has no bias"),
        ("model/more", torch.zeros(4), "the model has no 'more'"),
        ("model/weight", torch.zeros(1).expand(3, 4), "weight of the model must be"),
        ("optimizer/state/1", {"momentum_buffer": torch.zeros(4)}, "state of parameter 1 must be"),
        ("ready_order", ["bias"], "ready_order does not name each parameter once"),
        ("compression/qs/weight", torch.zeros(5, 1), "compression of weight must be a tensor of"),
    ],
)
def test_wrong_contents(path, value, told):
    with pytest.raises(UsageError) as error:
        check(changed(state(1), path, value))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_with_wrong_contents_is_passed_over(tmp_path):
    older = {name: v for name, v in state(1)["settings"].items() if name != "stragglers"}
    checkpoint.check_contents(
        state(1) | {"settings": older | {"later": [1, 2]}}
    )  # of another version
    checkpoint.save(tmp_path, state(1))
    bad = checkpoint.save(tmp_path, state(2) | {"epoch": -1})
    with pytest.raises(UsageError, match=f"{bad} is no checkpoint that a run has written: epoch"):
        checkpoint.load(bad)
    assert newest(tmp_path)["step"] == 1


def places(content, prefix=""):
    for key in content if isinstance(content, dict) else range(len(content))[:3]:
        yield f"{prefix}{key}", content[key]
        if isinstance(content[key], dict | list | tuple):
            yield from places(content[key], f"{prefix}{key}/")


def kind_of(value):
    return dict if isinstance(value, dict) else type(value)


TYPES = ("x", True, 1j, b"x", [1], {"x": 1}, torch.ones(2), torch.ones((), dtype=torch.int64))
ODD = (..., None, -1, 0.5, 2**70, [], {}, [None], torch.zeros(2), float("nan"))


def test_whatever_stands_there_is_right_or_refused():
    """No value ends in another exception than that line, and none of another type is taken."""
    good = state(1)
    good |= {"rng": good["rng"] * 2, "world_size": 2}
    good["compression"]["errors"] *= 2
    check(good)
    refusals, loads = [], []
    for path, before in places(good):
        for value in TYPES + ODD:
            try:
                check(changed(good, path, value))
            except UsageError as error:
                refusals.append(str(error))
                continue
            # An optional value may also be given. And a run has param_groups of its own.
            optional = before is None and value in ("x", None)
            right = kind_of(value) is kind_of(before) or optional or "param_groups" in path
            if not right and any(value is one for one in TYPES):
                loads.append(f"{path}: {before!r:.20} -> {value!r:.20}")
    assert loads == []
    assert len(refusals) > 400
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_absurd_or_not_the_one_it_names_is_not_built(tmp_path):
    world = World(**vars(ALONE), backend="gloo", device=torch.device("cpu"))
    for key, value, why in (
        ("image_size", 2**20, "mlp: the model has no "),
        ("image_size", 2**40, "mlp: "),
        ("name", "mlp", "mlp: the model has no "),
        ("name", "mlq", "mlq: unknown model 'mlq'"),
    ):
        path = checkpoint.save(tmp_path, changed(state(1), f"model_spec/{key}", value))
        with pytest.raises(UsageError) as error:
            load_model(path, world, torch.distributed.group.WORLD)
        assert str(error.value).startswith(f"{path} does not fit its own model {why}")
