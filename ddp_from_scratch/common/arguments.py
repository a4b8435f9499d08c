"""Checks of arguments of several functions: an error names the value and what was expected."""

import warnings
from collections.abc import Collection
from difflib import get_close_matches
from numbers import Integral

import torch
import torch.distributed as dist

from ddp_from_scratch.common.group import check_group


def check_whole(name: str, value: object) -> None:
    """Raises a TypeError if an argument is no whole number."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")


def check_src(src: int, process_group: dist.ProcessGroup | None) -> None:
    """Raises unless `src` is a rank of the group: a TypeError if it is no number."""
    if isinstance(src, dist.ProcessGroup):
        raise TypeError("src must be a rank, got a process group: pass process_group=group")
    check_whole("src", src)
    check_group(process_group)
    world_size = dist.get_world_size(process_group)
    if not 0 <= src < world_size:
        raise ValueError(f"src must be a rank of the group, 0 to {world_size - 1}, got {src}")


def check_names(ignore: Collection[str]) -> list[str]:
    """Returns names to ignore as a list; raises a TypeError for a text, or what is no name."""
    if isinstance(ignore, (str, bytes)):
        raise TypeError(f"ignore must be a list of names, got {ignore!r}: write [{ignore!r}]")
    for name in (names := [*ignore]):
        if not isinstance(name, str):
            raise TypeError(f"ignore must be a list of names, got one with {type(name).__name__}")
    return names


def check_ignore(ignore: Collection[str], module: torch.nn.Module) -> frozenset[str]:
    """Returns the names to ignore; of a tensor with several names, all of them.

    Raises as `check_names`. Warns if a name is no parameter or buffer of this rank's module.
    """
    if not (chosen := check_names(ignore)):
        return frozenset()
    named = _named_tensors(module)
    for name in chosen:
        if name not in named:
            close = get_close_matches(name, named, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            # No error: another rank may have it, and would wait for this one.
            text = f"ignore has {name!r}, no parameter or buffer of this rank's module{hint}"
            warnings.warn(text, stacklevel=3)
    ids = {id(named[name]) for name in chosen if named.get(name) is not None}
    return frozenset(chosen) | {name for name, tensor in named.items() if id(tensor) in ids}


def known_names(names: Collection[str], module: torch.nn.Module) -> frozenset[str]:
    """Returns those of the names that are parameters or buffers of the module."""
    return frozenset(names) & _named_tensors(module).keys()


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns all parameters and buffers by all their names, also those that are still None."""
    found: dict[str, torch.Tensor | None] = dict(module.named_parameters())
    found |= module.named_buffers()
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (part._parameters, part._buffers):
            found |= {prefix + name: tensor for name, tensor in table.items()}
    return found
