"""The command line of `run.py`: its options, and the errors of those that do not fit."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ddp_from_scratch.core.layout import AUTO
from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.settings import (
    COMPRESSIONS,
    DATASETS,
    MAX_RESTARTS,
    MODELS,
    POWERSGD_RANK,
    PRECISIONS,
    TIMELINE_STEPS,
    Settings,
    option_of,
)
from ddp_from_scratch.world.backends import BACKENDS

# Settings that a test has a use for. All others must be left out with it.
_OF_TEST = {
    *("backend", "dataset", "data_dir", "download", "batch_size", "precision", "workers"),
    *("threads", "timeout", "deterministic", "quiet"),
}
# Options that are None where they are not given.
_NO_DEFAULT = ("nproc", "node_rank", "master_addr", "master_port", "checkpoint", "dataset")
_DEFAULTS = {field.name: field.default for field in fields(Settings)}

# Arguments of `add_argument`, for the kinds of values that several options have.
_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_FOLDER: dict[str, Any] = {"type": Path, "metavar": "DIR"}
_SWITCH: dict[str, Any] = {"action": "store_true"}


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake as one line like every other."""

    def parse_args(self, *given: Any, **options: Any) -> Any:
        """Suggests an option in place of one that there is not."""
        found, unknown = self.parse_known_args(*given, **options)
        if unknown:
            name, known = unknown[0].partition("=")[0], list(self._option_string_actions)
            like = [option for option in known if option.startswith(name)]
            like += difflib.get_close_matches(name, known, 1, 0.7)
            advice = f"did you mean {like[0]}? Otherwise " if like else ""
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {advice}see --help")
        return found

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
        # What was not given is not in the result. So an option that repeats its default counts.
        argument_default=argparse.SUPPRESS,
    )
    # Not `choices`: after an unknown option, its value would be what argparse complains about.
    parser.add_argument(
        "command", nargs="?", default="train", metavar="train|test", help="default: train"
    )
    for add_group in (_processes, _data, _training, _synchronisation, _kept):
        add_group(parser)
    return parser


def _add(group: Any, flag: str, text: str, **how: Any) -> None:
    """Adds an option, with its setting's default in the text."""
    default = _DEFAULTS.get(flag.lstrip("-").replace("-", "_"))
    if default is not None and default is not False:
        text += f" (default: {default})"
    group.add_argument(flag, help=text, **how)


# The groups of --help, in its order ---------------------------------------------------------------


def _processes(parser: Parser) -> None:
    add = partial(_add, parser.add_argument_group("processes"))
    add("--backend", "gloo and mpi: CPUs; nccl: GPUs", choices=BACKENDS)
    add(
        "--nproc",
        "processes to start: a number, or one for each machine as in 8,2. Default: 2, with nccl "
        "one for each visible GPU. Only without a launcher",
        metavar="N[,N...]",
    )
    add("--node-rank", "this machine's place in --nproc 8,2, from 0", type=int)
    add("--master-addr", "address of machine 0, as the others reach it", metavar="HOST")
    add(
        "--master-port",
        "port of machine 0, for machines that have its DDP_SECRET (default: 29500)",
        type=int,
        metavar="P",
    )
    add(
        "--elastic",
        "survive lost ranks and machines: continue with the others and restart theirs; with gloo, "
        "without a launcher",
        **_SWITCH,
    )
    add(
        "--max-restarts",
        f"lost ranks that --elastic replaces (default: {MAX_RESTARTS})",
        **_COUNT,
    )
    add("--timeout", "seconds to wait for other ranks", **_SECONDS)
    add(
        "--stall-after",
        "seconds that a step waits for other ranks before it says what for; inf: never",
        **_SECONDS,
    )
    add("--threads", "CPU threads of a process", **_COUNT)


def _data(parser: Parser) -> None:
    add = partial(_add, parser.add_argument_group("data"))
    add(
        "--dataset",
        "digits ships with the project; test takes the one that the model was trained on",
        choices=DATASETS,
    )
    add("--data-dir", "folder of the other datasets", **_FOLDER)
    add("--download", "fetch the dataset if it is not there", **_SWITCH)
    add("--workers", "loading processes of a rank; 0: none", **_COUNT)


