"""The benchmarks: what they compute from samples, what they refuse, and that each of them runs.

Nothing here looks at how long anything took.
"""

import json
import signal
import sys
import threading

import pytest
import torch

from benchmarks import __main__ as run_set
from benchmarks import breakdown, memory, overlap, scaling, step_time, two_hosts
from benchmarks.harness import contenders, launch, timing, workloads
from benchmarks.harness.contenders import NO_COMMUNICATION, REFERENCES, ContenderSpec
from benchmarks.harness.report import pyplot
from ddp_from_scratch import UsageError
from tests.benchmarks.test_figures import compare_files, run
from tests.support.ranks import ROOT
from tests.support.tiers import slow

TINY = workloads.Workload(
    "tiny",
    lambda: workloads.Transformer(11, 5, width=8, heads=2, depth=1),
    lambda: workloads.text_batch(2, 5, 11),
)


def test_models_have_a_row_of_logits_for_each_label():
    for name, workload in workloads.WORKLOADS.items():
        with torch.device("meta"):
            model = workload.model()
            inputs, labels = workload.batch()
            assert model(inputs).shape[0] == labels.numel(), name
    megabytes = {name: round(w.parameter_bytes / 2**20) for name, w in workloads.WORKLOADS.items()}
    told = {"mlp": 64, "resnet18": 45, "resnet50": 97, "transformer": 39, "layers500": 2}
    assert megabytes == told | {"mlp64": 64, "gpt2": 475}
    assert all(f" {megabytes[name]} MB" in w.name for name, w in workloads.WORKLOADS.items())


def test_a_transformer_sees_no_later_token():
    torch.manual_seed(0)
    model = TINY.model()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    before, changed = model(tokens), model(torch.tensor([[1, 2, 3, 4, 6]]))
    assert torch.allclose(before[:4], changed[:4])
    assert not torch.allclose(before[4], changed[4])


def all_contenders(world, gloo):
    group = torch.distributed.new_group(backend="gloo") if gloo else None
    chosen = step_time.specs(world.backend, None)
    torch.manual_seed(world.rank)
    compared = contenders.contenders(TINY, world.device, chosen, group)
    rounds = timing.rounds_for(None, 2, world.device, "")
    samples = timing.interleave(compared, rounds, world.device)
    timing.check_equal(compared)
    assert [s.name for s in samples] == [s.name for s in chosen]
    assert {len(s.milliseconds) for s in samples} == {2}
    by_the_clock = list(timing.rounds_for(1e-9, None, world.device, ""))
    assert by_the_clock == list(range(timing.FEWEST_ROUNDS))
    return [s.milliseconds for s in samples]


@pytest.mark.parametrize("backend", [slow("gloo"), "mpi"])
def test_every_contender_trains_to_the_same_parameters(ranks, backend):
    everyone = ranks(backend, 2)(all_contenders, backend == "mpi")
    assert everyone[0] == everyone[1]  # the slowest rank's


def diverging(world):
    def wrong(model, group):
        training = contenders.reducer()(model, group)
        return contenders.Training(
            training.forward, training.zero_grad, lambda loss: training.update(2 * loss)
        )

    references = [s for s in contenders.CONTENDERS if s.name in REFERENCES]
    cases = {
        contenders.alone: "not the same on all",
        wrong: "x and torch DDP, default have",
    }
    for prepare, error in cases.items():
        chosen = [*references, ContenderSpec("x", prepare)]
        torch.manual_seed(world.rank)
        compared = contenders.contenders(TINY, world.device, chosen)
        timing.interleave(compared, range(1), world.device)
        with pytest.raises(RuntimeError, match=error):
            timing.check_equal(compared)


def test_what_did_not_train_alike_is_not_compared(ranks):
    ranks("gloo", 2)(diverging)


