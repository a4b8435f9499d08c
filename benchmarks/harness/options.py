"""The parser of a benchmark, without an import of torch."""

import argparse
from pathlib import Path

from benchmarks.harness.report import RESULTS


def make_parser(name: str, text: str | None, *, results: bool = True) -> argparse.ArgumentParser:
    """Makes the parser of `python -m NAME`, whose help begins with `text`, with --results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if results:
        parser.add_argument(
            "--results",
            type=Path,
            default=RESULTS,
            metavar="FOLDER",
            help="where JSON and PNG go (default: benchmarks/results)",
        )
    return parser