def _training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    add = partial(_add, group)
    add_size = partial(_add, group.add_mutually_exclusive_group())
    add("--model", MODELS, metavar="NAME")
    add("--epochs", "passes over the training images", **_COUNT)
    add_size("--batch-size", "images of a rank in a backward pass", **_COUNT)
    add_size(
        "--global-batch-size",
        "images of all ranks in an optimizer step, instead of --batch-size",
        **_COUNT,
    )
    add("--lr", "learning rate of SGD", type=float)
    add(
        "--scale-lr",
        "--lr is meant for one rank's batch: multiply it by the number of batches in a step, with "
        "a warm-up over 5 epochs (Goyal et al. 2017)",
        **_SWITCH,
    )
    add("--momentum", "of SGD", type=float)
    add("--weight-decay", "of SGD", type=float)
    add("--accumulate", "backward passes in an optimizer step", **_COUNT)
    add(
        "--shards",
        "parts of a batch, a power of two: a rank computes several, and the result has the same "
        "bits on any number of ranks. --batch-size is that of a shard",
        metavar="V",
        type=int,
    )
    add("--precision", "of the forward pass (autocast); fp16 with loss scaling", choices=PRECISIONS)
    add(
        "--seed",
        "of the model, the order of images, and all that torch, numpy and Python's random draw",
        type=int,
    )
    add("--deterministic", "only algorithms that repeat exactly", **_SWITCH)
    add(
        "--stop-on-nan",
        "end all ranks where a loss is not finite, and save nothing of it; else it is only said",
        action=argparse.BooleanOptionalAction,
    )


def _synchronisation(parser: Parser) -> None:
    add = partial(_add, parser.add_argument_group("synchronisation"))
    add(
        "--bucket-cap-mb",
        "size in MiB at which a bucket of gradients is sent; 0: one for each parameter; inf: one "
        "for all; auto: what is fastest in the first steps, during backward or after it (default: "
        "1 for the first, 25 for the others)",
        type=_size,
        metavar="MB",
    )
    add(
        "--no-overlap",
        "send gradients after backward, not during it",
        dest="overlap",
        action="store_false",
    )
    add(
        "--no-shared-memory",
        "on gloo, average by messages alone: by default a machine's ranks do it in memory that "
        "they share",
        dest="shared_memory",
        action="store_false",
    )
    add(
        "--compress",
        "send gradients as bf16 or fp16, half the bytes, or as matrices of low rank (Vogels et al. "
        "2019)",
        choices=COMPRESSIONS,
    )
    add(
        "--powersgd-rank",
        "of the matrices of --compress powersgd: more is closer to the gradients, and larger "
        f"(default: {POWERSGD_RANK})",
        **_COUNT,
    )
    add(
        "--sync-batch-norm",
        "batch norm over the batches of all ranks (or --shards), not of each by itself",
        **_SWITCH,
    )
    add(
        "--check-sync",
        "after each epoch compare all ranks' parameters and optimizer state bit for bit and print "
        "the parameters' checksum; with N also in every Nth step, without printing",
        nargs="?",
        const=0,
        **_COUNT,
    )


def _kept(parser: Parser) -> None:
    add = partial(_add, parser.add_argument_group("what is kept"))
    add(
        "--checkpoint-dir",
        "save after each epoch, and on Ctrl-C, SIGTERM, SIGHUP or SIGUSR1; the newest two stay",
        **_FOLDER,
    )
    add(
        "--resume",
        "continue from FILE, or from the newest whole checkpoint of --checkpoint-dir; auto starts "
        "anew where there is none",
        metavar="auto|FILE",
    )
    add("--log-dir", "metrics.jsonl and TensorBoard events", **_FOLDER)
    add(
        "--timeline",
        "record some steps of all ranks, print one, and write a page, a picture and a trace there",
        **_FOLDER,
    )
    add("--timeline-steps", f"steps to record (default: {TIMELINE_STEPS})", **_COUNT)
    add(
        "--stragglers",
        "every N steps name the rank that the others wait for: how often, how long and in which "
        "phase; --log-dir gets the same as scalars, with throughput and exposed communication",
        **_COUNT,
    )
    add("--checkpoint", "the file that test evaluates", type=Path, metavar="FILE")
    add("--quiet", "print the result alone", **_SWITCH)


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
    given = vars(make_parser(about, program).parse_args(arguments))
    for name, value in given.items():
        if value == []:  # argparse's own reading of --epochs=--
            raise UsageError(f"argument {option_of(name)}: expected one argument; see --help")
    # A test without a dataset takes the one that the model was trained on.
    options = argparse.Namespace(**dict.fromkeys(_NO_DEFAULT) | given)
    if options.command not in ("train", "test"):
        raise UsageError(f"the command must be train or test, got {options.command!r}; see --help")
    if options.master_port is not None and not 1 <= options.master_port <= 65535:
        raise UsageError(f"--master-port must be 1 to 65535, got {options.master_port}")
    values = {name: value for name, value in given.items() if name in _DEFAULTS}
    if options.command == "test":
        for name in values:
            if name not in _OF_TEST:
                raise UsageError(f"{option_of(name)} has no meaning for test")
        if options.checkpoint is None:
            raise UsageError("test needs --checkpoint FILE, the model to evaluate")
    elif options.checkpoint is not None:
        raise UsageError("--checkpoint belongs to test; to continue a run: --resume FILE")
    return Settings(**values), options
