"""Saves a run to one file and loads it again, so that it continues bit for bit.

    |<- torch.save's zip, all that torch.load reads ---->|<- "ddp sha256 " and 64 digits ->|

A file gets its final name only when it is complete; the digest detects later damage.
"""

import errno
import fcntl
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO

import numpy as np
import torch
from torch import nn

from ddp_from_scratch import gpu
from ddp_from_scratch.errors import UsageError, one_line
from ddp_from_scratch.training.contents import check_contents, check_fit
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.virtual_ranks.tree_reduction import generator_states, set_generator_states

LOCK_FILE = ".lock"
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


def _lock(folder: Path) -> TextIO:
    """Locks a folder until the file is closed or this process ends."""
    # The lock is the `flock`, not the file, which stays. A symbolic link could lead to any file.
    path = folder / LOCK_FILE
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(
            f"--checkpoint-dir {folder}: {path} is a symbolic link: remove it"
        ) from error
    try:
        # On NFS it holds between machines, unless mounted with `nolock` or `local_lock=flock`.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: a file system without locks.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.close()
            raise UsageError(
                f"--checkpoint-dir {folder} is in use by another run: give this one another "
                f"folder, or wait until that one has ended"
            ) from error
    return file


def prepare_folder(folder: Path, *, resume: str | None) -> TextIO:
    """Makes the folder, tests that it is writable, and locks it; returns the file of the lock.

    A UsageError where another run holds it, or has left checkpoints that this one would remove.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        file = None if resume is None else Path(resume).resolve()
        is_its_own = resume == "auto" or (file and file.parent == folder.resolve())
        if files(folder) and not is_its_own:
            which = "another run" if resume is None else f"another run than --resume {resume}"
            raise UsageError(
                f"--checkpoint-dir {folder} holds the checkpoints of {which}: continue that one "
                f"with --resume auto, or give another folder"
            )
        lock = _lock(folder)
        # Left by a killed run: under the lock no other run writes here.
        for left_behind in folder.glob("checkpoint-*.tmp"):
            left_behind.unlink()
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {folder} cannot be written to: {_reason(error)}"
        ) from error
    return lock


def load(path: Path) -> State:
    """Reads a checkpoint to the CPU; unpickles nothing but plain values and tensors.

    A file that may be whole (not readable, newer) is a UsageError, but no UnreadableError.
    """
    foreign = f"{path} is truncated, or is not a checkpoint of ddp_from_scratch"
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) - _TRAILER
            digest, trailer = _digest(file, size), file.read()
            if not trailer.startswith(_MARK):
                raise UnreadableError(foreign)
            if trailer != _MARK + digest:
                raise UnreadableError(
                    f"{path} is damaged: its bytes are not those that were written (sha256 differs)"
                )
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read checkpoint {path}: {error.strerror}") from error
    except UnreadableError:
        raise
    except Exception as error:  # damaged data may raise anything
        raise UnreadableError(foreign) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UnreadableError(foreign)
    if not isinstance(state.get("version"), int):
        raise UnreadableError(foreign)
    if state["version"] > VERSION:
        raise UsageError(
            f"{path} has checkpoint version {state['version']}, this program reads up to "
            f"{VERSION}: install a newer ddp_from_scratch"
        )
    try:
        check_contents(state)
    except UsageError as error:
        raise UnreadableError(f"{path} is no checkpoint that a run has written: {error}") from error
    return state


def files(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first."""
    names = folder.glob("checkpoint-*.pt")
    found = [path for path in names if re.fullmatch(r"checkpoint-\d+", path.stem)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def load_newest(folder: Path) -> tuple[Path, State, list[str]] | None:
    """Loads the newest whole checkpoint, if any; also returns a message for each newer one.

    Renames the newer ones to `.unreadable`. A UsageError if none is whole, or if one may be.
    """
    unreadable: dict[Path, str] = {}
    for path in files(folder):
        try:
            state = load(path)
        except UnreadableError as error:
            unreadable[path] = str(error)
            continue
        # Else a damaged file, as one of the newest two, would push out an intact one.
        for damaged in unreadable:
            damaged.rename(damaged.with_suffix(".unreadable"))
        return path, state, list(unreadable.values())
    if unreadable:
        raise UsageError(f"no checkpoint in {folder} can be read: {'; '.join(unreadable.values())}")
    return None


def find_checkpoint(
    settings: Settings, model_spec: dict[str, Any], model: nn.Module, report: Report
) -> State | None:
    """Loads the checkpoint to continue from, if any; a UsageError if it does not fit."""
    resume, folder = settings.resume, settings.checkpoint_dir
    if resume is None:
        return None
    if resume == "auto" and folder is not None:
        newest = load_newest(folder)
        if newest is None:
            report.line(f"no checkpoint in {folder} yet: starting from the beginning")
            return None
        path, state, complaints = newest
        for complaint in complaints:
            report.warning(f"{complaint}; using {path.name} instead")
    else:
        path = Path(resume)
        state = load(path)
    if state["model_spec"] != model_spec:
        raise UsageError(
            f"{path} holds {_describe(state['model_spec'])}, this run trains "
            f"{_describe(model_spec)}: give the --model and --dataset it was made with"
        )
    try:
        check_fit(state, model)
    except UsageError as error:
        raise UsageError(f"{path} does not fit {_describe(model_spec)}: {error}") from error
    report.line(f"resuming from {path}")
    return state


def _describe(spec: dict[str, Any]) -> str:
    size = spec["image_size"]
    return f"{spec['name']} for {spec['num_classes']} classes of {spec['channels']}x{size}x{size}"


def rng_state() -> State:
    """Returns the states of this process's random generators: torch, CUDA, Python and numpy."""
    cpu, cuda, python, (name, keys, *rest) = generator_states()
    # As a tensor, because `load` unpickles only tensors and plain values.
    numpy = name, torch.from_numpy(np.array(keys, np.int64)), *rest
    return {"torch": cpu, "cuda": cuda, "python": python, "numpy": numpy}


def set_rng_state(state: State) -> None:
    """Restores the generators to what `rng_state` has returned."""
    version, internal, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    cuda = state["cuda"] if gpu.count() else None
    numpy = name, keys.numpy().astype(np.uint32), *rest
    set_generator_states((state["torch"], cuda, (version, tuple(internal), gauss), numpy))


def _reason(error: BaseException) -> str:
    """Returns the system's text for a failure, or else the error's own."""
    # Search the context: for a full disk torch only says "unexpected pos 640".
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__context__
    return one_line(error)