def test_options(monkeypatch, capsys):
    quick = step_time.parse(["--quick"])
    assert (quick.model, quick.seconds, quick.nproc) == (["mlp", "resnet18"], 3.0, [2])
    assert step_time.parse(["--quick", "--model", "gpt2"]).model == ["gpt2"]
    assert step_time.parse(["--full"]).nproc == [1, 2, 4]
    assert breakdown.parse(["--quick"]).model == ["mlp"]
    assert overlap.parse(["--cap", "4", "1", "4"]).cap == [1.0, 4.0]
    assert memory.parse([]).contender[:1] == [NO_COMMUNICATION]
    assert "buckets" not in memory.parse([]).contender
    assert "buckets" in memory.parse(["--full"]).contender
    for parse, wrong in (
        (step_time.parse, ["--rounds", "1"]),
        (step_time.parse, ["--nproc", "0"]),
        (step_time.parse, ["--seconds", "-1"]),
        (step_time.parse, ["--seconds", "0"]),
        (step_time.parse, ["--seconds", "nan"]),
        (breakdown.parse, ["--nproc", "0"]),
        (breakdown.parse, ["--rounds", "1"]),
        (overlap.parse, ["--nproc", "1"]),
        (overlap.parse, ["--cap", "0"]),
        (memory.parse, ["--nproc", "0"]),
    ):
        with pytest.raises(UsageError, match=f"^{wrong[0]} must be .*, got {wrong[1]}$"):
            parse(wrong)
    monkeypatch.setattr(launch, "available_memory", lambda: 2**30 + 2**21)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch.check_memory("mlp", 2, 2)  # 1 GiB, and 1 MiB for the biases
    with pytest.raises(UsageError, match="12 copies of mlp on 2 ranks need about 6 GiB"):
        launch.check_memory("mlp", 12, 2)
    both = ["--model", "mlp", "layers500"]
    with pytest.raises(UsageError, match="copies of mlp"):
        step_time.models_that_fit(step_time.parse(both), "mpi", 2)
    assert step_time.models_that_fit(step_time.parse([*both, "--full"]), "mpi", 2) == ["layers500"]
    assert "left out: " in capsys.readouterr().out
    with pytest.raises(UsageError, match="copies of mlp"):
        step_time.models_that_fit(step_time.parse(["--full", "--model", "mlp"]), "mpi", 2)


def test_step_time_runs_and_its_file_can_be_compared_and_summarised(tmp_path, monkeypatch):
    options = ["--model", "layers500", "--rounds", "2", "--results", str(tmp_path)]
    chosen = ["--contender", "ddp.SGD", "buckets"]
    done = run("-m", "benchmarks.step_time", "--backend", "gloo", *options, *chosen)
    assert "ddp.SGD" in done.stdout
    assert "one flat bucket" not in done.stdout
    path = tmp_path / "step_time-layers500-gloo-2.json"
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert {len(s["milliseconds"]) for s in content["samples"]} == {2}
    if pyplot is not None:
        assert (tmp_path / "step_time-gloo-2.png").read_bytes().startswith(b"\x89PNG")
    assert compare_files(monkeypatch, path, path) == 0
    summary = run_set.summarise(tmp_path, since=0.0)
    assert "gloo, 2 ranks: 500 layers" in summary
    assert run_set.summarise(tmp_path, since=path.stat().st_mtime + 1) == ""


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
        "buckets, overlapped, views": averaged,
        "ddp.SGD": averaged,
        "ddp.SGD, one flat bucket": averaged,
        "NodeSharedSGD, backward_and_step": averaged | {"averaging"},
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
    module = {m.__name__: m for m in (step_time, breakdown, overlap, memory, two_hosts, scaling)}
    for benchmark in run_set.SET:
        for arguments in (benchmark.arguments, benchmark.quick, benchmark.full):
            name = f"benchmarks.{benchmark.name}"
            if arguments and name in module:
                module[name].parse([*arguments, "--results", "elsewhere"])
        assert (ROOT / "benchmarks" / f"{benchmark.name}.py").is_file()
