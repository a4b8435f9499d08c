"""The benchmarks: what they compute from samples, what they refuse, and that each of them runs.

Nothing here looks at how long anything took.
"""

import json
import re
import signal
import sys
import threading

import pytest
import torch

from benchmarks import __main__ as run_set
from benchmarks import (
    breakdown,
    ladder,
    memory,
    overlap,
    scaling,
    shards,
    summary,
    timelines,
    two_hosts,
)
from benchmarks.harness.report import pyplot
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench import main
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION, REFERENCES
from tests.benchmarks.test_figures import compare_files, run
from tests.support.ranks import ROOT

RUNG = "Reducer, one flat bucket"


def test_options():
    assert breakdown.parse(["--quick"]).model == ["mlp"]
    assert overlap.parse(["--cap", "4", "1", "4"]).cap == [1.0, 4.0]
    assert memory.parse([]).contender[:1] == [NO_COMMUNICATION]
    assert RUNG not in memory.parse([]).contender
    assert RUNG in memory.parse(["--full"]).contender
    zero = "torch DDP, ZeroRedundancyOptimizer"
    assert zero not in memory.parse([]).contender
    assert zero in memory.parse(["--optimizer", "adamw"]).contender
    for parse, wrong in (
        (overlap.parse, ["--seconds", "-1"]),
        (breakdown.parse, ["--nproc", "0"]),
        (breakdown.parse, ["--rounds", "1"]),
        (overlap.parse, ["--nproc", "1"]),
        (overlap.parse, ["--cap", "0"]),
        (memory.parse, ["--nproc", "0"]),
        (timelines.parse, ["--steps", "0"]),
        (shards.parse, ["--nproc", "3"]),
    ):
        with pytest.raises(UsageError, match=f"^{wrong[0]} must be .*, got {wrong[1]}"):
            parse(wrong)


@pytest.mark.slow
def test_step_time_runs_and_its_file_can_be_compared_and_summarised(tmp_path, monkeypatch):
    options = ["--model", "layers500", "--rounds", "2", "--results", str(tmp_path)]
    chosen = ["--contender", "ddp.SGD", "Reducer"]
    ways = ["--way", "interleaved", "alone"]
    done = run("-m", "benchmarks.step_time", "--backend", "gloo", *options, *chosen, *ways)
    assert "ddp.SGD on gloo" in done.stdout
    assert "one flat bucket" not in done.stdout
    assert "all ways of running" in done.stdout
    path = tmp_path / "step_time-layers500-gloo-2.json"
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert {len(s["milliseconds"]) for s in content["samples"]} == {2}
    if pyplot is not None:
        picture = tmp_path / "step_time-layers500-gloo-2.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert compare_files(monkeypatch, path, path) == 0
    summary = run_set.summarise(tmp_path, since=0.0)
    assert "500 layers, 2 MB, batch 16; gloo, 2 ranks, interleaved" in summary
    assert "gloo, 2 ranks, alone" in summary
    later = (tmp_path / "step_time-layers500-gloo-2-alone.json").stat().st_mtime + 1
    assert run_set.summarise(tmp_path, since=later) == ""


@pytest.mark.slow
def test_shards_are_timed_beside_an_ordinary_step(tmp_path):
    options = ["--rounds", "2", "--model", "mlp", "--backend", "gloo", "--results", str(tmp_path)]
    done = run("-m", "benchmarks.shards", *options)
    names = [
        s["name"] for s in json.loads((tmp_path / "shards-mlp-gloo-2.json").read_text())["samples"]
    ]
    assert names[2:] == ["2 shards", "4 shards", "16 shards"]
    assert all(name in done.stdout for name in names)


@pytest.mark.parametrize("disturbed", [None, "someone ran"])
def test_the_summary_of_a_busy_machine_has_no_verdict(disturbed):
    times = {NO_COMMUNICATION: 10.0, "torch DDP on gloo, views": 20.0, "ddp.AdamW on gloo": 15.0}
    content = {
        "title": "a model; gloo, 2 ranks; fused AdamW",
        "settings": {"backend": "gloo", "nproc": 2, "optimizer": "adamw", "way": "kept"},
        "disturbed": disturbed,
        "samples": [{"name": name, "milliseconds": [t] * 3} for name, t in times.items()],
    }
    row, *notes = summary.step_times([content]).splitlines()[2:]
    name, numbers = row.split(" kept ")
    assert name == "a model, adamw; gloo, 2 ranks,"
    expected = ["10.0", "20.0", "-", "-", "0.75", "1.50", "-", "-"]
    assert numbers.split() == (expected if disturbed is None else ["?"] * 8)
    assert any("no verdict, a model" in note for note in notes) == (disturbed is not None)


def test_the_parts_of_a_step_take_over_from_each_other(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0])
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: next(now))
    clock = breakdown.StepClock()
    with clock.part("forward"):  # from 0.0
        with clock.part("packing"):  # from 1.0 to 3.0
            pass
        elsewhere = threading.Thread(target=_enter, args=[clock.part("waiting")])
        elsewhere.start()
        elsewhere.join()
    assert clock._step == {"forward": 1.0 + 7.0, "packing": 2.0}  # to 10.0


def _enter(part):
    with part:
        pass


