"""The command line of `run.py`: its options, and the errors of those that do not fit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from ddp_from_scratch.buckets.layout import AUTO
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.settings import (
    COMPRESSIONS,
    DATASETS,
    MODELS,
    POWERSGD_RANK,
    PRECISIONS,
    Settings,
)
from ddp_from_scratch.world.backends import BACKENDS

_OF_TEST = {
    *("backend", "dataset", "data_dir", "download", "batch_size", "precision", "workers"),
    *("threads", "timeout", "deterministic", "quiet"),
}


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake as one line like every other."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError instead of printing and exiting."""
        raise UsageError(f"{message}; see --help")


def make_parser(about: str, program: Sequence[str] = ("run.py",)) -> Parser:
    """The parser of a command line.

    Args:
        about: the program's docstring, a sentence and then examples with run.py.
        program: behind `python`: a file, or -m and a module.
    """
    about, _, examples = about.partition("\n\n")
    name = Path(program[0]).name
    if name == "-m":
        examples = examples.replace("run.py", " ".join(program))
        name = f"python {' '.join(program)}"
    parser = Parser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in fields(Settings)}
    parser.set_defaults(**defaults | {"dataset": None})
    # Not `choices`: after an unknown option, its value would be what argparse complains about.
    parser.add_argument(
        "command", nargs="?", default="train", metavar="train|test", help="default: train"
    )

    def option(group: Any, flag: str, text: str, **how: Any) -> None:
        name = flag.lstrip("-").replace("-", "_")
        default = defaults.get(name)
        if default is not None and default is not False:
            text += f" (default: {default})"
        group.add_argument(flag, help=text, **how)

    group = parser.add_argument_group("processes")
    option(group, "--backend", "gloo and mpi: CPUs; nccl: GPUs", choices=BACKENDS)
    option(
        group,
        "--nproc",
        "processes to start: a number, or one for each machine as in 8,2. Default: 2, with nccl "
        "one for each visible GPU. Only without a launcher",
        metavar="N[,N...]",
    )
    option(group, "--node-rank", "this machine's place in --nproc 8,2, from 0", type=int)
    option(group, "--master-addr", "address of machine 0, as the others reach it", metavar="HOST")
    option(
        group,
        "--master-port",
        "port of machine 0, for machines that have its DDP_SECRET (default: 29500)",
        type=int,
        metavar="P",
    )
    option(group, "--timeout", "seconds to wait for other ranks", type=float, metavar="S")
    option(
        group,
        "--stall-after",
        "seconds that a step waits for other ranks before it says what for; inf: never",
        type=float,
        metavar="S",
    )
    option(group, "--threads", "CPU threads of a process", type=int, metavar="N")

    group = parser.add_argument_group("data")
    option(
        group,
        "--dataset",
        "digits ships with the project; test takes the one that the model was trained on",
        choices=DATASETS,
    )
    option(group, "--data-dir", "folder of the other datasets", type=Path, metavar="DIR")
    option(group, "--download", "fetch the dataset if it is not there", action="store_true")
    option(group, "--workers", "loading processes of a rank; 0: none", type=int, metavar="N")

    group = parser.add_argument_group("training")
    option(group, "--model", MODELS, metavar="NAME")
    option(group, "--epochs", "passes over the training images", type=int, metavar="N")
    sizes = group.add_mutually_exclusive_group()
    option(sizes, "--batch-size", "images of a rank in a backward pass", type=int, metavar="N")
    option(
        sizes,
        "--global-batch-size",
        "images of all ranks in an optimizer step, instead of --batch-size",
        type=int,
        metavar="N",
    )
    option(group, "--lr", "learning rate of SGD", type=float)
    option(
        group,
        "--scale-lr",
        "--lr is meant for one rank's batch: multiply it by the number of batches in a step, with "
        "a warm-up over 5 epochs (Goyal et al. 2017)",
        action="store_true",
    )
    option(group, "--momentum", "of SGD", type=float)
    option(group, "--weight-decay", "of SGD", type=float)
    option(group, "--accumulate", "backward passes in an optimizer step", type=int, metavar="N")
    option(
        group,
        "--precision",
        "of the forward pass (autocast); fp16 with loss scaling",
        choices=PRECISIONS,
    )
    option(
        group,
        "--seed",
        "of the model, the order of images, and all that torch, numpy and Python's random draw",
        type=int,
    )
    option(group, "--deterministic", "only algorithms that repeat exactly", action="store_true")

    option(
        group,
        "--stop-on-nan",
        "end all ranks where a loss is not finite, and save nothing of it; else it is only said",
        action=argparse.BooleanOptionalAction,
    )

    group = parser.add_argument_group("synchronisation")
    option(
        group,
        "--bucket-cap-mb",
        "size in MiB at which a bucket of gradients is sent; 0: one for each parameter; inf: one "
        "for all; auto: what is fastest in the first steps, during backward or after it (default: "
        "1 for the first, 25 for the others)",
        type=_size,
        metavar="MB",
    )
    group.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="send gradients after backward, not during it",
    )
    option(
        group,
        "--compress",
        "send gradients as bf16 or fp16, half the bytes, or as matrices of low rank (Vogels et al. "
        "2019)",
        choices=COMPRESSIONS,
    )
    option(
        group,
        "--powersgd-rank",
        "of the matrices of --compress powersgd: more is closer to the gradients, and larger "
        f"(default: {POWERSGD_RANK})",
        type=int,
        metavar="N",
    )
    option(
        group,
        "--sync-batch-norm",
        "batch norm over the batches of all ranks, not of each by itself",
        action="store_true",
    )
    option(
        group,
        "--check-sync",
        "after each epoch compare all ranks' parameters and optimizer state bit for bit and print "
        "the parameters' checksum; with N also in every Nth step, without printing",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
    )

    group = parser.add_argument_group("what is kept")
    option(
        group,
        "--checkpoint-dir",
        "save after each epoch, and on Ctrl-C, SIGTERM, SIGHUP or SIGUSR1; the newest two stay",
        type=Path,
        metavar="DIR",
    )
    option(
        group,
        "--resume",
        "continue from FILE, or from the newest whole checkpoint of --checkpoint-dir; auto starts "
        "anew where there is none",
        metavar="auto|FILE",
    )
    option(group, "--log-dir", "metrics.jsonl and TensorBoard events", type=Path, metavar="DIR")
    option(group, "--checkpoint", "the file that test evaluates", type=Path, metavar="FILE")
    option(group, "--quiet", "print the result alone", action="store_true")
    return parser


