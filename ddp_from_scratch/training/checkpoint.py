"""Saves a run to one file and loads it again, so that it continues bit for bit.

    |<- torch.save's zip, all that torch.load reads ---->|<- "ddp sha256 " and 64 digits ->|

A file gets its final name only when it is complete; the digest detects later damage.
"""

import fcntl
import hashlib
import math
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import NoneType
from typing import Any, BinaryIO, TextIO, get_args, get_type_hints

import numpy as np
import torch
from torch import nn

from ddp_from_scratch.common import gpu
from ddp_from_scratch.common.errors import UsageError, one_line
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.virtual_ranks.tree_reduction import generator_states, set_generator_states

FORMAT = "ddp_from_scratch checkpoint"
VERSION = 1
_KEEP = 2  # the newest, and one to fall back to if the newest is damaged
_MARK = b"ddp sha256 "
_TRAILER = len(_MARK) + 2 * hashlib.sha256().digest_size

State = dict[str, Any]


class UnreadableError(UsageError):
    """A file that no run has written: truncated, damaged, or not a checkpoint at all."""


def save(folder: Path, state: State) -> Path:
    """Writes plain values and tensors as the newest checkpoint in `folder`; keeps the newest two.

    Raises a UsageError if the folder cannot be written to; older checkpoints stay.
    """
    # Not numbered by step: with another batch size a later checkpoint may have fewer steps.
    number = max((_number(path) for path in files(folder)), default=0) + 1
    final = folder / f"checkpoint-{number:06d}.pt"
    temporary = final.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A new file: an existing one may be a link. Synced before its rename, it is never half.
        temporary.unlink(missing_ok=True)
        with temporary.open("x+b") as file:
            torch.save({"format": FORMAT, "version": VERSION} | state, file)
            file.write(_MARK + _digest(file, file.tell()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        # The new name must also be on disk before an older checkpoint is removed.
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        for old in files(folder)[_KEEP:]:
            old.unlink()
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write checkpoint {final}: {_reason(error)}") from error
    return final


def _digest(file: BinaryIO, size: int) -> bytes:
    """Returns the hex digest of the first `size` bytes; leaves the position behind them."""
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, 2**20))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest().encode()


def prepare_folder(folder: Path, *, resume: str | None) -> TextIO:
    """Makes the folder, tests that it is writable, and locks it until the file is closed.

    A UsageError where another run holds it, or has left checkpoints that this one would remove.
    """
    name, path = f"--checkpoint-dir {folder}", folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        file = None if resume is None else Path(resume).resolve()
        is_its_own = resume == "auto" or (file and file.parent == folder.resolve())
        if files(folder) and not is_its_own:
            which = "another run" if resume is None else f"another run than --resume {resume}"
            raise UsageError(
                f"{name} holds the checkpoints of {which}: continue that one with --resume auto, "
                f"or give another folder"
            )
        if path.is_symlink():  # it could lead to any file
            raise UsageError(f"{name}: {path} is a symbolic link: remove it")
        # The lock is the `flock`, not the file, which stays.
        lock = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
        try:
            # On NFS it holds between machines, unless mounted with `nolock` or `local_lock=flock`.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            lock.close()
            raise UsageError(
                f"{name} is in use by another run: give this one another folder, or wait until "
                f"that one has ended"
            ) from error
        except OSError:  # a file system without locks
            pass
        # Left by a killed run: under the lock no other run writes here.
        for left_behind in folder.glob("checkpoint-*.tmp"):
            left_behind.unlink()
    except OSError as error:
        raise UsageError(f"{name} cannot be written to: {_reason(error)}") from error
    return lock


