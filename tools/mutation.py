"""Measures how much of the engine the tests notice, by mutation testing.

    pip install --group mutation
    python tools/mutation.py --mutants 60

A mutant is the engine with one small change by cosmic-ray: to a comparison, a number, an operator,
a condition, a loop. The quick tier of the engine's tests runs on each, in a copy of the repository.
If a test fails or hangs, the mutant is killed. The last line is the share of the mutants killed.
The same --seed on the same code takes the same mutants.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
ENGINE = ["core", "options", "optim", "virtual_ranks/tree_reduction.py"]
# The folders that find most first: a mutant's run ends with the first failure.
TESTS = ["core", "options", "virtual_ranks", "sync", "optim", "torch_ddp"]


def mutants(package: Path) -> list[MutationSpec]:
    """Every mutation, one for each place and kind; types in annotations are left alone."""
    files = [file for name in ENGINE for file in sorted((package / name).rglob("*.py"))]
    files += [package / name for name in ENGINE if name.endswith(".py")]
    places: dict[tuple[object, ...], list[MutationSpec]] = defaultdict(list)
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init(files, database, {})
        every = [item.mutations[0] for item in database.work_items]
    for mutation in every:
        kind = mutation.operator_name.split("_")[0]
        if "BitOr" not in mutation.operator_name:
            places[str(mutation.module_path), mutation.start_pos, kind].append(mutation)
    return [random.choice(kinds) for _, kinds in sorted(places.items())]


def killer(root: Path, seconds: float) -> str | None:
    """The first test that fails in that copy of the repository, or None if all pass."""
    tests = [f"tests/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-qx", "-rfE", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if run.wait(seconds) == 0:
                return None
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return f"{seconds:.0f} s were not enough"
        output.seek(0)
        lines = output.read().splitlines() or [""]
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


def main() -> int:
    """Runs the tests on the unchanged code and on each mutant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=60, help="how many to try (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--repository", type=Path, default=ROOT, help="default: this one")
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "runs")
        shutil.copytree(options.repository, copy, ignore=ignored)
        start = time.monotonic()
        if (failure := killer(copy, 3600)) is not None:
            print(f"mutation: on the unchanged code a test fails: {failure}", file=sys.stderr)
            return 1
        limit = 2 * (time.monotonic() - start) + 60
        every = mutants(copy / "ddp_from_scratch")
        chosen = random.sample(every, min(options.mutants, len(every)))
        killed = 0
        for mutant in chosen:
            operator = get_operator(mutant.operator_name)(**mutant.operator_args)
            file = copy / mutant.module_path
            code = file.read_text()
            file.write_text(mutate_code(code, operator, mutant.occurrence))
            failure = killer(copy, limit)
            file.write_text(code)
            killed += failure is not None
            where = f"{file.relative_to(copy)}:{mutant.start_pos[0]}"
            name = mutant.operator_name.partition("/")[2]
            print(f"{'survived' if failure is None else 'killed'} {where} {name}", flush=True)
            if failure is not None:
                print(f"    {failure[:160]}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed, {killed / len(chosen):.0%}; of {len(every)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
