"""Where flat tensors lie."""

import mmap
from unittest.mock import Mock

import pytest
import torch

from ddp_from_scratch.core import memory


@pytest.mark.skipif(memory._libc is None, reason="this system has none")
def test_large_tensors_ask_for_huge_pages(monkeypatch):
    monkeypatch.setattr(memory, "_libc", libc := Mock())
    for numel in (0, 1, 2**19 - 1):  # stay as they are
        flat = torch.empty(numel)
        assert memory.in_huge_pages(flat) is flat
    assert not libc.madvise.called
    flat = torch.empty(2**19)
    assert memory.in_huge_pages(flat) is flat
    ((begin, length, advice),) = [call.args for call in libc.madvise.mock_calls]
    assert 0 <= begin.value - flat.data_ptr() < mmap.PAGESIZE
    assert begin.value % mmap.PAGESIZE == 0
    assert begin.value + length.value == flat.data_ptr() + flat.nbytes
    assert advice == mmap.MADV_HUGEPAGE
