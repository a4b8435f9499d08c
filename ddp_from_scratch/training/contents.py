"""Checks the contents of a checkpoint before anything is built or allocated from them."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import nn

from ddp_from_scratch.errors import UsageError, one_line
from ddp_from_scratch.training.settings import Settings

# `_check` requires: the keys of a dict; a type in a set; a tensor's shape and dtype; at least a
# number. It skips None.
_SPEC = {"name": {str}, "channels": 1, "image_size": 1, "num_classes": 1}
_SCALER = dict.fromkeys(("scale", "growth_factor", "backoff_factor"), 0.0)
_SCALER |= {"growth_interval": 0, "_growth_tracker": 0}
_OTHERS = ("model", "optimizer", "scaler", "compression", "ready_order", "buckets", "rng")
_LIKE: dict[str, Any] = {
    **{"epoch": 0, "step": 0, "images": 0, "world_size": 1, "global_batch_size": 1},
    **{"model_spec": _SPEC, "settings": {}, "totals": torch.zeros(3, dtype=torch.float64)},
    **dict.fromkeys(_OTHERS),
}
_SETTINGS = {
    name: {str if one is Path else one for one in get_args(kind) or (kind,)}
    for name, kind in get_type_hints(Settings).items()
}
_GENERATORS = dict.fromkeys(("torch", "cuda", "python", "numpy"))
_CUDA_GENERATOR = torch.zeros(16, dtype=torch.uint8)
_NUMPY_KEYS = torch.zeros(624, dtype=torch.int64)


def check_contents(state: Mapping[str, Any]) -> None:
    """Checks what is known without the model; a UsageError names the fault."""
    _check(state, _LIKE)
    settings, buckets, everyone = state["settings"], state["buckets"], state["rng"]
    # Another version may lack some settings and have others.
    known = {name: _SETTINGS.get(name) for name in settings}
    _check(settings, dict.fromkeys(("dataset", "epochs")) | known, "settings")
    # No run finishes more epochs than it was asked for.
    _check(settings["epochs"], state["epoch"], "epochs")
    _expect(state["model_spec"].keys() == _SPEC.keys(), "model_spec has more than a model's")
    # Empty except with fp16.
    if state["scaler"] != {}:
        _check(state["scaler"], _SCALER, "scaler")
    if buckets is not None:
        _check(buckets, {"bucket_cap_mb": None, "overlap": {bool}}, "buckets")
        caps = buckets["bucket_cap_mb"]
        for cap in caps if isinstance(caps, list | tuple) else [caps]:
            _expect(type(cap) in (int, float) and cap >= 0, "bucket_cap_mb is not a size")
    ranks = 0 if settings.get("virtual_ranks") else state["world_size"]
    right = isinstance(everyone, list) and len(everyone) == ranks
    _expect(right, "rng does not hold the generators of each rank")
    for rank, of_rank in enumerate(everyone):
        name = f"rng of rank {rank}"
        _check(of_rank, _GENERATORS, name)
        try:
            _try_generators(of_rank, name)
        except UsageError:  # also a ValueError
            raise
        except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{name} cannot be used: {one_line(error)}") from error


def _try_generators(of_rank: Mapping[str, Any], name: str) -> None:
    """Tries the states on new generators; the process's own stay unchanged."""
    if of_rank["cuda"] is not None:
        _check(of_rank["cuda"], _CUDA_GENERATOR, f"cuda of {name}")
    torch.Generator().set_state(of_rank["torch"])
    version, internal, gauss = of_rank["python"]
    # `setstate` does not check these types.
    for number in internal:
        _check(number, {int}, f"python of {name}")
    _check(gauss, {float, NoneType}, f"python of {name}")
    random.Random().setstate((version, tuple(internal), gauss))
    algorithm, keys, position, has_gauss, gauss = of_rank["numpy"]
    _check(keys, _NUMPY_KEYS, f"numpy of {name}")
    _check(position, {int}, f"numpy of {name}")
    words = keys.numpy().astype(np.uint32)
    np.random.RandomState().set_state((algorithm, words, position, has_gauss, gauss))