@pytest.mark.slow
def test_the_ladder_draws_every_rung(tmp_path):
    options = ["--model", "layers500", "--steps", "2", "--results", str(tmp_path)]
    done = run("-m", "benchmarks.ladder", *options)
    content = json.loads((tmp_path / "ladder-layers500-gloo-2.json").read_text())
    assert list(content["samples"]) == list(ladder.RUNGS)
    buckets = {rung: len(step["layout"]) for rung, step in content["samples"].items()}
    assert buckets["naive"] == 1000
    assert buckets["flat"] == 1
    for rung in ladder.RUNGS:
        assert f"\n{ladder.CAPTIONS[rung]}\nmain thread |" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", [timelines.GLOO, timelines.MPI])
def test_a_timeline_is_drawn_beside_one_of_smaller_buckets(tmp_path, place):
    options = ["--place", place, "--model", "layers500", "--steps", "2", "--cap", "0.5"]
    done = run("-m", "benchmarks.timelines", *options, "--results", str(tmp_path))
    name = f"timeline-layers500-{place}"
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert list(content["samples"]) == ["default buckets", "buckets of 0.5 MiB"]
    assert {len(times["exposed"]) for times in content["samples"].values()} == {2}
    text = (tmp_path / f"{name}.txt").read_text()
    assert text in done.stdout
    assert "rank 1: communication" in text
    assert "median of 2 steps, ms" in text
    assert (tmp_path / f"{name}.png").exists() == (pyplot is not None)


SHOWN = re.findall(
    r"/benchmarks/results/(timeline-[\w-]+)\.png\)\n\n(.*?)\n\n",
    (ROOT / "docs" / "how-to" / "timeline.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("name", "sentences"), SHOWN, ids=[name for name, _ in SHOWN])
def test_what_the_guide_reads_in_a_timeline_was_printed_with_it(name, sentences):
    printed = (ROOT / "benchmarks" / "results" / f"{name}.txt").read_text()
    cited = re.findall(r"\d+\.\d+", sentences)
    assert len(cited) >= 3
    assert [number for number in cited if not re.search(rf"\b{number}\b", printed)] == []


def test_the_guide_shows_a_timeline_of_every_place():
    assert [name for name, _ in SHOWN] == [f"timeline-resnet18-{p}" for p in timelines.PLACES]


@pytest.mark.slow
def test_breakdown_finds_each_contenders_parts(tmp_path):
    options = ["--backend", "mpi", "--model", "layers500", "--rounds", "3"]
    done = run("-m", "benchmarks.breakdown", *options, "--results", str(tmp_path))
    assert "mpi, 2 ranks, 3 steps each" in done.stdout
    content = json.loads((tmp_path / "breakdown-layers500-mpi-2.json").read_text())
    found = {}
    for sample in content["samples"]:
        parts = sample["parts"]
        found[sample["name"]] = {part for part in breakdown.PARTS if any(parts[part])}
        of_step = zip(*(parts[part] for part in breakdown.PARTS), strict=True)
        longest = zip(of_step, sample["milliseconds"], strict=True)
        assert all(sum(step) <= slowest for step, slowest in longest)
    anyone = {"forward", "backward", "optimizer"}
    averaged = anyone | {"packing", "waiting"}
    assert found == {
        NO_COMMUNICATION: anyone,
        REFERENCES[1]: anyone,
        "Reducer, views": averaged,
        "ddp.SGD": averaged,
        "ddp.SGD, one flat bucket": averaged,
        "NodeSharedSGD": averaged | {"averaging"},
    }
    if pyplot is not None:
        picture = tmp_path / "breakdown-layers500-mpi-2.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_set_goes_on_after_a_failure_and_tells_it(tmp_path, monkeypatch, capsys):
    calls = []

    def fake(command):
        calls.append(command[2])
        return {"benchmarks.step_time": 3, "benchmarks.memory": 1}.get(command[2], 0)

    monkeypatch.setattr(run_set, "run", fake)
    monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--results", str(tmp_path)])
    assert run_set.main() == 3  # the first
    assert calls == ["benchmarks.step_time", "benchmarks.overlap", "benchmarks.memory"]
    out = capsys.readouterr().out
    assert "FAILED with exit code 3" in out
    assert "done, 0 s: 2 of 3" in out

    calls.clear()
    monkeypatch.setattr(run_set, "run", lambda command: calls.append(command) or 130)
    assert run_set.main() == 130
    assert len(calls) == 1  # Ctrl-C ends the set


def test_a_benchmark_that_cannot_run_here_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_set, "run", lambda command: 0)
    monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
    nowhere = run_set.Benchmark("step_time", obstacle=lambda: "there is no reason")
    monkeypatch.setattr(run_set, "SET", [nowhere])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--results", str(tmp_path)])
    assert run_set.main() == 0
    assert "left out, there is no reason: 1 of 1" in capsys.readouterr().out


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
time.sleep(60)
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


def test_nothing_to_run_is_a_mistake(monkeypatch):
    monkeypatch.setattr(run_set.signal, "signal", lambda *_: None)
    for arguments, told in ((["two_hosts", "--quick"], "with --quick"), (["scaling"], "without")):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        with pytest.raises(UsageError, match=f"{told}.* has no {arguments[0]}"):
            run_set.main()


def test_every_benchmark_of_the_set_has_its_options():
    module = {m.__name__: m for m in (breakdown, overlap, memory, two_hosts, scaling)}
    for benchmark in run_set.SET:
        for arguments in (benchmark.arguments, benchmark.quick, benchmark.full):
            name = f"benchmarks.{benchmark.name}"
            if arguments and name in module:
                module[name].parse([*arguments, "--results", "elsewhere"])
            elif arguments and benchmark.name == "step_time":
                main.parse([*arguments, "--results", "elsewhere"], name)
        assert (ROOT / "benchmarks" / f"{benchmark.name}.py").is_file()
