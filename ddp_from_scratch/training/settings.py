"""Declares each option of run.py once: its default, help and limits.

Does not import torch, so --help and mistakes are answered at once.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ddp_from_scratch import UsageError

BACKENDS = ("gloo", "nccl", "mpi")
MAX_TIMEOUT = 1e6  # in seconds, the most that `ddp.process_group` takes
MOST_HERE = 1024  # processes or threads on one machine; more is a typing mistake
DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "fake")
MODELS = "cnn, mlp, or a torchvision classifier by name (resnet18, vit_b_16, ...)"
PRECISIONS = ("fp32", "bf16", "fp16")
COMPRESSIONS = ("bf16", "fp16", "powersgd")
POWERSGD_RANK = 2
# Of each optimizer, the defaults of the settings that it takes.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.05, "weight_decay": 1e-4, "momentum": 0.9},
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2},
    "muon": {"lr": 5e-3, "weight_decay": 1e-2, "momentum": 0.95},
}
MAX_RESTARTS = 3
# Settings that may differ between ranks: they concern one machine, or the output of rank 0.
_OWN = {"data_dir", "download", "workers", "threads", "log_dir", "quiet"}
# Settings whose option switches them off.
_SWITCHED_OFF = {"overlap", "shared_memory", "replace_wrong"}


def option_of(name: str) -> str:
    """Names the option of a setting: --batch-size for batch_size, --no-overlap for overlap."""
    return f"--{'no-' * (name in _SWITCHED_OFF)}{name.replace('_', '-')}"


def _option(group: str, text: str, default: Any = None, *, must: Any = None, **how: Any) -> Any:
    """Declares a field and its option: its group and text in --help, `_must`, and the rest."""
    return field(default=default, metadata={"group": group, "help": text, "must": must, "how": how})


def _must(
    expected: str, holds: Callable[[Any], bool], kind: Callable[[str], Any], metavar: str
) -> dict[str, Any]:
    return {"must": (expected, holds), "type": kind, "metavar": metavar}


def _of_each(setting: str) -> str:
    """Returns a setting's default of each optimizer that has it, for --help."""
    values = [(name, own[setting]) for name, own in OPTIMIZERS.items() if setting in own]
    return "(default: " + ", ".join(f"{value:g} for {name}" for name, value in values) + ")"


def _check(options: Any) -> None:
    for one in fields(options):
        value, must = getattr(options, one.name), one.metadata.get("must")
        if value is not None and must is not None and not must[1](value):
            raise UsageError(f"{option_of(one.name)} must be {must[0]}, got {value}")


# The groups of --help, in order.
GROUPS = ("processes", "data", "training", "synchronisation", "output")
_processes, _data, _training, _synchronisation, _kept = (partial(_option, g) for g in GROUPS)


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


# The limits of values, and how argparse reads them.
_MOST, _LARGEST = 10**9, 1e30  # float32 ends at 3e38
_COUNT = _must(f"1 to {_MOST:,}", lambda value: 1 <= value <= _MOST, int, "N")
_FROM_0 = _must("0 or more", lambda value: value >= 0, int, "N")
_FROM_1 = _must("1 or more", lambda value: value >= 1, int, "N")
_SEED = _must("0 to 2**62 - 1", lambda value: 0 <= value < 2**62, int, "N")
_THREADS = _must(
    f"auto, or 1 to {MOST_HERE:,}",
    lambda value: value == "auto" or 1 <= value <= MOST_HERE,
    _number_or_auto,
    "N|auto",
)
_WORKERS = _must(f"0 to {MOST_HERE:,}", lambda value: 0 <= value <= MOST_HERE, int, "N")
_VIRTUAL_RANKS = _must(
    "a power of two", lambda value: value > 0 and value.bit_count() == 1, int, "V"
)
_PORT = _must("1 to 65535", lambda value: 1 <= value <= 65535, int, "P")
_SHARE = _must(f"0 to {_LARGEST:g}", lambda value: 0 <= value <= _LARGEST, float, "X")
_POSITIVE = f"a positive number, at most {_LARGEST:g}"
_RATE = _must(_POSITIVE, lambda value: 0 < value <= _LARGEST, float, "X")
_SECONDS = f"a positive number of seconds, at most {MAX_TIMEOUT:,.0f}"
_DURATION = _must(_SECONDS, lambda value: 0 < value <= MAX_TIMEOUT, float, "S")
_STALL = _must(
    f"{_SECONDS}, or inf", lambda value: 0 < value <= MAX_TIMEOUT or value == math.inf, float, "S"
)
_CAP = _must("0 or more", lambda value: value >= 0, float, "MB")
_FOLDER: dict[str, Any] = {"type": Path, "metavar": "DIR"}


