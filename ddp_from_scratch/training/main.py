"""Trains an image classifier in several processes that average their gradients.

Examples:
    python run.py                                two gloo processes on this machine
    python run.py --backend mpi --nproc 4        the same on MPI: starts itself under mpirun
    mpirun -n 4 python run.py --backend mpi      under a launcher: mpirun, torchrun or srun
    torchrun --nproc-per-node 2 run.py
    python run.py --backend nccl                 one process per visible GPU
    python run.py --nproc 8,2 --node-rank 0 --master-addr HOST
                                                 two machines without a launcher: run the same on
                                                 the other one, with --node-rank 1 and the
                                                 DDP_SECRET that this one prints
    python run.py test --checkpoint FILE         the test accuracy of a saved model
"""

# Imports torch only in a process that trains, not for --help or in the parent of the ranks.

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ddp_from_scratch as ddp
from ddp_from_scratch import UsageError
from ddp_from_scratch.training.errors import needs_extra
from ddp_from_scratch.training.settings import (
    GROUPS,
    MAX_RESTARTS,
    MOST_HERE,
    Command,
    Settings,
    option_of,
)

# Options that need the parent of the ranks.
_OF_OUTPUT = ("debug_rank", "output_prefix", "output_ranks", "output_dir")
_TRAINER = "ddp_from_scratch.training.loop"
# Settings that `test` uses. It rejects all others.
_OF_TEST = {
    *("backend", "dataset", "data_dir", "download", "batch_size", "precision", "workers"),
    *("threads", "timeout", "deterministic", "quiet"),
}


def make_parser(program: Sequence[str] = ("run.py",)) -> argparse.ArgumentParser:
    """Makes the parser from the fields of `Command` and `Settings`."""
    about, _, examples = str(__doc__).partition("\n\n")
    name = Path(program[0]).name
    if name == "-m":
        examples = examples.replace("run.py", " ".join(program))
        name = f"python {' '.join(program)}"
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        # Options that were not given are absent, so one that repeats its default counts as given.
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    # With `choices` argparse would complain about the value of an unknown option.
    parser.add_argument(
        "command", nargs="?", default="train", metavar="train|test", help="default: train"
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    batch = groups["training"].add_mutually_exclusive_group()
    for one in (*fields(Command), *fields(Settings)):
        if not one.metadata:  # a field of `Command` that is no option
            continue
        text, how = one.metadata["help"], one.metadata["how"]
        if isinstance(one.default, bool):
            how = {"action": "store_false" if one.default else "store_true", "dest": one.name}
        elif one.default is not None:
            shown = f"{one.default:g}" if isinstance(one.default, float) else one.default
            text += f" (default: {shown})"
        group = batch if one.name.endswith("batch_size") else groups[one.metadata["group"]]
        group.add_argument(option_of(one.name), help=text, **how)
    return parser


def parse(
    arguments: Sequence[str], program: Sequence[str] = ("run.py",)
) -> tuple[Settings, Command]:
    """Parses a command line; raises a UsageError for wrong or contradictory options."""
    parser = make_parser(program)
    try:
        found, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}; see --help") from error
    if unknown:
        name, known = unknown[0].partition("=")[0], list(parser._option_string_actions)
        like = [option for option in known if option.startswith(name)]
        like += difflib.get_close_matches(name, known, 1, 0.7)
        advice = f"did you mean {like[0]}? Otherwise " if like else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {advice}see --help")
    of_command, of_settings = (
        {one.name: getattr(found, one.name) for one in fields(kind) if hasattr(found, one.name)}
        for kind in (Command, Settings)
    )
    command = Command(**of_command)
    if command.command == "test":
        for name in of_settings:
            if name not in _OF_TEST:
                raise UsageError(f"{option_of(name)} has no meaning for test")
        if command.checkpoint is None:
            raise UsageError("test needs --checkpoint FILE, the model to evaluate")
    elif command.checkpoint is not None:
        raise UsageError("--checkpoint belongs to test; to continue a run: --resume FILE")
    return Settings(**of_settings), command