def check_fit(state: Mapping[str, Any], model: nn.Module) -> None:
    """Checks that all tensors of a state, after `check_contents`, have this model's shapes."""
    named, world_size = dict(model.named_parameters()), state["world_size"]
    _check(state["model"], dict.fromkeys(model.state_dict()), "the model")
    _check_some(state["model"], model.state_dict(), "the model")

    _check(state["optimizer"], {"state": None}, "optimizer")
    _check(state["optimizer"]["state"], {}, "the optimizer's state")
    of_index = dict(enumerate(named.values()))
    # A parameter may have no state yet, or a momentum of None, so none is required.
    for index, of_one in state["optimizer"]["state"].items():
        _expect(index in of_index, f"the optimizer has a state for parameter {_short(index)}")
        _check(of_one, {}, "the optimizer's state")
        momenta = {name: value for name, value in of_one.items() if value is not None}
        like = dict.fromkeys(momenta, of_index[index])
        _check_some(momenta, like, f"the optimizer's state of parameter {index}")

    # The Reducer fills its buckets in this order, so it must name each parameter once.
    order = state["ready_order"]
    if order is not None:
        trainable = sorted(name for name, one in named.items() if one.requires_grad)
        names = isinstance(order, list) and all(isinstance(name, str) for name in order)
        _expect(
            names and sorted(order) == trainable, "ready_order does not name each parameter once"
        )

    # PowerSGD's errors of each rank, and its right factors.
    saved, name = state["compression"], "compression"
    if saved is None:
        return
    _check(saved, {"iteration": 0, "loss_scale": 0.0, "qs": {}, "errors": None}, name)
    errors = saved["errors"]
    right = isinstance(errors, list) and len(errors) == world_size
    _expect(right, f"{name} is not that of each rank")
    for of_rank in errors:
        _check_some(of_rank, named, name)
        _expect(of_rank.keys() == errors[0].keys(), f"{name} is of other parameters on each rank")
    for key, q in saved["qs"].items():
        _expect(key in named and isinstance(q, torch.Tensor), f"{name} has no {_short(key)}")
        # On the meta device: a size from the file must not allocate.
        columns = named[key].numel() // max(1, named[key].shape[0])
        of_key = torch.empty(columns, q.shape[1] if q.dim() == 2 else 0, device="meta")
        _check(q, of_key, f"{name} of {key}")


def _check_some(found: Any, like: Mapping[Any, torch.Tensor], name: str) -> None:
    _check(found, {}, name)
    for key in found:
        _expect(key in like, f"{name} has no {_short(key)}")
    _check(found, {key: like[key] for key in found}, name)


def _check(value: Any, like: Any, name: str = "") -> None:
    if isinstance(like, Mapping):
        _expect(isinstance(value, Mapping), f"{name or 'it'} is not a table, but {_short(value)}")
        missing = [key for key in like if key not in value]
        _expect(not missing, f"{name or 'it'} has no {', '.join(missing[:3])}")
        for key, of_key in like.items():
            _check(value[key], of_key, f"{key} of {name}" if name else key)
        return
    if like is None:
        return
    if isinstance(like, torch.Tensor):
        expected = f"a tensor of {tuple(like.shape)} and {like.dtype}"
        right = isinstance(value, torch.Tensor) and not value.is_sparse
        right = right and (value.shape, value.dtype) == (like.shape, like.dtype)
        # An expanded tensor would claim any size at no cost, so require memory for each element.
        right = right and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    elif isinstance(like, set):
        expected = " or ".join(sorted(kind.__name__ for kind in like))
        # `type`, not isinstance: True is an int, too. An int is valid for a float.
        right = type(value) in like or (type(value) is int and float in like)
    else:
        expected, most = f"{like:g} or more", math.inf if type(like) is float else 2**62
        right = type(value) in (int, type(like)) and like <= value < most
    _expect(right, f"{name} must be {expected}, got {_short(value)}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UsageError(otherwise)


def _short(value: Any) -> str:
    """Describes a value briefly, because its contents may be of any size."""
    if isinstance(value, torch.Tensor):
        return f"one of {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
