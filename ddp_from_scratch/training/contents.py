"""The contents of a checkpoint, checked before anything is built or allocated from them."""

import math
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_from_scratch.errors import UsageError, one_line

# Whole numbers, each with the least that it can be.
_COUNTS = {"epoch": 0, "step": 0, "images": 0, "world_size": 1, "global_batch_size": 1}
_MODEL_SPEC = {"channels": 1, "image_size": 1, "num_classes": 1}
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OTHERS = ("model", "model_spec", "optimizer", "scaler", "compression", "ready_order", "buckets")
_KEYS = (*_COUNTS, *_OTHERS, "totals", "rng", "settings")
_CUDA_GENERATOR_BYTES = 16


def check_contents(state: Mapping[str, Any]) -> None:
    """Checks all that can be known without the model.

    Raises:
        UsageError: something is missing, or is not what a run writes there; the text names it.
    """
    _has(state, _KEYS, "it")
    for name, least in _COUNTS.items():
        _is_count(state[name], least, name)
    settings, spec = state["settings"], state["model_spec"]
    _has(settings, ("dataset", "epochs"), "settings")
    _expect(isinstance(settings["dataset"], str), "the dataset is not a name")
    # No run has more epochs behind it than it was asked for.
    _is_count(settings["epochs"], state["epoch"], "epochs")
    _has(spec, ("name", *_MODEL_SPEC), "model_spec")
    _expect(isinstance(spec["name"], str), "the model is not a name")
    _expect(len(spec) == 1 + len(_MODEL_SPEC), "model_spec has more than a model's")
    for name, least in _MODEL_SPEC.items():
        _is_count(spec[name], least, name)
    _expect(_is_tensor(state["totals"], torch.zeros(3, dtype=torch.float64)), "totals are not 3")
    # Empty but for fp16.
    if state["scaler"] != {}:
        _has(state["scaler"], _SCALER, "scaler")
        for name in _SCALER:
            _is_number(state["scaler"][name], f"the scaler's {name}")
    buckets = state["buckets"]
    if buckets is not None:
        _has(buckets, ("bucket_cap_mb", "overlap"), "buckets")
        caps = buckets["bucket_cap_mb"]
        for cap in caps if isinstance(caps, list | tuple) else [caps]:
            _expect(isinstance(cap, int | float) and cap >= 0, "bucket_cap_mb is not a size")
    everyone = state["rng"]
    _expect(
        isinstance(everyone, list)
        and len(everyone) == (0 if settings.get("shards") else state["world_size"]),
        "rng does not hold the generators of each rank",
    )
    for rank, generators in enumerate(everyone):
        _check_generators(generators, rank)


def check_fit(state: Mapping[str, Any], model: nn.Module) -> None:
    """Checks that all tensors of a state, after `check_contents`, have this model's shapes.

    The model may be on the meta device.

    Raises:
        UsageError: something does not fit; the text names it.
    """
    named = dict(model.named_parameters())
    _check_tensors(state["model"], model.state_dict(), "the model", every=True)

    optimizer = state["optimizer"]
    _has(optimizer, ("state",), "optimizer")
    _has(optimizer["state"], (), "the optimizer's state")
    of_index = dict(enumerate(named.values()))
    # A parameter may have no state yet, and its momentum may be None: not every one is required.
    for index, of_one in optimizer["state"].items():
        _expect(index in of_index, f"the optimizer has a state for parameter {_short(index)}")
        _has(of_one, (), "the optimizer's state")
        like = dict.fromkeys(of_one, of_index[index])
        momenta = {name: value for name, value in of_one.items() if value is not None}
        _check_tensors(momenta, like, f"the optimizer's state of parameter {index}")

    # The Reducer fills its buckets in this order, so each parameter must be there, once.
    order = state["ready_order"]
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    if order is not None:
        names = isinstance(order, list) and all(isinstance(name, str) for name in order)
        _expect(
            names and sorted(order) == sorted(trainable),
            "ready_order does not name each parameter once",
        )
    if state["compression"] is not None:
        _check_compression(state["compression"], named, state["world_size"])


