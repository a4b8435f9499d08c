"""Shared by the benchmarks: contenders, workloads, timing, reports."""

import argparse


def make_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Makes the parser of `python -m module`, whose help begins with `text`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
