"""Every benchmark runs, writes its files, and refuses what it cannot do; no time is looked at."""

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import __main__ as run_set
from benchmarks import breakdown, memory, overlap, scaling, shards, timelines, two_hosts
from benchmarks.harness import deepspeed
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench import main as step_time
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from tests.support.failing_run import Run
from tests.support.ranks import MPIRUN, ROOT

SMALL = ["--model", "layers500"]
GLOO = ["--backend", "gloo"]
TWICE = ["--rounds", "2"]
RUNS = [
    ("step_time", [*GLOO, *SMALL, *TWICE, "--contender", "ddp.SGD"]),
    ("shards", [*GLOO, *TWICE, "--model", "mlp"]),
    ("overlap", [*GLOO, *SMALL, *TWICE, "--cap", "1"]),
    ("memory", [*GLOO, *SMALL, "--contender", NO_COMMUNICATION]),
    ("ladder", [*SMALL, "--steps", "2"]),
    ("breakdown", ["--backend", "mpi", *SMALL, "--rounds", "3"]),
    ("scaling", [*GLOO, *TWICE, "--nproc", "2"]),
    ("allreduce", ["--quick", "--bytes", "4096"]),
    ("wait_cost", ["--nproc", "2", *TWICE]),
    ("start_time", ["--ranks", "2", "--rounds", "1"]),
    ("survive", ["--kills", "5", "--epochs", "60", "--no-torchrun"]),
    ("timelines", [*SMALL, "--place", timelines.GLOO, "--steps", "2"]),
    ("timelines", [*SMALL, "--place", timelines.MPI, "--steps", "2"]),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "options"), RUNS, ids=[name for name, _ in RUNS])
def test_runs(name, options, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options, "--results", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    texts = [path.read_text() for path in tmp_path.glob("*.json")]
    assert texts
    assert not any(str(tmp_path) in text for text in texts)
    samples, *_ = [json.loads(text)["samples"] for text in texts]
    assert samples
    if name == "breakdown":  # the parts of a step are no longer than the step
        for sample in samples:
            of_step = zip(*(sample["parts"][part] for part in breakdown.PARTS), strict=True)
            steps = zip(of_step, sample["milliseconds"], strict=True)
            assert all(sum(parts) <= slowest for parts, slowest in steps)
    if name == "survive":
        assert "5 kills: all " in done.stdout
    if name == "allreduce" and not deepspeed.missing(2):
        assert deepspeed.NAME in samples["4096"]


def test_options_out_of_their_range():
    for module, wrong in (
        (overlap, ["--seconds", "-1"]),
        (overlap, ["--nproc", "1"]),
        (overlap, ["--cap", "0"]),
        (breakdown, ["--nproc", "0"]),
        (breakdown, ["--rounds", "1"]),
        (memory, ["--nproc", "0"]),
        (timelines, ["--steps", "0"]),
        (shards, ["--nproc", "3"]),
        (two_hosts, ["--ranks", "3"]),
        (two_hosts, ["--rounds", "1"]),
        (scaling, ["--nproc", "0"]),
        (scaling, ["--rounds", "1"]),
    ):
        with pytest.raises(UsageError, match=f"{wrong[0]}.* must be|must be .*{wrong[0]}"):
            module.parse(wrong)


def test_every_benchmark_of_the_set_has_its_options():
    parsers = {m.__name__: m.parse for m in (breakdown, overlap, memory, two_hosts, scaling)}
    parsers["benchmarks.step_time"] = lambda options: step_time.parse(options, "")
    for benchmark in run_set.SET:
        assert (ROOT / "benchmarks" / f"{benchmark.name}.py").is_file()
        for arguments in (benchmark.arguments, benchmark.quick, benchmark.full):
            if arguments and (parse := parsers.get(f"benchmarks.{benchmark.name}")):
                parse([*arguments, "--results", "elsewhere"])


@pytest.fixture
def set_of(monkeypatch, tmp_path):
    """Runs the set with these arguments, and each benchmark's exit code; the names that ran."""

    def run(arguments, code_of):
        ran = []
        monkeypatch.setattr(run_set, "run", lambda c: ran.append(c[2]) or code_of.get(c[2], 0))
        monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--results", str(tmp_path)])
        return run_set.main(), [name.removeprefix("benchmarks.") for name in ran]

    return run


def test_the_set_goes_on_after_a_failure_but_not_after_ctrl_c(set_of, monkeypatch):
    codes = {"benchmarks.step_time": 3, "benchmarks.memory": 1}
    assert set_of(["--quick"], codes) == (3, ["step_time", "overlap", "memory"])  # the first's
    assert set_of(["--quick"], {"benchmarks.step_time": 130}) == (130, ["step_time"])
    for arguments, told in (["two_hosts", "--quick"], "with --quick"), (["scaling"], "without"):
        with pytest.raises(UsageError, match=f"{told}.* has no {arguments[0]}"):
            set_of(arguments, {})
    nowhere = run_set.Benchmark("step_time", obstacle=lambda: "there is no reason")
    monkeypatch.setattr(run_set, "SET", [nowhere])
    assert set_of([], {}) == (0, [])


TIDIES_UP = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.4)  # longer than subprocess.run would wait
    pathlib.Path(sys.argv[1]).write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
number = int(sys.argv[2])
os.kill(os.getppid(), number)
if number == signal.SIGINT:
    os.kill(os.getpid(), number)  # as a terminal does
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_tidies_up(number, tmp_path):
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: run_set._stop}
    before = signal.signal(number, handlers[number])
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run_set.run([sys.executable, "-c", TIDIES_UP, str(tmp_path / "told"), str(int(number))])
    finally:
        signal.signal(number, before)
    assert (tmp_path / "told").read_text() == str(int(number))


def test_without_its_tools_two_hosts_says_so_in_a_line_and_ends_with_2(tmp_path):
    with Run(sys.executable, "-m", "benchmarks.two_hosts", PATH=str(tmp_path)) as run:
        assert run.wait() == 2
        assert run.err.startswith("error: two hosts on one machine: "), run.text
        assert run.err.count("\n") == 1, run.text
