"""Where flat tensors lie."""

from pathlib import Path

import pytest
import torch

from ddp_from_scratch.buckets.memory import in_huge_pages


def flags_at(address: int) -> set[str]:
    """What Linux has been told of the memory at `address`, as in /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and first.replace("-", "").isalnum() and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return set(rest)
    raise AssertionError("no such memory")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has none"
)
def test_large_tensors_ask_for_huge_pages():
    flat = torch.empty(2**25)  # large enough to have memory of its own
    middle = flat.data_ptr() + flat.nbytes // 2
    assert "hg" not in flags_at(middle)
    assert in_huge_pages(flat) is flat
    assert "hg" in flags_at(middle)
    for numel in (0, 1, 2**19 - 1):  # stay as they are
        flat = torch.empty(numel)
        assert in_huge_pages(flat) is flat
