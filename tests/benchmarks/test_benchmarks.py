"""The benchmarks: what they compute from samples, what they refuse, and that each of them runs.

Nothing here looks at how long anything took.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from benchmarks import __main__ as run_set
from benchmarks import breakdown, compare, memory, overlap, scaling, step_time, two_hosts
from benchmarks.harness import contenders, launch, report, timing, workloads
from benchmarks.harness.contenders import NO_COMMUNICATION, REFERENCES, ContenderSpec
from benchmarks.harness.report import pyplot
from benchmarks.harness.timing import Samples
from ddp_from_scratch import UsageError
from tests.support.ranks import MPIRUN, ROOT

NOISE = np.random.default_rng(3)


def run(*command, code=0):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


# From samples to numbers ------------------------------------------------------------------------


def test_a_ratio_is_taken_pair_by_pair():
    other = Samples("b", [1.0, 10.0, 100.0])  # a machine that gets slower
    assert Samples("a", [2.0, 20.0, 200.0]).ratio_to(other) == (2.0, 2.0, 2.0)
    middle, low, high = Samples("a", [1.0, 20.0, 300.0]).ratio_to(other)
    assert (middle, low, high) == (2.0, 1.0, 3.0)
    assert Samples("a", [2.0, 11.0, 101.0]).minus(other) == (1.0, 1.0, 1.0)


def test_the_table_compares_with_the_faster_of_torchs_settings():
    samples = [
        Samples(NO_COMMUNICATION, [10.0] * 3),
        Samples(REFERENCES[0], [40.0] * 3),
        Samples(REFERENCES[1], [20.0] * 3),
        Samples("ours", [15.0] * 3, [7.0] * 3),
    ]
    lines = step_time.table([s for s in samples if not s.cpu_milliseconds]).splitlines()
    assert "/ it on gloo" not in lines[0]  # nothing ran on gloo beside
    lines = step_time.table([*samples[:3], Samples("ours", [15.0] * 3)]).splitlines()
    assert lines[-1].split("  ")[0] == "ours"
    assert "0.75 (0.75 to 0.75)" in lines[-1]
    assert "1.50 (1.50 to 1.50)" in lines[-1]
    assert lines[-1].endswith(" 5.0")  # exposed


def test_hidden_share():
    hidden = overlap.hidden_share
    for exposed, communication, share in ((0, 8, 1.0), (8, 8, 0.0), (2, 8, 0.75), (12, 8, -0.5)):
        assert hidden(np.full(5, exposed), np.full(5, communication)) == (share, share, share)
    assert all(math.isnan(x) for x in hidden(np.full(5, 1.0), np.full(5, -1.0)))


def test_overlap_of_each_cap():
    times = {
        NO_COMMUNICATION: 10.0,
        "during backward, 1 MB": 12.0,
        "at its end, 1 MB": 14.0,
        "torch DDP, 1 MB": 13.0,
        "during backward, 25 MB": 11.0,
        "at its end, 25 MB": 14.0,
        "torch DDP, 25 MB": 16.0,
    }
    assert {s.name for s in overlap.specs([1.0, 25.0])} == times.keys()
    samples = [Samples(name, [time] * 4) for name, time in times.items()]
    small, large = overlap.overlaps(samples, [1.0, 25.0])
    assert (small.exposed, small.hidden[0], small.torch_hidden[0]) == (2.0, 0.5, 0.25)
    assert (large.exposed, large.hidden[0], large.torch_hidden[0]) == (1.0, 0.75, -0.5)
    rows = overlap.table([small, large], samples[0]).splitlines()[2:4]
    assert ["12.0 *" in rows[0], "13.0 *" in rows[0], "11.0 *" in rows[1], "16.0 *" in rows[1]] == [
        False,
        True,
        True,
        False,
    ]


def test_what_auto_settled_on_is_told_beside_the_best():
    times = {"during backward, 1 MB": 10.0, "at its end, 1 MB": 8.0, "torch DDP, 1 MB": 1.0}
    samples = [Samples(name, [time] * 4) for name, time in (times | {"auto": 10.0}).items()]
    told = overlap.describe_auto(samples, {"bucket_cap_mb": 4.0, "overlap": True})
    assert told == (
        "auto: bucket_cap_mb=4.0, during backward: 10.0 ms, 1.250 (1.250 to 1.250) x the best "
        "of the sweep (over all rounds at its end, 1 MB, 8.0 ms)"
    )


def test_the_best_is_not_compared_in_the_rounds_that_made_it_the_best():
    auto = Samples("auto", [10.0] * 4)
    lucky = [Samples("first", [5.0, 10.0, 5.0, 10.0]), Samples("then", [10.0, 5.0, 10.0, 5.0])]
    assert overlap.ratio_to_best(auto, lucky) == (1.0, 1.0, 1.0)


ROLLUP = """5600-7fff ---p 00000000 00:00 0   [rollup]
Rss:              900 kB
Pss:              500 kB
Pss_Anon:         100 kB
Pss_File:         380 kB
Pss_Shmem:         20 kB
Private_Clean:    300 kB
Private_Dirty:     90 kB
"""


def test_memory_counts_no_files_and_what_is_shared_once():
    assert memory.parse_rollup(ROLLUP) == memory.Memory(90 * 1024, 120 * 1024)
    # Two ranks, before and in four phases; the peaks of the node are those of one phase.
    sample = {
        "name": "a",
        "private": [[10, 15, 90, 30, 30, 30], [20, 70, 25, 30, 30, 31]],
        "node": [[10, 15, 90, 30, 30, 30], [20, 70, 25, 30, 30, 31]],
    }
    assert memory.growth(sample, "private") == 80
    assert memory.growth(sample, "node") == 85
    assert memory.growth(sample, "private", steady=True) == 20
    assert memory.growth(sample, "node", steady=True) == 31


def test_memory_of_this_process_grows_with_what_it_allocates():
    if not memory.ROLLUP.exists():
        pytest.skip("no /proc/self/smaps_rollup")
    with memory.Watch(torch.device("cpu")) as watch:
        before = watch.peak()
        kept = torch.ones(2**22)
        after = watch.peak()
    size = kept.nbytes
    for growth in (after.private - before.private, after.node - before.node):
        assert 0.9 * size < growth < 1.5 * size


# compare ----------------------------------------------------------------------------------------


def result_file(path, times, *, slower_machine=1.0, **settings):
    """A file of 40 rounds in which each contender takes its time, within 5 %."""
    weather = slower_machine * (1 + 0.5 * NOISE.random(40))  # slows all contenders of a round
    content = {
        "settings": {"benchmark": "step_time", "nproc": 2, **settings},
        "machine": {"cores": 2},
        "samples": [
            {"name": name, "milliseconds": list(t * weather * (1 + 0.05 * NOISE.random(40)))}
            for name, t in times.items()
        ],
    }
    path.write_text(json.dumps(content))
    return path


def verdicts(old, new, **options):
    old, new = compare.read(old), compare.read(new)
    reference = compare.common_reference(old, new, options.pop("reference", None))
    return {c.name: c.verdict for c in compare.compare(old, new, reference, **options)}


def compare_files(monkeypatch, *paths):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths)])
    return compare.main()


def test_compare_tells_what_got_slower_and_faster_on_another_machine(tmp_path, monkeypatch, capsys):
    before = {NO_COMMUNICATION: 10, "a": 20, "b": 20, "c": 20, "gone": 5}
    after = {NO_COMMUNICATION: 10, "a": 20, "b": 24, "c": 16, "new": 5}
    old = result_file(tmp_path / "old.json", before)
    new = result_file(tmp_path / "new.json", after, slower_machine=7.0)
    assert verdicts(old, new) == {"a": "", "b": "slower", "c": "faster"}
    assert verdicts(old, new, at_least=0.3) == {"a": "", "b": "", "c": ""}
    assert verdicts(old, new, reference="b") == {NO_COMMUNICATION: "faster"} | {
        "a": "faster",
        "c": "faster",
    }
    assert compare_files(monkeypatch, old, old) == 0
    capsys.readouterr()
    assert compare_files(monkeypatch, old, new) == 1
    told = capsys.readouterr().out
    assert "only in the old file: gone" in told
    assert "only in the new file: new" in told


def test_a_file_has_a_line_for_each_list_of_samples_and_can_be_compared(tmp_path):
    samples = [{"name": name, "milliseconds": [1 / 3, 2e-7, 3, 123456.7]} for name in "ab"]
    settings = {"benchmark": "step_time", "caps": [1.0, 4.0], "chosen": None}
    report.write("name", "title", samples, settings=settings, folder=tmp_path)
    path = tmp_path / "name.json"
    content = json.loads(path.read_text())
    assert content["settings"] == settings
    assert content["samples"][1] == {"name": "b", "milliseconds": [0.333333, 2e-07, 3, 123457.0]}
    lines = path.read_text().splitlines()
    assert lines.count('   "milliseconds": [0.333333, 2e-07, 3, 123457.0]') == 2
    assert compare.read(path).milliseconds["a"].shape == (4,)


def test_compare_finds_nothing_in_noise(tmp_path):
    times = {NO_COMMUNICATION: 10, **{f"contender {i}": 20 for i in range(8)}}
    old, new = (result_file(tmp_path / name, times) for name in ("old.json", "new.json"))
    assert set(verdicts(old, new).values()) == {""}


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    good = result_file(tmp_path / "good.json", {NO_COMMUNICATION: 1, "a": 2})
    other = result_file(tmp_path / "other.json", {NO_COMMUNICATION: 1, "a": 2}, nproc=4)
    with pytest.raises(UsageError, match="different benchmarks: nproc 2 and 4"):
        verdicts(good, other)
    with pytest.raises(UsageError, match="not in both files: b"):
        verdicts(good, good, reference="b")
    for text, told in (
        ("{", "no timed contenders"),
        ("[]", "no timed contenders"),
        ('{"samples": {"256": {"gloo": [1.0]}}}', "no timed contenders"),
        ('{"samples": [], "machine": {}, "settings": {}}', "two or more times"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=told):
            compare.read(tmp_path / "bad.json")
    missing = run("-m", "benchmarks.compare", str(good), str(tmp_path / "none.json"), code=2)
    assert missing.stderr.count("\n") == 1


# What trains ------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
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


# The programs -----------------------------------------------------------------------------------


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