def _size(text: str) -> float | str:
    """A number or "auto"."""
    if text == AUTO:
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


def parse(
    arguments: Sequence[str], about: str, program: Sequence[str] = ("run.py",)
) -> tuple[Settings, argparse.Namespace]:
    """The settings of the run, and the options that concern its processes alone.

    `about` and `program` are those of `make_parser`.

    Raises:
        UsageError: an unknown option, a value out of range, options that do not go together.
    """
    options = make_parser(about, program).parse_args(arguments)
    for name, value in vars(options).items():
        if value == []:  # argparse's own reading of --epochs=--
            raise UsageError(
                f"argument --{name.replace('_', '-')}: expected one argument; see --help"
            )
    if options.command not in ("train", "test"):
        raise UsageError(f"the command must be train or test, got {options.command!r}; see --help")
    if options.master_port is not None and not 1 <= options.master_port <= 65535:
        raise UsageError(f"--master-port must be 1 to 65535, got {options.master_port}")
    values = {field.name: getattr(options, field.name) for field in fields(Settings)}
    values["dataset"] = options.dataset or Settings.dataset
    if options.command == "test":
        for field in fields(Settings):
            if field.name not in _OF_TEST and values[field.name] != field.default:
                name = field.name.replace("_", "-").replace("overlap", "no-overlap")
                raise UsageError(f"--{name} has no meaning for test")
        if options.checkpoint is None:
            raise UsageError("test needs --checkpoint FILE, the model to evaluate")
    elif options.checkpoint is not None:
        raise UsageError("--checkpoint belongs to test; to continue a run: --resume FILE")
    return Settings(**values), options
