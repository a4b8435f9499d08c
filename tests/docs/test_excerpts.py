"""Every Python excerpt of the documents runs as printed, from a file of its own."""

import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.pages import Excerpt, excerpts
from tests.support.ranks import MPIRUN, ROOT

LIMIT_S = 60.0
PYTHON = excerpts("python")
ON_MPI = [excerpt for excerpt in PYTHON if re.search(r'"mpi"\)|mpi\.BACKEND', excerpt.code)]
TESTS = [excerpt for excerpt in PYTHON if "\ndef test_" in excerpt.code]
ON_GLOO = [excerpt for excerpt in PYTHON if excerpt not in ON_MPI + TESTS]

# A server that has imported torch forks each rank: a fresh process that need not import it again.
# `torch._dynamo` is what the first optimizer would import.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["ddp_from_scratch", "torch._dynamo", "tests.docs.test_excerpts"])


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


def places(world_size: int, folder: Path) -> list[dict[str, str]]:
    """Each rank's environment; none where the excerpt starts ranks by itself."""
    if world_size == 1:
        return [{}]
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        | {"DDP_RENDEZVOUS_FILE": str(folder / "rendezvous")}
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("excerpt", ON_GLOO, ids=str)
def test_runs_as_printed(excerpt: Excerpt, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(excerpt.code)
    world_size = 1 if "start_ranks(" in excerpt.code else 2
    outputs = [str(tmp_path / f"output-{rank}") for rank in range(world_size)]
    processes = [
        FORKS.Process(target=as_rank, args=(str(file), output, place))
        for output, place in zip(outputs, places(world_size, tmp_path), strict=True)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        said = "\n".join(Path(output).read_text() for output in outputs if Path(output).exists())
        assert [process.exitcode for process in processes] == [0] * world_size, said
    finally:
        for process in processes:
            process.kill()
            process.join()


# One mpirun for all: MPI lives as long as its process. The file of excerpts that have run tells
# which of them failed.
ONE_AFTER_ANOTHER = """
import json, pathlib, runpy, sys
from mpi4py import MPI
for file in sys.argv[2:]:
    runpy.run_path(file, run_name="__main__")
    with open(f"{sys.argv[1]}-{MPI.COMM_WORLD.rank}", "a") as ran:
        print(json.dumps(file), file=ran)
"""


@pytest.fixture(scope="module")
def mpirun_of_all(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    files = {str(excerpt): folder / f"{number}.py" for number, excerpt in enumerate(ON_MPI)}
    for excerpt in ON_MPI:
        files[str(excerpt)].write_text(excerpt.code)
    run = [sys.executable, "-c", ONE_AFTER_ANOTHER, str(folder / "ran"), *map(str, files.values())]
    done = subprocess.run(
        ["mpirun", "-n", "2", *run],
        env=os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    ran = [
        {json.loads(line) for line in (folder / f"ran-{rank}").read_text().splitlines()}
        for rank in range(2)
        if (folder / f"ran-{rank}").exists()
    ]
    on_all = set.intersection(*ran) if len(ran) == 2 else set()
    return {name: str(file) in on_all for name, file in files.items()}, done.stdout + done.stderr


@pytest.mark.parametrize("excerpt", ON_MPI, ids=str)
def test_runs_as_printed_under_mpirun(excerpt: Excerpt, mpirun_of_all):
    ran, output = mpirun_of_all
    assert ran[str(excerpt)], output


@pytest.mark.parametrize("excerpt", TESTS, ids=str)
def test_the_example_of_a_test_passes(excerpt: Excerpt, tmp_path):
    (tmp_path / "test_example.py").write_text(excerpt.code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_example.py"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable],
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        ["mpirun", "-n", "2", sys.executable],
    ],
    ids=["alone", "torchrun", "mpirun"],
)
def test_the_readmes_example_runs_under_every_launcher(tmp_path, launcher):
    (code,) = [excerpt.code for excerpt in PYTHON if excerpt.page.name == "README.md"]
    if launcher[0] == "mpirun":
        code = code.replace('process_group("gloo")', 'process_group("mpi")')
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [*launcher, str(tmp_path / "example.py")],
        env=os.environ | MPIRUN | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    world_size = 1 if len(launcher) == 1 else 2
    printed = re.findall(r"rank (\d) of (\d): parameters ([0-9a-f]{16})", done.stdout)
    assert sorted(rank for rank, _, _ in printed) == [str(rank) for rank in range(world_size)]
    assert {size for _, size, _ in printed} == {str(world_size)}
    assert len({checksum for _, _, checksum in printed}) == 1