def _check_generators(of_rank: Any, rank: int) -> None:
    """Tries a rank's generators out."""
    # On new generators: the process's own stay as they are.
    name = f"rng of rank {rank}"
    _has(of_rank, ("torch", "cuda", "python", "numpy"), name)
    cuda = torch.zeros(_CUDA_GENERATOR_BYTES, dtype=torch.uint8)
    _expect(of_rank["cuda"] is None or _is_tensor(of_rank["cuda"], cuda), f"{name} has no cuda")
    try:
        torch.Generator().set_state(of_rank["torch"])
        version, internal, gauss = of_rank["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        algorithm, keys, position, has_gauss, gauss = of_rank["numpy"]
        _expect(_is_tensor(keys, torch.zeros(624, dtype=torch.int64)), f"{name} has no numpy")
        words = keys.numpy().astype(np.uint32)
        np.random.RandomState().set_state((algorithm, words, position, has_gauss, gauss))
    except UsageError:  # which is a ValueError
        raise
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be used: {one_line(error)}") from error


def _check_compression(saved: Any, named: Mapping[str, nn.Parameter], world_size: int) -> None:
    """Checks each rank's PowerSGD errors, and the right factors."""
    name = "compression"
    _has(saved, ("iteration", "qs", "errors", "loss_scale"), name)
    _is_count(saved["iteration"], 0, f"{name}'s iteration")
    _is_number(saved["loss_scale"], f"{name}'s loss_scale")
    errors = saved["errors"]
    _expect(
        isinstance(errors, list) and len(errors) == world_size, f"{name} is not that of each rank"
    )
    for of_rank in errors:
        _check_tensors(of_rank, named, name)
        _expect(of_rank.keys() == errors[0].keys(), f"{name} is of other parameters on each rank")
    _has(saved["qs"], (), f"{name}'s qs")
    for key, q in saved["qs"].items():
        _expect(key in named and isinstance(q, torch.Tensor), f"{name} has no {_short(key)}")
        # On the meta device: a size that comes from the file must not allocate.
        columns = named[key].numel() // max(1, named[key].shape[0])
        like = torch.empty(columns, q.shape[1] if q.dim() == 2 else 0, device="meta")
        _expect(_is_tensor(q, like), f"{name} of {key} has another shape")


def _check_tensors(
    found: Any, like: Mapping[str, torch.Tensor], name: str, *, every: bool = False
) -> None:
    """Requires of each tensor the shape of its like; with `every`, requires all of `like`."""
    _has(found, like if every else (), name)
    for key, tensor in found.items():
        _expect(key in like, f"{name} has no {_short(key)}")
        if not _is_tensor(tensor, like[key]):
            shape = tuple(like[key].shape)
            raise UsageError(
                f"{key} of {name} must be a tensor of {shape} and {like[key].dtype}, got "
                f"{_short(tensor)}"
            )


def _is_tensor(value: Any, like: torch.Tensor) -> bool:
    """True for a dense tensor of the same shape and dtype."""
    # With memory for each element: an expanded one would claim any size at no cost.
    return (
        isinstance(value, torch.Tensor)
        and not value.is_sparse
        and value.shape == like.shape
        and value.dtype == like.dtype
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    )


def _has(value: Any, keys: Collection[str], name: str) -> None:
    _expect(isinstance(value, Mapping), f"{name} is not a table, but {_short(value)}")
    missing = [key for key in keys if key not in value]
    _expect(not missing, f"{name} has no {', '.join(missing[:3])}")


def _is_count(value: Any, least: int, name: str) -> None:
    # In Python True is an int, too.
    whole = isinstance(value, int) and not isinstance(value, bool)
    _expect(
        whole and least <= value < 2**62, f"{name} must be {least} or more, got {_short(value)}"
    )


def _is_number(value: Any, name: str) -> None:
    number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    _expect(number, f"{name} must be a number, 0 or more, got {_short(value)}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UsageError(otherwise)


def _short(value: Any) -> str:
    """A value in a few words."""
    # Never all of its contents, which may be of any size.
    if isinstance(value, torch.Tensor):
        return f"one of {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
