"""Saves a run to one file and loads it again, so that it continues bit for bit.

    |<- torch.save's zip, all that torch.load reads ---->|<- "ddp sha256 " and 64 digits ->|

A file gets its final name only when it is complete; the digest detects later damage.
"""

import fcntl
import hashlib
import os
import random
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.errors import one_line
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings

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

    Raises a UsageError if another run holds it, or has left checkpoints that this one would remove.
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

    A file that may be whole (not readable, newer) raises a UsageError, but no UnreadableError.
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
    return state


def files(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first."""
    names = folder.glob("checkpoint-*.pt")
    found = [path for path in names if path.stem.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def find_checkpoint(
    settings: Settings, model_spec: dict[str, Any], model: torch.nn.Module, report: Report
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
    if (before := state["settings"]["optimizer"]) != settings.optimizer:
        raise UsageError(
            f"{path} holds the state of --optimizer {before}, this run has {settings.optimizer}: "
            f"give --optimizer {before}"
        )
    check_model(state, model, path)
    report.line(f"resuming from {path}: epoch {state['epoch'] + 1}, step {state['step']}")
    return state


def _describe(spec: dict[str, Any]) -> str:
    return "{name} for {num_classes} classes of {channels}x{image_size}x{image_size}".format(**spec)


def check_model(state: State, model: torch.nn.Module, path: Path) -> None:
    """Raises a UsageError unless the model has the checkpoint's tensors."""
    saved, ours = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (state["model"], model.state_dict())
    )
    for name in saved | ours:  # another version of torchvision may have another model by this name
        if saved.get(name) != ours.get(name):
            there, here = (found.get(name, "missing") for found in (saved, ours))
            raise UsageError(
                f"{path} does not fit this version of {state['model_spec']['name']}: {name} is "
                f"{there} there and {here} here: install the versions that it was made with"
            )


def rng_state(device: torch.device) -> State:
    """Returns the states of the random generators: torch's, the device's, Python's and numpy's."""
    gpu = torch.get_device_module(device) if device.type == "cuda" else None
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": None if gpu is None else gpu.get_rng_state(device),
        "python": random.getstate(),
        # As a tensor, because `load` unpickles only tensors and plain values.
        "numpy": (name, torch.from_numpy(np.array(keys, np.int64)), *rest),
    }


def set_rng_state(state: State, device: torch.device) -> None:
    """Restores the generators to what `rng_state` has returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.get_device_module(device).set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _reason(error: BaseException) -> str:
    """Returns the system's text for a failure, or else the error's own."""
    # Search the context: for a full disk torch only says "unexpected pos 640".
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__context__
    return one_line(error)
