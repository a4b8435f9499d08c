"""One file that a run can be continued from, bit for bit.

Written to a temporary name, flushed to the disk and renamed, so that a file with a checkpoint's
name is a whole one whatever happened while it was written.
"""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_from_scratch.errors import UsageError

FORMAT = "ddp_from_scratch checkpoint"
VERSION = 1
_KEEP = 2

State = dict[str, Any]


def save(folder: Path, state: State) -> Path:
    """Writes `state` as the newest checkpoint of `folder`, and removes all but the newest two.

    Args:
        folder: made if it is not there.
        state: plain values and tensors.

    Raises:
        UsageError: the folder cannot be written to, or the disk is full. What was there stays.
    """
    # Numbered by when it was written, not by its step: with another batch size a later checkpoint
    # may have fewer steps behind it.
    number = max((_number(path) for path in files(folder)), default=0) + 1
    final = folder / f"checkpoint-{number:06d}.pt"
    temporary = final.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION} | state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # the new name, too
        os.close(descriptor)
        for old in files(folder)[_KEEP:]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write checkpoint {final}: {_one_line(error)}") from error
    return final


def prepare_folder(folder: Path, *, resuming: bool) -> None:
    """Makes the folder and tries it, before hours of work depend on it.

    Raises:
        UsageError: it cannot be written to, or holds the checkpoints of a run that this one does
            not continue, and that it would remove.
    """
    if files(folder) and not resuming:
        raise UsageError(
            f"--checkpoint-dir {folder} holds the checkpoints of another run: continue that one "
            f"with --resume auto, or give another folder"
        )
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        for left_behind in folder.glob("checkpoint-*.tmp"):  # by a run that was killed
            left_behind.unlink()
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {folder} cannot be written to: {_one_line(error)}"
        ) from error


def load(path: Path, map_location: torch.device) -> State:
    """Reads a checkpoint; nothing but plain values and tensors is ever unpickled.

    Raises:
        UsageError: no such file, a truncated one, one that is no checkpoint of this program, or
            one of a newer version.
    """
    foreign = f"{path} is truncated, or is not a checkpoint of ddp_from_scratch"
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read checkpoint {path}: {error.strerror}") from error
    except Exception as error:  # what unpickling noise raises has no end
        raise UsageError(foreign) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UsageError(foreign)
    if not isinstance(state.get("version"), int):
        raise UsageError(foreign)
    if state["version"] > VERSION:
        raise UsageError(
            f"{path} has checkpoint version {state['version']}, this program reads up to "
            f"{VERSION}: install a newer ddp_from_scratch"
        )
    return state


def files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    names = folder.glob("checkpoint-*.pt")
    found = [path for path in names if re.fullmatch(r"checkpoint-\d+", path.stem)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint-"))


def load_newest(folder: Path, map_location: torch.device) -> tuple[Path, State, list[str]] | None:
    """The newest checkpoint that can be read, and a line for each newer one that cannot.

    Returns:
        None when the folder holds no checkpoint at all.

    Raises:
        UsageError: it holds some, but none that can be read.
    """
    complaints: list[str] = []
    for path in files(folder):
        try:
            return path, load(path, map_location), complaints
        except UsageError as error:
            complaints.append(str(error))
    if complaints:
        raise UsageError(f"no checkpoint in {folder} can be read: {'; '.join(complaints)}")
    return None


def rng_state() -> State:
    """Where this process's random generators stand: torch's, CUDA's, Python's and numpy's."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, np.int64)), position, has_gauss, gauss),
    }


def set_rng_state(state: State) -> None:
    """Puts the generators where `rng_state` found them."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