def load(path: Path) -> State:
    """Reads a checkpoint to the CPU; unpickles nothing but plain values and tensors.

    A file that may be whole (not readable, newer) is a UsageError, but no UnreadableError.
    """
    foreign = f"{path} is truncated, or is not a checkpoint of ddp_from_scratch"
    state: State = {}
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) - _TRAILER
            digest, trailer = _digest(file, size), file.read()
            is_marked, is_whole = trailer.startswith(_MARK), trailer == _MARK + digest
            if is_whole:  # nothing else is unpickled
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read checkpoint {path}: {error.strerror}") from error
    except Exception as error:  # damaged data may raise anything
        raise UnreadableError(foreign) from error
    if is_marked and not is_whole:
        raise UnreadableError(
            f"{path} is damaged: its bytes are not those that were written (sha256 differs)"
        )
    is_ours = isinstance(state, dict) and state.get("format") == FORMAT
    if not is_ours or not isinstance(state.get("version"), int):
        raise UnreadableError(foreign)
    if state["version"] > VERSION:
        newer = f"this program reads up to {VERSION}: install a newer ddp_from_scratch"
        raise UsageError(f"{path} has checkpoint version {state['version']}, {newer}")
    try:
        check_contents(state)
    except UsageError as error:
        raise UnreadableError(f"{path} is no checkpoint that a run has written: {error}") from error
    return state


