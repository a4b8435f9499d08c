"""The options of a training run, checked before any process waits for another."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_from_scratch.core.layout import AUTO
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.environment import MOST_HERE
from ddp_from_scratch.world.backends import MAX_TIMEOUT

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "fake")
MODELS = "cnn, mlp, or a torchvision classifier by name (resnet18, vit_b_16, ...)"
PRECISIONS = ("fp32", "bf16", "fp16")
COMPRESSIONS = ("bf16", "fp16", "powersgd")
POWERSGD_RANK = 2
TIMELINE_STEPS = 5
MAX_RESTARTS = 3
_MOST = 10**9
_LARGEST = 1e30  # float32 ends at 3e38
# Settings that may differ between ranks: they concern a rank's machine, or the output of rank 0.
_OWN = {"data_dir", "download", "workers", "threads", "log_dir", "quiet"}
_TIMEOUT_RANGE = f"a positive number of seconds, at most {MAX_TIMEOUT:,.0f}"


# Settings that an option switches off.
_SWITCHED_OFF = {"overlap", "shared_memory"}


def option_of(name: str) -> str:
    """The option of a setting: --batch-size of batch_size, --no-overlap of overlap."""
    return f"--{'no-' * (name in _SWITCHED_OFF)}{name.replace('_', '-')}"


@dataclass(frozen=True)
class Settings:
    """A training run. Each field is the command line's option of the same name.

    Raises:
        UsageError: a value out of its range; the text names the option.
    """

    backend: str = "gloo"
    dataset: str = "digits"
    data_dir: Path = Path("data")
    download: bool = False
    model: str = "cnn"
    epochs: int = 10
    batch_size: int = 32
    global_batch_size: int | None = None
    lr: float = 0.05
    scale_lr: bool = False
    momentum: float = 0.9
    weight_decay: float = 1e-4
    bucket_cap_mb: float | str | None = None  # or "auto"
    overlap: bool = True
    shared_memory: bool = True
    compress: str | None = None
    powersgd_rank: int | None = None
    sync_batch_norm: bool = False
    accumulate: int = 1
    shards: int | None = None
    precision: str = "fp32"
    seed: int = 0
    deterministic: bool = False
    stop_on_nan: bool = True
    workers: int = 0
    threads: int = 1
    elastic: bool = False
    max_restarts: int | None = None
    timeout: float = 600.0
    stall_after: float = 60.0
    checkpoint_dir: Path | None = None
    resume: str | None = None
    log_dir: Path | None = None
    timeline: Path | None = None
    timeline_steps: int | None = None
    stragglers: int | None = None
    check_sync: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "global_batch_size", "accumulate"):
            self._require(name, f"1 to {_MOST:,}", lambda value: 1 <= value <= _MOST)
        for name in ("momentum", "weight_decay"):
            self._require(name, f"0 to {_LARGEST:g}", lambda value: 0 <= value <= _LARGEST)
        self._require("threads", f"1 to {MOST_HERE:,}", lambda value: 1 <= value <= MOST_HERE)
        self._require("workers", f"0 to {MOST_HERE:,}", lambda value: 0 <= value <= MOST_HERE)
        self._require("check_sync", "0 or more", lambda value: value >= 0)
        self._require("seed", "0 to 2**62 - 1", lambda value: 0 <= value < 2**62)
        self._require("max_restarts", "0 or more", lambda value: value >= 0)
        self._require("powersgd_rank", "1 or more", lambda value: value >= 1)
        self._require("stragglers", f"1 to {_MOST:,}", lambda value: 1 <= value <= _MOST)
        self._require("timeline_steps", f"1 to {_MOST:,}", lambda value: 1 <= value <= _MOST)
        self._require(
            "lr", f"a positive number, at most {_LARGEST:g}", lambda value: 0 < value <= _LARGEST
        )
        self._require("timeout", _TIMEOUT_RANGE, lambda value: 0 < value <= MAX_TIMEOUT)
        self._require(
            "stall_after",
            f"{_TIMEOUT_RANGE}, or inf",
            lambda value: 0 < value <= MAX_TIMEOUT or value == math.inf,
        )
        self._require(
            "bucket_cap_mb", "0 or more, or auto", lambda value: value == AUTO or value >= 0
        )
        self._require("shards", "a power of two", lambda value: value > 0 and not value & value - 1)
        if self.shards is not None and self.compress is not None:
            raise UsageError("--compress cannot be used with --shards: leave it out")
        if self.shards is not None and self.bucket_cap_mb == AUTO:
            raise UsageError("--bucket-cap-mb auto cannot be used with --shards: give a size")
        if not self.shared_memory and self.backend != "gloo":
            raise UsageError(
                f"--no-shared-memory is for gloo, and the backend is {self.backend}: leave it out"
            )
        if self.bucket_cap_mb == AUTO and self.deterministic:
            raise UsageError(
                "--bucket-cap-mb auto goes by the clock, which --deterministic rules out: give a "
                "size, such as an earlier run's"
            )
        if self.compress == "powersgd":
            # The default is set here and not in the field, where it would be given without
            # PowerSGD, too. A checkpoint then has the rank that was used.
            object.__setattr__(self, "powersgd_rank", self.powersgd_rank or POWERSGD_RANK)
        elif self.powersgd_rank is not None:
            raise UsageError("--powersgd-rank is for --compress powersgd, which is not given")
        if self.timeline_steps is not None and self.timeline is None:
            raise UsageError("--timeline-steps is for --timeline, which is not given")
        if self.elastic:
            self._check_elastic()
        elif self.max_restarts is not None:
            raise UsageError("--max-restarts is for --elastic, which is not given")
        if self.resume == "auto" and self.checkpoint_dir is None:
            raise UsageError("--resume auto looks into --checkpoint-dir, which is not given")

    def _check_elastic(self) -> None:
        if self.backend != "gloo":
            raise UsageError(
                f"--elastic is for gloo, and the backend is {self.backend}: leave one of them out"
            )
        # What each rank has recorded by itself is lost with it.
        for name in ("timeline", "stragglers"):
            if getattr(self, name) is not None:
                raise UsageError(f"{option_of(name)} cannot be used with --elastic: leave one out")

    def _require(self, name: str, expected: str, holds: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise UsageError(f"{option_of(name)} must be {expected}, got {value}")

    def parts(self, world_size: int) -> int:
        """The parts of a batch, each with a backward pass of its own: shards, or ranks."""
        return self.shards or world_size

    def rank_batch_size(self, world_size: int) -> int:
        """Images of a rank, or of a shard, in a backward pass.

        Raises:
            UsageError: the global batch cannot be divided evenly.
        """
        if self.global_batch_size is None:
            return self.batch_size
        parts = self.parts(world_size) * self.accumulate
        if self.global_batch_size % parts:
            of = "ranks" if self.shards is None else "--shards"
            raise UsageError(
                f"--global-batch-size must be a multiple of {self.parts(world_size)} {of} x "
                f"--accumulate {self.accumulate} = {parts}, got {self.global_batch_size}"
            )
        return self.global_batch_size // parts

    def learning_rate(self, step: int, steps_per_epoch: int, world_size: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0 over the whole run.

        With `scale_lr` the linear scaling rule and gradual warm-up of Goyal et al., "Accurate,
        Large Minibatch SGD" (2017).
        """
        if not self.scale_lr:
            return self.lr
        # `lr` is meant for the batch of one rank or shard: k times that batch takes k times `lr`,
        # approached in equal increments over the first 5 epochs, or the first half of a run shorter
        # than 10.
        scale = self.parts(world_size) * self.accumulate
        warmup = max(1, min(5 * steps_per_epoch, self.epochs * steps_per_epoch // 2))
        return self.lr * (1 + (scale - 1) * min(1.0, (step + 1) / warmup))

    def to_compare(self) -> dict[str, str]:
        """The options that must be equal on all ranks, with their values."""
        values = vars(self) | {name: not getattr(self, name) for name in _SWITCHED_OFF}
        # Folders may have other names on other machines, and rank 0 alone reads and writes there;
        # but whether there is one decides what all ranks do.
        if self.resume != "auto":
            values["resume"] = self.resume is not None
        for folder in ("checkpoint_dir", "timeline"):
            values[folder] = values[folder] is not None
        return {
            option_of(name): _shown(value) for name, value in values.items() if name not in _OWN
        }

    def as_saved(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}

    def changes_since(self, saved: dict[str, Any]) -> list[str]:
        """The differences from a checkpoint's settings that matter, as "lr 0.1 -> 0.2"."""
        # None of these changes a bit of a step.
        indifferent = {"data_dir", "download", "workers", "timeout", "checkpoint_dir", "resume"}
        indifferent |= {"log_dir", "check_sync", "stall_after", "stop_on_nan", "quiet"}
        indifferent |= {"timeline", "timeline_steps", "stragglers", "elastic", "max_restarts"}
        # With `scale_lr` the length of the run decides that of the warm-up.
        if not self.scale_lr:
            indifferent.add("epochs")
        return [
            f"{name} {saved[name]} -> {value}"
            for name, value in self.as_saved().items()
            if name not in indifferent and saved.get(name, value) != value
        ]


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "given" if value else "not given"
    return str(value)
