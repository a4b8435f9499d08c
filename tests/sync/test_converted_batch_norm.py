"""Batch norms that are converted: what becomes of them, of their state and of their errors."""

import io
import pickle

import pytest
import torch
from torch import nn

from ddp_from_scratch import (
    SyncBatchNorm,
    convert_sync_batchnorm,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.Linear(3, 3), self.shared, nn.BatchNorm2d(3, affine=False))
        self.other = nn.Sequential(nn.BatchNorm3d(3, momentum=None), nn.SyncBatchNorm(3))
        self.untouched = nn.ModuleList([nn.InstanceNorm1d(3, affine=True), nn.LayerNorm(3)])


def test_every_batch_norm_is_converted_in_place():
    model = Model()
    model.other.eval()
    parameters, state = list(model.parameters()), model.state_dict()
    modes = [module.training for module in model.modules()]
    assert convert_sync_batchnorm(model) is model
    found = [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]
    assert found == ["shared", "inner.2", "other.0", "other.1"]
    assert model.inner[1] is model.shared
    assert model.other[0].momentum is None
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert [module.training for module in model.modules()] == modes
    assert model.state_dict().keys() == state.keys()
    assert model.state_dict()._metadata == state._metadata
    assert [type(layer) for layer in model.untouched] == [nn.InstanceNorm1d, nn.LayerNorm]


def test_a_batch_norm_by_itself_is_replaced():
    layer = nn.BatchNorm2d(4, eps=0.5)
    told: list[int] = []
    layer.register_forward_hook(lambda *_: told.append(1))
    converted = convert_sync_batchnorm(layer)
    assert isinstance(converted, SyncBatchNorm)
    assert (converted.num_features, converted.eps) == (4, 0.5)
    converted(torch.randn(2, 4, 3, 3))
    assert told == [1]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_state_is_that_of_torch(options):
    ours, theirs = SyncBatchNorm(3, **options), nn.BatchNorm2d(3, **options)
    theirs(torch.randn(4, 3, 2, 2))
    file = io.BytesIO()
    torch.save(theirs.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    theirs.load_state_dict(ours.state_dict())


def test_old_state_without_a_count_of_batches_is_loaded():
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    SyncBatchNorm(3).load_state_dict(state)


def test_a_lazy_layer_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1 is lazy and has no shape yet"):
        convert_sync_batchnorm(model)
    model(torch.randn(3, 2))
    assert isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)


def test_without_a_process_group_it_is_torchs():
    torch.manual_seed(0)
    ours, theirs = SyncBatchNorm(3), nn.BatchNorm2d(3)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2)
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_var, theirs.running_var)
    pickle.loads(pickle.dumps(ours))


@pytest.mark.parametrize("shape", [(3,), (4, 0, 2), (1, 3), (2, 5, 2)], ids=str)
def test_errors_are_those_of_torch(shape):
    x = torch.zeros(shape)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        (nn.SyncBatchNorm if 0 in shape or len(shape) == 1 else nn.BatchNorm1d)(3)(x)
    with pytest.raises(type(theirs.value)) as ours:
        SyncBatchNorm(3)(x)
    assert str(ours.value) == str(theirs.value)
