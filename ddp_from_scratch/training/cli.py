"""Parses the command line of `run.py` and checks that its options fit together."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.settings import GROUPS, Command, Settings, option_of

# Settings that `test` uses. It rejects all others.
_OF_TEST = {
    *("backend", "dataset", "data_dir", "download", "batch_size", "precision", "workers"),
    *("threads", "timeout", "deterministic", "quiet"),
}


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *given: Any, **options: Any) -> Any:
        found, unknown = self.parse_known_args(*given, **options)
        if unknown:
            name, known = unknown[0].partition("=")[0], list(self._option_string_actions)
            like = [option for option in known if option.startswith(name)]
            like += difflib.get_close_matches(name, known, 1, 0.7)
            advice = f"did you mean {like[0]}? Otherwise " if like else ""
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {advice}see --help")
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def make_parser(about: str, program: Sequence[str] = ("run.py",)) -> _Parser:
    """Makes the parser from the fields of `Command` and `Settings`.

    `about` is a docstring: a sentence, then examples with run.py, which `program` replaces.
    """
    about, _, examples = about.partition("\n\n")
    name = Path(program[0]).name
    if name == "-m":
        examples = examples.replace("run.py", " ".join(program))
        name = f"python {' '.join(program)}"
    parser = _Parser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        # Options that were not given are absent, so one that repeats its default counts as given.
        argument_default=argparse.SUPPRESS,
    )
    # With `choices` argparse would complain about the value of an unknown option.
    parser.add_argument(
        "command", nargs="?", default="train", metavar="train|test", help="default: train"
    )
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS}
    batch = groups["training"].add_mutually_exclusive_group()
    for one in (*fields(Command), *fields(Settings)):
        if not one.metadata:  # a field of `Command` that is no option
            continue
        text, how = one.metadata["help"], one.metadata["how"]
        if isinstance(one.default, bool) and not how:
            how = {"action": "store_false" if one.default else "store_true", "dest": one.name}
        elif one.default is not None:
            text += f" (default: {one.default})"
        group = batch if one.name.endswith("batch_size") else groups[one.metadata["group"]]
        group.add_argument(option_of(one.name), help=text, **how)
    return parser


def parse(
    arguments: Sequence[str], about: str, program: Sequence[str] = ("run.py",)
) -> tuple[Settings, Command]:
    """Parses a command line; a UsageError for options that are wrong or do not go together."""
    given = vars(make_parser(about, program).parse_args(arguments))
    of_command, of_settings = (
        {one.name: given[one.name] for one in fields(kind) if one.name in given}
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
