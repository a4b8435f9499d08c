"""Complex parameters are averaged, and refused by what cannot step them."""

import pytest
import torch
from torch import nn

from ddp_from_scratch import Adam, NodeSharedAdam, Reducer


@pytest.mark.usefixtures("alone")
def test_adam_refuses_complex_parameters_at_once_and_later():
    real, complex_ = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)
    for kind in (Adam, NodeSharedAdam):
        with pytest.raises(ValueError, match=r"Adam\w* takes no complex parameters, got one of "):
            kind(complex_.parameters(), reducer=Reducer(complex_))
    optimizer = Adam(real.parameters(), reducer=Reducer(real))
    with pytest.raises(ValueError, match="Adam takes no complex parameters"):
        optimizer.add_param_group({"params": complex_.parameters()})
    assert len(optimizer.param_groups) == 1  # no group was added