@dataclass(frozen=True)
class Command:
    """The command, and what it needs besides `Settings`: the ranks to start, the file to test."""

    command: str = "train"
    dataset: str | None = None  # as given; without it, test takes that of the model's training
    nproc: str | None = _processes(
        "processes to start: a number, or one number per machine as in 8,2. Default: 2; with nccl "
        "one per visible GPU. Use it only without a launcher",
        metavar="N[,N...]",
    )
    node_rank: int | None = _processes(
        "this machine's position in --nproc 8,2, from 0", type=int, metavar="N"
    )
    master_addr: str | None = _processes(
        "address at which the other machines reach machine 0", metavar="HOST"
    )
    master_port: int | None = _processes(
        "the port on which machine 0 listens (default: 29500)", **_PORT
    )
    bind: str | None = _processes(
        "which cores a rank may use. cores: its own. socket: all of the sockets that these cores "
        "are in. none: all. auto, the default: its own, if there are enough. Not with a launcher",
        choices=("auto", "none", "cores", "socket"),
    )
    debug_rank: int | None = _processes(
        "the rank that reads the terminal, for breakpoint(); the others wait for it without a "
        "timeout. For gloo and nccl, without a launcher",
        **_FROM_0,
    )
    output_prefix: bool = _kept("begin each line of a rank's output with [rank N]", False)
    output_ranks: str | None = _kept("show only the output of these ranks", metavar="N[,N...]")
    output_dir: Path | None = _kept(
        "also write all output of each rank to DIR/rank-N.log, and append to an existing file",
        **_FOLDER,
    )
    checkpoint: Path | None = _kept("the checkpoint that test evaluates", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        if self.command not in ("train", "test"):
            raise UsageError(f"the command must be train or test, got {self.command!r}; see --help")
        _check(self)


@dataclass(frozen=True)
class Settings:
    """The settings of a training run. A wrong value raises a UsageError that names the option."""

    backend: str = _processes(
        "gloo and mpi: CPUs; nccl: GPUs", "gloo", choices=BACKENDS, type=str.lower
    )
    elastic: bool = _processes(
        "survive lost ranks and machines: continue with the others, and replace lost ranks. For "
        "gloo, without a launcher. The batch is divided into virtual ranks: a power of two, and at "
        "least one for each rank",
        False,
    )
    max_restarts: int | None = _processes(
        f"number of lost ranks that --elastic replaces (default: {MAX_RESTARTS})", **_FROM_0
    )
    replace_wrong: bool = _processes(
        "--elastic does not replace a rank that --recheck has named: another one on its machine "
        "may compute wrongly, too",
        True,
    )
    timeout: float = _processes("seconds to wait for other ranks", 600.0, **_DURATION)
    stall_after: float = _processes(
        "seconds after which a waiting step reports the ranks that it waits for; inf: never",
        60.0,
        **_STALL,
    )
    threads: int | str | None = _processes(
        "CPU threads per process; auto, the default: one for each core of its own, or its share of "
        "the machine's cores; with --virtual-ranks, whose bits depend on it, the default is 1",
        **_THREADS,
    )
    dataset: str = _data(
        "digits comes with the project; test uses the dataset that the model was trained on",
        "digits",
        choices=DATASETS,
    )
    data_dir: Path = _data("folder of the other datasets", Path("data"), **_FOLDER)
    download: bool = _data("download the dataset if it is missing", False)
    workers: int = _data("processes per rank that load images; 0: none", 0, **_WORKERS)
    model: str = _training(MODELS, "cnn", metavar="NAME")
    epochs: int = _training("passes over the training images", 10, **_COUNT)
    batch_size: int = _training("images per rank in a backward pass", 32, **_COUNT)
    global_batch_size: int | None = _training(
        "images of all ranks in an optimizer step, instead of --batch-size", **_COUNT
    )
    optimizer: str = _training(
        "muon steps the matrices of hidden layers; AdamW steps the last matrix and everything "
        "else, with the same --lr (adjust_lr_fn=match_rms_adamw)",
        "sgd",
        choices=tuple(OPTIMIZERS),
    )
    shard: str = _training(
        "divide the step of sgd or adamw, and its state, among the ranks of a machine, which then "
        "share parameters (node), or among all ranks (world)",
        "none",
        choices=("none", "node", "world"),
    )
    lr: float | None = _training(f"learning rate {_of_each('lr')}", **_RATE)
    scale_lr: bool = _training(
        "multiply --lr, the rate for one rank's batch, by the number of batches in a step, with a "
        "warm-up over 5 epochs (Goyal et al. 2017)",
        False,
    )
    momentum: float | None = _training(f"for sgd and muon {_of_each('momentum')}", **_SHARE)
    weight_decay: float | None = _training(f"weight decay {_of_each('weight_decay')}", **_SHARE)
    accumulate: int = _training("backward passes per optimizer step", 1, **_COUNT)
    virtual_ranks: int | None = _training(
        "number of parts of a batch, a power of two: a rank computes several, and the result has "
        "the same bits on any number of ranks. --batch-size is then the images per virtual rank",
        **_VIRTUAL_RANKS,
    )
    balance: bool = _training(
        "assign virtual ranks by speed: a slow rank computes fewer, and the bits stay the same",
        False,
    )
    recheck: int | None = _training(
        "in every Nth step, compute one virtual rank on two ranks; if the bits differ, name the "
        "rank that computes wrongly, and end the run. Needs --virtual-ranks or --elastic",
        **_COUNT,
    )
    check: float | None = _training(
        "train nothing: all ranks repeat rank 0's first batch for S seconds (default: 60), and the "
        "exit code is 1 unless all compute the same bits. Prints each rank's time, too",
        nargs="?",
        const=60.0,
        **_DURATION,
    )
    precision: str = _training(
        "dtype of the forward pass (autocast); fp16 with loss scaling", "fp32", choices=PRECISIONS
    )
    seed: int = _training(
        "seed of the model, the order of images, and the generators of torch, numpy and Python",
        0,
        **_SEED,
    )
    deterministic: bool = _training("use only deterministic algorithms", False)
    bucket_cap_mb: float | None = _synchronisation(
        "size in MiB at which a bucket of gradients is closed; 0: one per parameter; inf: one for "
        "all (default: 1 for the first, 25 for the others)",
        **_CAP,
    )
    overlap: bool = _synchronisation("send gradients after backward, not during it", True)
    shared_memory: bool = _synchronisation(
        "on gloo, average only through messages; by default the ranks of a machine average in "
        "shared memory",
        True,
    )
    compress: str | None = _synchronisation(
        "send gradients as bf16 or fp16, half the bytes, or as matrices of low rank (Vogels et al. "
        "2019)",
        choices=COMPRESSIONS,
    )
    powersgd_rank: int | None = _synchronisation(
        "rank of the matrices of --compress powersgd: a higher rank approximates the gradients "
        f"more closely and sends more (default: {POWERSGD_RANK})",
        **_FROM_1,
    )
    sync_batch_norm: bool = _synchronisation(
        "batch norm over the batches of all ranks, not over each rank's own batch",
        False,
    )
    check_sync: int | None = _synchronisation(
        "after each epoch compare all ranks' parameters and optimizer state bit for bit, and print "
        "the parameters' checksum; with N, also compare in every Nth step, without printing",
        nargs="?",
        const=0,
        **_FROM_0,
    )
    checkpoint_dir: Path | None = _kept(
        "save after each epoch, and on Ctrl-C, SIGTERM, SIGHUP or SIGUSR1; keep the newest two",
        **_FOLDER,
    )
    resume: str | None = _kept(
        "continue from FILE, or (auto) from the newest complete checkpoint in --checkpoint-dir; "
        "without one, auto starts from the beginning",
        metavar="auto|FILE",
    )
    log_dir: Path | None = _kept("write metrics.jsonl and TensorBoard events to DIR", **_FOLDER)
    timeline: Path | None = _kept(
        "record some steps of all ranks, print one, and write a page and a picture to DIR",
        **_FOLDER,
    )
    stragglers: int | None = _kept(
        "every N steps print the rank that the others wait for: how often, how long and in which "
        "phase; with --log-dir also log this as scalars, with throughput and exposed communication",
        **_COUNT,
    )
    quiet: bool = _kept("print only the result", False)

    def __post_init__(self) -> None:
        _check(self)
        self._set_defaults()
        if self.momentum is not None and "momentum" not in OPTIMIZERS[self.optimizer]:
            raise UsageError(f"--momentum is for sgd and muon, not {self.optimizer}: leave it out")
        if self.powersgd_rank is not None and self.compress != "powersgd":
            raise UsageError("--powersgd-rank is for --compress powersgd, which is not given")
        if self.resume == "auto" and self.checkpoint_dir is None:
            raise UsageError("--resume auto needs --checkpoint-dir, which is not given")
        if not self.shared_memory and self.backend != "gloo":
            raise UsageError(
                f"--no-shared-memory is for gloo, and the backend is {self.backend}: leave it out"
            )
        if self.elastic:
            self._check_elastic()
        elif self.max_restarts is not None:
            raise UsageError("--max-restarts is for --elastic, which is not given")
        if not self.replace_wrong and not (self.elastic and self.recheck):
            raise UsageError("--no-replace-wrong is for --elastic with --recheck: give both")
        if self.check is not None and self.sync_batch_norm:
            raise UsageError(
                "--check with --sync-batch-norm: ranks do not communicate in a check; leave it out"
            )
        self._check_virtual_ranks()
        if self.shard != "none":
            self._check_shard()

    def _set_defaults(self) -> None:
        """Sets what depends on other settings; as a field's default it would be there always."""
        for name, default in OPTIMIZERS[self.optimizer].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.compress == "powersgd" and self.powersgd_rank is None:
            object.__setattr__(self, "powersgd_rank", POWERSGD_RANK)

    def parts(self, world_size: int) -> int:
        """Returns the parts of a batch: virtual ranks, or ranks. Each has its own backward pass."""
        return self.virtual_ranks or world_size

    def rank_batch_size(self, world_size: int) -> int:
        """Images per backward pass of a (virtual) rank; a UsageError if that is not an integer."""
        if self.global_batch_size is None:
            return self.batch_size
        parts = self.parts(world_size) * self.accumulate
        if self.global_batch_size % parts:
            of = "ranks" if self.virtual_ranks is None else "--virtual-ranks"
            raise UsageError(
                f"--global-batch-size must be a multiple of {self.parts(world_size)} {of} x "
                f"--accumulate {self.accumulate} = {parts}, got {self.global_batch_size}"
            )
        return self.global_batch_size // parts

    def _check_elastic(self) -> None:
        if self.backend != "gloo":
            raise UsageError(
                f"--elastic is for gloo, and the backend is {self.backend}: leave one of them out"
            )
        if self.optimizer == "muon" and self.precision == "fp16":
            raise UsageError(
                "--elastic cannot repeat the loss scaling of --precision fp16 with --optimizer "
                "muon: use bf16"
            )
        if self.sync_batch_norm:
            raise UsageError(
                "--sync-batch-norm cannot be used with --elastic: leave one of them out"
            )
        # The recordings of a lost rank are lost with it.
        for name in ("timeline", "stragglers"):
            if getattr(self, name) is not None:
                raise UsageError(f"{option_of(name)} cannot be used with --elastic: leave one out")

    def _check_virtual_ranks(self) -> None:
        if self.virtual_ranks is None:
            if not self.elastic:  # which has virtual ranks by default
                for name, given in {"--balance": self.balance, "--recheck": self.recheck}.items():
                    if given:
                        raise UsageError(f"{name} needs virtual ranks: add --virtual-ranks")
            return
        if self.sync_batch_norm:
            raise UsageError(
                "--sync-batch-norm cannot be used with --virtual-ranks: leave one of them out"
            )
        if self.compress is not None:
            raise UsageError("--compress cannot be used with --virtual-ranks: leave it out")

    def _check_shard(self) -> None:
        alone = {"--elastic": self.elastic, "--optimizer muon": self.optimizer == "muon"}
        if self.shard == "node":
            alone["--virtual-ranks"] = self.virtual_ranks is not None
            alone["--no-shared-memory"] = not self.shared_memory
            alone["--backend nccl"] = self.backend == "nccl"
        for name in (name for name, given in alone.items() if given):
            raise UsageError(
                f"--shard {self.shard} cannot be used with {name}: leave one of them out"
            )

    def learning_rate(self, step: int, steps_per_epoch: int, world_size: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0 over the whole run."""
        assert self.lr is not None, "it has a default"
        if not self.scale_lr:
            return self.lr
        # As Goyal et al., "Accurate, Large Minibatch SGD" (2017): k times the batch takes k times
        # `lr`, in equal increments over 5 epochs, or the first half of a run shorter than 10.
        scale = self.parts(world_size) * self.accumulate
        warmup = max(1, min(5 * steps_per_epoch, self.epochs * steps_per_epoch // 2))
        return self.lr * (1 + (scale - 1) * min(1.0, (step + 1) / warmup))

    def to_compare(self) -> dict[str, str]:
        """Returns the options that must be equal on all ranks, with their values."""
        values = vars(self) | {name: not getattr(self, name) for name in _SWITCHED_OFF}
        # Only rank 0 uses the folders' names; whether there is one decides what all ranks do.
        if self.resume != "auto":
            values["resume"] = self.resume is not None
        for folder in ("checkpoint_dir", "timeline"):
            values[folder] = values[folder] is not None
        given = {None: "not given", False: "not given", True: "given"}
        return {
            option_of(name): given[value] if isinstance(value, bool | None) else str(value)
            for name, value in values.items()
            if name not in _OWN
        }

    @property
    def keeps_threads(self) -> bool:
        """True if a resumed run takes the threads of its checkpoint, on which bits depend."""
        return self.threads is None and self.virtual_ranks is not None

    def as_saved(self, threads: int) -> dict[str, Any]:
        """Returns the settings for a checkpoint; a rank computes with this many `threads`."""
        saved = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}
        return saved | {"threads": threads}

    def changes_since(self, saved: dict[str, Any], threads: int) -> list[str]:
        """Lists the differences from a checkpoint's settings that matter, as "lr 0.1 -> 0.2"."""
        # None of these changes the bits of a step.
        indifferent = {"data_dir", "download", "workers", "timeout", "checkpoint_dir", "resume"}
        indifferent |= {"log_dir", "check_sync", "stall_after", "quiet"}
        indifferent |= {"timeline", "stragglers", "elastic", "max_restarts", "replace_wrong"}
        indifferent |= {"balance", "recheck"}
        if self.keeps_threads:
            indifferent.add("threads")
        # With `scale_lr` the length of the run determines the warm-up.
        if not self.scale_lr:
            indifferent.add("epochs")
        return [
            f"{name} {saved[name]} -> {value}"
            for name, value in self.as_saved(threads).items()
            if name not in indifferent and saved.get(name, value) != value
        ]
