"""Every Python excerpt of the documents runs as printed, from a file of its own."""

import os
import re
import runpy
import subprocess
import sys
import traceback
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.pages import Excerpt, excerpts
from tests.support.ranks import MPIRUN, ROOT
from tests.support.tiers import slow

LIMIT_S = 60.0
ENVIRON = os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)}

PYTHON = excerpts("python")
(README,) = [excerpt for excerpt in PYTHON if excerpt.page == ROOT / "README.md"]
TESTS = [excerpt for excerpt in PYTHON if "\ndef test_" in excerpt.code]
ON_MPI = [excerpt for excerpt in PYTHON if re.search(r'"mpi"\)|mpi\.BACKEND', excerpt.code)]
ON_GLOO = [excerpt for excerpt in PYTHON if excerpt not in ON_MPI + TESTS]
ON_MPI.append(replace(README, code=README.code.replace('("gloo")', '("mpi")')))

# A server that has imported torch forks each rank: a fresh process that need not import it again.
# `torch._dynamo` is what the first optimizer would import.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("torch._dynamo", "ddp_from_scratch.optim.node_shared", "tests.docs.test_excerpts"),
        *("ddp_from_scratch.torch_ddp.distributed_data_parallel",),
        *("ddp_from_scratch.world.process_group",),
    ]
)


def as_rank(file: str, output: str, environment: dict[str, str]) -> None:
    """In a process of its own: runs the file as `python FILE` would under a launcher."""
    os.environ.update(environment)
    os.chdir(Path(file).parent)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.argv = [file]
    code = 0
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # the test shows it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def run(code: str, world_size: int, folder: Path) -> str:
    """The output of all ranks, which must end with 0; one rank has no launcher."""
    file = folder / "example.py"
    file.write_text(code)
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    of_all = {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    of_all |= {"DDP_RENDEZVOUS_FILE": str(folder / "rendezvous")}
    places = [of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    processes = []
    try:
        for output, place in zip(outputs, places, strict=True):
            arguments = (str(file), str(output), place if world_size > 1 else {})
            processes.append(FORKS.Process(target=as_rank, args=arguments))
            processes[-1].start()
        for process in processes:
            process.join(LIMIT_S)
        printed = "\n".join(output.read_text() for output in outputs if output.exists())
        assert [process.exitcode for process in processes] == [0] * world_size, printed
        return printed
    finally:
        for process in processes:
            process.kill()
            process.join()


def check_readme(output: str, world_size: int) -> None:
    """One checksum, printed by every rank."""
    printed = re.findall(r"rank (\d) of (\d): parameters ([0-9a-f]{16})", output)
    ranks = [(str(rank), str(world_size)) for rank in range(world_size)]
    assert sorted((rank, size) for rank, size, _ in printed) == ranks
    assert len({checksum for _, _, checksum in printed}) == 1


# Those that start ranks import torch anew.
@pytest.mark.parametrize(
    "excerpt", [slow(e) if "start_ranks(" in e.code else e for e in ON_GLOO], ids=str
)
def test_runs_as_printed(excerpt: Excerpt, tmp_path):
    printed = run(excerpt.code, 1 if "start_ranks(" in excerpt.code else 2, tmp_path)
    assert excerpt.prints in printed
    if excerpt is README:
        check_readme(printed, 2)


# One mpirun for all, since MPI lives as long as its process.
ONE_AFTER_ANOTHER = """
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
"""


def test_runs_as_printed_under_mpirun(tmp_path):
    files = [tmp_path / f"{number}.py" for number in range(len(ON_MPI))]
    for file, excerpt in zip(files, ON_MPI, strict=True):
        file.write_text(excerpt.code)
    command = ["mpirun", "-n", "2", sys.executable, "-c", ONE_AFTER_ANOTHER, *map(str, files)]
    check_readme(launched(command, tmp_path), 2)  # the last one


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_readmes_example_alone_and_under_torchrun(nproc, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(README.code)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if nproc > 1 else []
    check_readme(launched([sys.executable, *torchrun, str(file)], tmp_path), nproc)


def launched(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        **{"env": ENVIRON, "cwd": folder, "text": True, "timeout": 110},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def call_by_name(world, code: str, function: str, *arguments: object) -> object:
    """On a rank: a function of an excerpt, which the rank cannot import."""
    names: dict[str, object] = {}
    exec(code, names)
    return names[function](world, *arguments)  # type: ignore[operator]


@pytest.mark.parametrize("excerpt", TESTS, ids=str)
def test_the_example_of_a_test_passes(excerpt: Excerpt, ranks):
    def crew(backend, world_size):
        return lambda function, *arguments: ranks(backend, world_size)(
            call_by_name, excerpt.code, function.__name__, *arguments
        )

    names: dict[str, object] = {}
    exec(excerpt.code, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(crew)