def main(program: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code. Raises a UsageError for a wrong option.

    `program` is what follows `python`: a file, or -m and a module. It also starts the ranks.
    """
    settings, options = parse(arguments, program)
    with needs_extra("train"):
        import tqdm  # noqa: F401  # before any rank starts: each would report that it is missing
    settings = _with_consequences(settings, options)
    launcher = ddp.launcher()
    # The interactive shell of `srun --pty bash` is a step with a single task.
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if launcher == "srun" else None
    in_slurm_shell = tasks == "1" and options.nproc
    if launcher == "none" or in_slurm_shell:
        code = _start(settings, options, [sys.executable, *program, *arguments])
        if code is not None:
            return code
    elif "DDP_STARTED_HERE" not in os.environ:  # `start_ranks` and `start_mpirun` set it
        if settings.elastic:
            raise UsageError(
                f"--elastic is for starting without a launcher: {launcher} ends or restarts all "
                f"ranks when one fails"
            )
        for name in ("nproc", "bind", "node_rank", "master_addr", "master_port", *_OF_OUTPUT):
            if getattr(options, name) not in (None, False):
                raise UsageError(
                    f"{option_of(name)} is for starting without a launcher, but {launcher} has "
                    f"started this process already: leave it out"
                )
    elif "DDP_MEMBER" in os.environ and not settings.elastic:
        raise UsageError(
            "start_ranks(max_restarts=...) has started this process, in a job that replaces lost "
            "ranks: add --elastic, or leave max_restarts out"
        )

    from ddp_from_scratch.training.check import check
    from ddp_from_scratch.training.evaluation import test
    from ddp_from_scratch.training.loop import Trainer

    # Bits depend on the number of threads, and cores for a rank on the number of ranks.
    threads: Any = settings.threads or ("auto" if settings.virtual_ranks is None else 1)
    with ddp.process_group(settings.backend, timeout=settings.timeout, threads=threads) as world:
        if settings.check is not None:
            return check(settings, world)
        if options.command == "test":
            assert options.checkpoint is not None, "`parse` has seen it"
            test(settings, options.dataset, options.checkpoint, world)
            return 0
        # As a shell reports it. Every rank returns the same.
        number = Trainer(settings, world).run()
        return 128 + number if number else 0


def _with_consequences(settings: Settings, options: Command) -> Settings:
    """Returns the settings with what follows from others: equal on all ranks."""
    if settings.elastic and settings.virtual_ranks is None:
        least = sum(_counts(settings, options))
        settings = replace(settings, virtual_ranks=1 << (least - 1).bit_length())  # a power of two
    if settings.check is not None:  # which a lost rank ends
        settings = replace(settings, elastic=False, max_restarts=None, replace_wrong=True)
    return settings


def _start(settings: Settings, options: Command, command: Sequence[str]) -> int | None:
    """Starts the ranks; None if this process is the only one."""
    backend, counts = settings.backend, _counts(settings, options)
    if len(counts) > 1:
        if backend == "mpi":
            raise UsageError(
                "--backend mpi runs on several machines under mpirun: mpirun --host A:8,B:2 "
                "python run.py --backend mpi"
            )
        if options.node_rank is None or options.master_addr is None:
            raise UsageError("--nproc for several machines needs --node-rank and --master-addr")
    elif options.master_addr is not None or options.master_port is not None:
        raise UsageError("--master-addr and --master-port are for several machines: --nproc 8,2")
    given = [name for name in _OF_OUTPUT if getattr(options, name) not in (None, False)]
    # A single rank needs no agent: this process trains.
    if counts == (1,) and not given and options.bind not in ("cores", "socket"):
        return None
    if backend == "mpi" and given:
        raise UsageError(
            f"{option_of(given[0])} is for ranks without MPI: start mpirun yourself, which has "
            f"options for this (Open MPI: --output tag, --output dir=DIR, --stdin N)"
        )
    if settings.elastic and options.debug_rank is not None:
        raise UsageError("--debug-rank cannot be used with --elastic: leave one of them out")
    # Where the work is on GPUs, the cores are for what feeds them.
    bind = options.bind or ("none" if backend == "nccl" else "auto")
    if backend == "mpi":
        return ddp.start_mpirun(counts[0], command, bind=bind)
    allowed = settings.max_restarts if settings.max_restarts is not None else MAX_RESTARTS
    must_match = {}
    if settings.elastic and len(counts) > 1:
        from ddp_from_scratch.training.coordination import versions

        must_match = versions() | settings.to_compare()
    return ddp.start_ranks(
        command,
        counts,
        options.node_rank or 0,
        options.master_addr or "127.0.0.1",
        options.master_port or 29500,
        settings.timeout,
        preload=[_TRAINER],
        max_restarts=allowed if settings.elastic else None,
        replace_wrong=settings.replace_wrong,
        must_match=must_match,
        stdin=options.debug_rank,
        output_prefix=options.output_prefix,
        output_ranks=_ranks(options.output_ranks, sum(counts)),
        output_dir=options.output_dir,
        bind=bind,
    )


def _ranks(text: str | None, world_size: int) -> list[int] | None:
    if text is None:
        return None
    ranks = [int(part[:9]) if part.isdecimal() else -1 for part in text.split(",")]
    if not all(0 <= rank < world_size for rank in ranks):
        raise UsageError(f"--output-ranks must be ranks below {world_size} as in 0,2, got {text!r}")
    return ranks


def _counts(settings: Settings, options: Command) -> tuple[int, ...]:
    default = 2
    if settings.backend == "nccl":
        import torch

        default = torch.accelerator.device_count()
        if default == 0:
            raise UsageError(
                "--backend nccl needs a GPU, and none is visible here: use --backend gloo or mpi"
            )
    return parse_counts(options.nproc or str(default), options.node_rank or 0)


def parse_counts(text: str, node_rank: int) -> tuple[int, ...]:
    """Parses `--nproc`: "2" for one machine, "8,2" for one with 8 processes and one with 2."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UsageError(
            f"--nproc must be a number of processes, 1 or more, or one for each machine such as "
            f"8,2; got {text!r}"
        )
    # Nine digits are already too many processes, and Python refuses to convert thousands of digits.
    counts = tuple(int(part[:9]) for part in text.split(","))
    if max(counts) > MOST_HERE:
        raise UsageError(f"--nproc must be at most {MOST_HERE:,} for a machine, got {text[:40]}")
    if len(counts) == 1 and node_rank:
        raise UsageError(
            f"--node-rank {node_rank} is for several machines, with a count for each as in "
            f"--nproc 8,2; got --nproc {text}"
        )
    if not 0 <= node_rank < len(counts):
        raise UsageError(
            f"--node-rank must be 0 to {len(counts) - 1} with --nproc {text}, got {node_rank}"
        )
    return counts
