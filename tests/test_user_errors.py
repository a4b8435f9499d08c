"""Mistakes at the command line, as a user makes them: the exit code and the first line."""

import sys

import pytest

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training.main import main
from tests.support.failing_run import RUN_PY, Run
from tests.support.tiers import slow

UNKNOWN, BOTH = "unrecognized arguments: ", "--batch-size 16 --global-batch-size 32"
OPTIONS = {
    "--epoch 1": f"{UNKNOWN}--epoch; did you mean --epochs? Otherwise see --help",
    "--epoch=1": f"{UNKNOWN}--epoch=1; did you mean --epochs? Otherwise see --help",
    "--bucketcap 1": f"{UNKNOWN}--bucketcap; did you mean --bucket-cap-mb? Otherwise see --help",
    "--zzz": f"{UNKNOWN}--zzz; see --help",
    BOTH: "argument --global-batch-size: not allowed with argument --batch-size; see --help",
    "test --checkpoint x --lr 0.05": "--lr has no meaning for test",
    "--nproc 2 --node-rank 1": "--node-rank 1 is for several machines, with a count for each as "
    "in --nproc 8,2; got --nproc 2",
    "--nproc 8,2 --node-rank 2": "--node-rank must be 0 to 1 with --nproc 8,2, got 2",
}
OPTIONS[BOTH.replace("16", "32")] = OPTIONS[BOTH]  # 32 is also the default


@pytest.mark.parametrize("arguments", OPTIONS)
def test_an_option_that_does_not_fit(arguments: str) -> None:
    with pytest.raises(UsageError) as told:
        main([RUN_PY], arguments.split())
    assert str(told.value).startswith(OPTIONS[arguments])


NO_FOLDER = "/proc/x: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--epoch 1", OPTIONS["--epoch 1"]),
        ("--timeline", f"cannot write the timeline to {NO_FOLDER}"),
        slow("--log-dir", f"cannot write metrics to {NO_FOLDER}; give --log-dir"),
        slow(
            "--checkpoint-dir",
            "--checkpoint-dir /proc/x cannot be written to: No such file or directory",
        ),
        slow(
            "--dataset mnist --download --data-dir",
            f"cannot download mnist to {NO_FOLDER}; check the network and",
        ),
    ],
)
def test_an_error_is_one_line_and_no_process_is_left(arguments: str, told: str) -> None:
    if not arguments.endswith("1"):
        arguments = f"--nproc 2 --epochs 1 --quiet {arguments} /proc/x"
    with Run(sys.executable, RUN_PY, *arguments.split()) as run:
        assert run.wait() == 2, run.text
        run.assert_nobody_left()
        assert run.out == "", run.text
        (line,) = run.err.splitlines()
        assert line.startswith(f"error: {told}")
