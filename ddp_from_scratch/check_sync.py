"""Shows that ranks hold the same model, bit for bit, or says which parameter differs, and where."""

import hashlib

import torch
import torch.distributed as dist


def check_sync(module: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> str:
    """Compares the parameters of all ranks, bit for bit.

    Ranks exchange digests, never values: 32 bytes a parameter.

    Returns:
        A checksum of all parameters as 16 hexadecimal digits, the same on every rank.

    Raises:
        RuntimeError: a parameter differs between ranks. The text names the first such parameter
            and the ranks that differ from rank 0, and is the same on every rank.
    """
    mine = {name: _digest(parameter) for name, parameter in module.named_parameters()}
    everyone: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(everyone, mine, group=process_group)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        zero = everyone[0].get(name)
        differ = [r for r, theirs in enumerate(everyone) if theirs.get(name) != zero]
        if differ:
            raise RuntimeError(
                f"parameter {name} is not the same on all ranks: {differ} differ from rank 0"
            )
    return hashlib.sha256(b"".join(mine.values())).hexdigest()[:16]


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous()
    return hashlib.sha256(values.view(-1).view(torch.uint8).numpy().tobytes()).digest()
