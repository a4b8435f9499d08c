"""bench/workloads.py: models built in, of torchvision, and of a file."""

import pytest
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.workloads import WORKLOADS, Transformer, workload

OWN = """
import torch
import neighbour

def make():
    return torch.nn.Linear(256, 1024), (torch.randn(2, 256), torch.tensor([0, 9]))

def with_loss():
    model, batch = make()
    return model, {"x": batch[0]}, lambda model, batch: neighbour.FACTOR * model(batch["x"]).sum()

def wrong():
    return torch.nn.Linear(1, 1)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # undone at the end, with what the import adds
    (tmp_path / "neighbour.py").write_text("FACTOR = 3")
    path = tmp_path / "my_file.py"
    path.write_text(OWN)
    return path


def test_models_have_a_row_of_logits_for_each_label():
    for name, built_in in WORKLOADS.items():
        with torch.device("meta"):
            model = built_in.model()
            inputs, labels = built_in.batch()
            assert model(inputs).shape[0] == labels.numel(), name
    megabytes = {name: round(w.parameter_bytes / 2**20) for name, w in WORKLOADS.items()}
    told = {"mlp": 64, "resnet18": 45, "resnet50": 97, "transformer": 39, "layers500": 2}
    assert megabytes == told | {"mlp64": 64, "gpt2": 475}
    assert all(f" {megabytes[name]} MB" in w.name for name, w in WORKLOADS.items())


def test_a_transformer_sees_no_later_token():
    torch.manual_seed(0)
    model = Transformer(11, 5, width=8, heads=2, depth=1)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    before, changed = model(tokens), model(torch.tensor([[1, 2, 3, 4, 6]]))
    assert torch.allclose(before[:4], changed[:4])
    assert not torch.allclose(before[4], changed[4])


def test_a_classifier_of_torchvision():
    found = workload("squeezenet1_1")
    assert found.name == "squeezenet1_1, 5 MB, batch 4 at 224x224"
    assert workload("googlenet").model().aux_logits is False


def test_a_model_of_a_file(own):
    found = workload(f"{own}:make")
    assert found.name == "my_file.py:make, 1 MB"
    assert found.parameter_bytes == 4 * (256 * 1024 + 1024)
    assert found.loss(found.model(), found.batch()).ndim == 0
    with_loss = workload(f"{own}:with_loss")
    assert with_loss.loss(lambda x: torch.ones(2), {"x": None}) == 6


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nope", "there is no model 'nope': --model takes mlp, "),
        ("none.py:make", "cannot take make from none.py: .*No such file"),
        ("{own}:other", "cannot take other from .*my_file.py: module 'my_file' has no"),
        ("{own}:wrong", "must return a module and a batch, optionally a loss, got Linear"),
        ("readme.md:make", "cannot take make from readme.md: readme.md is no Python file"),
    ],
)
def test_a_model_that_is_not_there(name, error, own):
    with pytest.raises(UsageError, match=error) as raised:
        workload(name.format(own=own))
    assert "\n" not in str(raised.value)
