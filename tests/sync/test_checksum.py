"""Checksums: other bits, other numbers; the layout in memory makes no difference."""

import pytest
import torch

from ddp_from_scratch.sync.checksum import checksums

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype):
    ones = [torch.ones(shape).to(dtype) for shape in ((), (0,), (3,), (2, 5), (70_000,))]
    zeros = [torch.zeros_like(tensor) for tensor in ones]
    assert checksums(ones) == checksums([tensor.clone() for tensor in ones])
    for one, zero, tensor in zip(checksums(ones), checksums(zeros), ones, strict=True):
        assert (one == zero) is (tensor.numel() == 0)


def test_strides_make_no_difference_and_order_does():
    values = torch.randn(2, 3, 4, 5)
    swapped = values.flip(0)
    laid_out = values.to(memory_format=torch.channels_last)
    transposed = values.transpose(0, 1).contiguous().transpose(0, 1)
    first, *others, other = checksums([values, laid_out, transposed, swapped])
    assert others == [first, first]
    assert other != first


def test_one_bit_anywhere_shows():
    """Also between pieces of 65,536 elements that only changed places."""
    values = torch.zeros(3 * 2**16, dtype=torch.int32)
    found = {checksums([values])[0]}
    for index in (0, 1, 2**16 - 1, 2**16, 2**17, 3 * 2**16 - 1):
        for bit in (1, 2**15, -(2**31)):
            changed = values.clone()
            changed[index] = bit
            found.add(checksums([changed])[0])
    assert len(found) == 1 + 6 * 3


def test_no_tensors():
    assert checksums([]) == []