def files(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first."""
    names = folder.glob("checkpoint-*.pt")
    found = [path for path in names if path.stem.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def find_checkpoint(
    settings: Settings, model_spec: dict[str, Any], model: nn.Module, report: Report
) -> State | None:
    """Loads the checkpoint to continue from, if any: `--resume`, or the newest whole one.

    Names each newer one, and renames it to `.unreadable`. A UsageError if none is whole, if one
    that cannot be read may be whole, or if it does not fit.
    """
    resume, folder = settings.resume, settings.checkpoint_dir
    if resume is None:
        return None
    paths = files(folder) if resume == "auto" and folder is not None else [Path(resume)]
    unreadable: dict[Path, str] = {}
    for path in paths:
        try:
            state = load(path)
            break
        except UnreadableError as error:
            if resume != "auto":
                raise
            unreadable[path] = str(error)
    else:
        if unreadable:
            texts = "; ".join(unreadable.values())
            raise UsageError(f"no checkpoint in {folder} can be read: {texts}")
        report.line(f"no checkpoint in {folder} yet: starting from the beginning")
        return None
    for damaged, text in unreadable.items():
        # Else a damaged file, as one of the newest two, would push out an intact one.
        damaged.rename(damaged.with_suffix(".unreadable"))
        report.warning(f"{text}; using {path.name} instead")
    saved, ours = _describe(state["model_spec"]), _describe(model_spec)
    if saved != ours:
        hint = "give the --model and --dataset it was made with"
        raise UsageError(f"{path} holds {saved}, this run trains {ours}: {hint}")
    settings.check_optimizer(state["settings"], path)
    try:
        check_fit(state, model)
    except UsageError as error:
        raise UsageError(f"{path} does not fit {ours}: {error}") from error
    report.line(f"resuming from {path}: epoch {state['epoch'] + 1}, step {state['step']}")
    return state


def _describe(spec: dict[str, Any]) -> str:
    return "{name} for {num_classes} classes of {channels}x{image_size}x{image_size}".format(**spec)


def rng_state() -> State:
    """Returns the states of this process's random generators: torch, CUDA, Python and numpy."""
    cpu, cuda, python, (name, keys, *rest) = generator_states()
    # As a tensor, because `load` unpickles only tensors and plain values.
    numpy = name, torch.from_numpy(np.array(keys, np.int64)), *rest
    return {"torch": cpu, "cuda": cuda, "python": python, "numpy": numpy}


def set_rng_state(state: State) -> None:
    """Restores the generators to what `rng_state` has returned."""
    cuda, numpy = state["cuda"] if gpu.count() else None, _numpy_state(state["numpy"])
    set_generator_states((state["torch"], cuda, state["python"], numpy))


def _numpy_state(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    name, keys, *rest = saved
    return name, keys.numpy().astype(np.uint32), *rest


def _reason(error: BaseException) -> str:
    """Returns the system's text for a failure, or else the error's own."""
    # Search the context: for a full disk torch only says "unexpected pos 640".
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__context__
    return one_line(error)


# Contents, checked before anything is built or allocated from them -------------------------------

# `_check` requires: the keys of a dict; as many entries as a tuple has; a type in a set; a tensor's
# shape and dtype; at least a number. It skips None.
_SPEC = {"name": {str}, "channels": 1, "image_size": 1, "num_classes": 1}
_SCALER = dict.fromkeys(("scale", "growth_factor", "backoff_factor"), 0.0)
_SCALER |= {"growth_interval": 0, "_growth_tracker": 0}
_COUNTS = {"step": torch.tensor(0.0)}  # AdamW's
_OTHERS = ("model", "optimizer", "scaler", "compression", "ready_order", "buckets", "rng")
_LIKE = dict.fromkeys(_OTHERS) | {
    **{"epoch": 0, "step": 0, "images": 0, "world_size": 1, "global_batch_size": 1},
    **{"model_spec": _SPEC, "settings": {}, "totals": torch.zeros(3, dtype=torch.float64)},
}
_SETTINGS = {
    name: {str if one is Path else one for one in get_args(kind) or (kind,)}
    for name, kind in get_type_hints(Settings).items()
}
_GENERATORS: dict[str, Any] = {
    **{"torch": None, "cuda": None, "python": ({int}, ({int},) * 625, {float, NoneType})},
    "numpy": ({str}, torch.zeros(624, dtype=torch.int64), {int}, {int}, {float}),
}


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
    if state["scaler"] != {}:  # with fp16
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
        if of_rank["cuda"] is not None:
            _check(of_rank["cuda"], torch.zeros(16, dtype=torch.uint8), f"cuda of {name}")
        try:
            # On new generators: the process's own stay unchanged.
            torch.Generator().set_state(of_rank["torch"])
            random.Random().setstate(of_rank["python"])
            np.random.RandomState().set_state(_numpy_state(of_rank["numpy"]))
        except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{name} cannot be used: {one_line(error)}") from error


def check_fit(state: Mapping[str, Any], model: nn.Module) -> None:
    """Checks that all tensors of a state, after `check_contents`, have this model's shapes."""
    named = dict(model.named_parameters())
    _check(state["model"], dict.fromkeys(model.state_dict()), "the model")
    _check_some(state["model"], model.state_dict(), "the model")

    _check(state["optimizer"], {"state": {}}, "optimizer")
    of_index = dict(enumerate(named.values()))
    # A parameter may have no state yet, or a momentum of None, so none is required.
    for index, of_one in state["optimizer"]["state"].items():
        _expect(index in of_index, f"the optimizer has a state for parameter {_short(index)}")
        _check(of_one, {}, "the optimizer's state")
        like = {k: _COUNTS.get(k, of_index[index]) for k, v in of_one.items() if v is not None}
        _check(of_one, like, f"the optimizer's state of parameter {index}")

    # The Reducer fills its buckets in this order, so it must name each parameter once.
    order = state["ready_order"]
    if order is not None:
        trainable = sorted(name for name, one in named.items() if one.requires_grad)
        right = isinstance(order, list) and all(isinstance(name, str) for name in order)
        right = right and sorted(order) == trainable
        _expect(right, "ready_order does not name each parameter once")

    # PowerSGD's errors of each rank, and its right factors.
    saved, name = state["compression"], "compression"
    if saved is None:
        return
    _check(saved, {"iteration": 0, "loss_scale": 0.0, "qs": {}, "errors": None}, name)
    errors = saved["errors"]
    right = isinstance(errors, list) and len(errors) == state["world_size"]
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
    if isinstance(like, tuple):
        right = isinstance(value, tuple) and len(value) == len(like)
        _expect(right, f"{name} must have {len(like)} entries, got {_short(value)}")
        for one, of_one in zip(value, like, strict=True):
            _check(one, of_one, name)
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
