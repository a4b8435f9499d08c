"""Mistakes at the command line, as a user makes them: the exit code and the first line."""

import sys
from pathlib import Path

import pytest

from tests.support.failing_run import ROOT, RUN_PY, Run

PYTHON = sys.executable
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def first_line(arguments: str, code: int, **environ: str) -> str:
    """Runs run.py, which ends with this code and prints nothing but its first line."""
    with Run(PYTHON, RUN_PY, *arguments.split(), **environ) as run:
        assert run.wait() == code, run.text
        run.assert_nobody_left()
        assert run.out == "", run.text
        line, *others = run.err.splitlines()
        assert others == [], run.text
        return line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "--epoch 1",
            "unrecognized arguments: --epoch; did you mean --epochs? Otherwise see --help",
        ),
        (
            "--epoch=1",
            "unrecognized arguments: --epoch=1; did you mean --epochs? Otherwise see --help",
        ),
        ("--bucketcap 1", "unrecognized arguments: --bucketcap; did you mean --bucket-cap-mb?"),
        ("--ep 1", "unrecognized arguments: --ep; did you mean --epochs? Otherwise see --help"),
        ("--zzz", "unrecognized arguments: --zzz; see --help"),
        *(
            (
                f"--batch-size {size} --global-batch-size 32",
                "argument --global-batch-size: not allowed with argument --batch-size; see --help",
            )
            # 32 is also the default.
            for size in (16, 32)
        ),
        ("test --checkpoint x --lr 0.05", "--lr has no meaning for test"),
        (
            "--nproc 2 --node-rank 1",
            "--node-rank 1 is for several machines, with a count for each as in --nproc 8,2; got "
            "--nproc 2",
        ),
        ("--nproc 8,2 --node-rank 2", "--node-rank must be 0 to 1 with --nproc 8,2, got 2"),
    ],
)
def test_an_option_that_does_not_fit(arguments: str, told: str) -> None:
    assert first_line(arguments, 2).startswith(f"error: {told}")


def test_nproc_under_a_launcher() -> None:
    told = "error: --nproc is for starting without a launcher, but torchrun has started this "
    assert first_line("--nproc 2", 2, **TORCHRUN) == f"{told}process already: leave it out"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--timeline", "cannot write the timeline to /proc/x: No such file or directory"),
        ("--log-dir", "cannot write metrics to /proc/x: No such file or directory; give --log-dir"),
        (
            "--checkpoint-dir",
            "--checkpoint-dir /proc/x cannot be written to: No such file or directory",
        ),
        (
            "--dataset mnist --download --data-dir",
            "cannot download mnist to /proc/x: No such file or directory; check the network and",
        ),
    ],
)
def test_a_folder_that_cannot_be_made(option: str, told: str) -> None:
    assert first_line(f"--nproc 2 --epochs 1 --quiet {option} /proc/x", 2).startswith(
        f"error: {told}"
    )


def test_a_timeline_without_matplotlib_says_that_it_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib here')")
    folder = tmp_path / "timeline"
    here = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with Run(PYTHON, RUN_PY, "--epochs", "1", "--timeline", str(folder), **here) as run:
        assert run.wait() == 0, run.text
        assert f"timeline {folder}/timeline.html\nno picture: that takes matplotlib" in run.out
    assert not (folder / "timeline.png").exists()
