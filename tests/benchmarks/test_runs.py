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

SMALL, GLOO, TWICE = "--model layers500", "--backend gloo", "--rounds 2"
RUNS = [
    ("step_time", f"{GLOO} {SMALL} {TWICE} --contender ddp.SGD"),
    ("shards", f"{GLOO} {TWICE} --model mlp"),
    ("overlap", f"{GLOO} {SMALL} {TWICE} --cap 1"),
    ("memory", f"{GLOO} {SMALL} --contender", NO_COMMUNICATION),
    ("ladder", f"{SMALL} --steps 2"),
    ("breakdown", f"--backend mpi {SMALL} --rounds 3"),
    ("scaling", f"{GLOO} {TWICE} --nproc 2"),
    ("allreduce", "--quick --bytes 4096"),
    ("wait_cost", f"--nproc 2 {TWICE}"),
    ("start_time", "--ranks 2 --rounds 1"),
    ("survive", "--kills 5 --epochs 60 --no-torchrun"),
    ("timelines", f"{SMALL} --steps 2 --place", timelines.GLOO),
    ("timelines", f"{SMALL} --steps 2 --place", timelines.MPI),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS, ids=[name for name, *_ in RUNS])
def test_runs(run, tmp_path):
    name, options, *last = run
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(
        [*command, *options.split(), *last, "--results", str(tmp_path)],
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
    for module, *wrongs in (
        (overlap, "--seconds -1", "--nproc 1", "--cap 0"),
        (breakdown, "--nproc 0", "--rounds 1"),
        (memory, "--nproc 0"),
        (timelines, "--steps 0"),
        (shards, "--nproc 3"),
        (two_hosts, "--ranks 3", "--rounds 1"),
        (scaling, "--nproc 0", "--rounds 1"),
    ):
        for wrong in wrongs:
            option = wrong.split()[0]
            with pytest.raises(UsageError, match=f"{option}.* must be|must be .*{option}"):
                module.parse(wrong.split())


def test_every_benchmark_of_the_set_has_its_options():
    parsers = {m.__name__: m.parse for m in (breakdown, overlap, memory, two_hosts, scaling)}
    parsers["benchmarks.step_time"] = lambda options: step_time.parse(options, "")
    for benchmark in run_set.SET:
        assert (ROOT / "benchmarks" / f"{benchmark.name}.py").is_file()
        for arguments in (benchmark.arguments, benchmark.quick, benchmark.full):
            if arguments and (parse := parsers.get(f"benchmarks.{benchmark.name}")):
                parse([*arguments, "--results", "elsewhere"])


def test_the_set_goes_on_after_a_failure_but_not_after_ctrl_c(monkeypatch, tmp_path):
    def run(*arguments, **codes):
        """Its exit code, and the names that ran; each ends with its own of these codes."""
        ran = []

        def started(command):
            ran.append(command[2].removeprefix("benchmarks."))
            return codes.get(ran[-1], 0)

        monkeypatch.setattr(run_set, "run", started)
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--results", str(tmp_path)])
        return run_set.main(), ran

    monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
    told = run("--quick", step_time=3, memory=1)
    assert told == (3, ["step_time", "overlap", "memory"])  # the first's code
    assert run("--quick", step_time=130) == (130, ["step_time"])
    for arguments, told in (["two_hosts", "--quick"], "with --quick"), (["scaling"], "without"):
        with pytest.raises(UsageError, match=f"{told}.* has no {arguments[0]}"):
            run(*arguments)
    nowhere = run_set.Benchmark("step_time", obstacle=lambda: "there is no reason")
    monkeypatch.setattr(run_set, "SET", [nowhere])
    assert run() == (0, [])


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
