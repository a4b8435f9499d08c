"""Every benchmark runs and writes its files, and the set has its options; no time is checked."""

import importlib
import json
import re
import runpy
import shlex
import sys

import pytest

from benchmarks import __main__ as run_set
from benchmarks import machine, timelines
from ddp_from_scratch.bench import __main__ as bench
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.launch import rank_process
from tests.support import forked
from tests.support.ranks import MPIRUN

SMALL, GLOO, TWICE = "--model layers500", "--backend gloo", "--rounds 2"
RUNS = {
    "step_time": f"{GLOO} {SMALL} {TWICE} --contender ddp.SGD",
    "virtual_ranks": f"{GLOO} {TWICE} --model mlp",
    "balance": f"{GLOO} {TWICE} --slower 2 --virtual-ranks 4",
    "overlap": f"{GLOO} {SMALL} {TWICE} --cap 1",
    "memory": f"{GLOO} {SMALL} --contender '{NO_COMMUNICATION}'",
    "ladder": "--model mlp --steps 2",
    "optimizers": f"{GLOO} {TWICE} {SMALL} --steps 10",
    "beside": "--model mlp --steps 2",
    "scaling": f"{GLOO} {TWICE} --nproc 2",
    "allreduce": "--quick --bytes 4096 --collective all_reduce all_gather",
    "host_time": TWICE,
    "start_time": "--ranks 2 --rounds 1",
    "drill": "--every 10",
    "survive": "--kills 2 --epochs 30 --no-torchrun",
    "what_if": f"{SMALL} {TWICE} --place memory messages",
    "timelines": f"{SMALL} --steps 2 --place {timelines.GLOO}",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tmp_path, monkeypatch, capsys):
    """In this process, and ranks of gloo forked from one that has imported torch."""
    results, codes = tmp_path / "results", []

    def forked_ranks(command, counts):
        forked.run(command[1:], sum(counts), tmp_path)
        return 0

    monkeypatch.setattr("ddp_from_scratch.bench.timing.start_ranks", forked_ranks)
    monkeypatch.setattr(rank_process, "run_to_exit", lambda main: codes.append(main()))
    for variable, value in MPIRUN.items():
        monkeypatch.setenv(variable, value)
    options = [*shlex.split(RUNS[name]), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # imported above
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    printed = capsys.readouterr().out
    assert codes == [0], printed
    texts = [path.read_text() for path in results.glob("*.json")]
    assert texts
    assert not any(str(tmp_path) in text for text in texts)
    samples, *_ = [json.loads(text)["samples"] for text in texts]
    assert samples
    if name == "survive":
        assert "2 kills: all " in printed
    if name == "what_if":
        assert re.search(r"of 8 predictions are within 1.5 times", printed)
    if name == "drill":
        assert re.search(r"computes wrongly +named after .* s, 3 ranks after .* 4 ranks", printed)
        assert " have the bits of one rank without a fault\n" in printed


def test_every_benchmark_of_the_set_has_its_options():
    for benchmark in run_set.SET:
        module = importlib.import_module(f"benchmarks.{benchmark.name}")
        for arguments in (benchmark.arguments, benchmark.quick, benchmark.full):
            if arguments and hasattr(module, "parse"):
                module.parse([*arguments, "--results", "elsewhere"])


@pytest.mark.slow
def test_a_page_about_a_machine_says_what_became_of_each_part(tmp_path, monkeypatch):
    def python(text):
        return lambda _: ("-c", text)

    parts = [
        machine.Part("endless", 0.01, python("import time; time.sleep(600)")),
        machine.Part("fails", 1.0, python("print('no luck'); exit(3)")),
        machine.Part("elsewhere", 1.0, python(""), "there is no GPU"),
        machine.Part("works", 1.0, python("print('a table')")),
    ]
    monkeypatch.setattr(machine, "parts", lambda: parts)
    monkeypatch.setattr(sys, "argv", ["machine", "--minutes", "1", "--results", str(tmp_path)])
    assert machine.main() == 0
    (page,), (samples,) = tmp_path.glob("*.md"), tmp_path.glob("*.json")
    states = {part["title"]: part["state"] for part in json.loads(samples.read_text())["parts"]}
    assert states.pop("endless").startswith("cut off after ")
    assert states == {
        "fails": "FAILED with exit code 3",
        "elsewhere": "left out: there is no GPU",
        "works": "done",
    }
    text = page.read_text()
    assert "| fails | FAILED with exit code 3 | " in text
    assert "```text\na table\n```" in text
    assert page.stem == samples.stem


def test_parts_of_the_page_have_options_of_their_programs():
    for part in machine.parts():
        _, name, *options = part.arguments(30.0)
        if name == "ddp_from_scratch.bench":
            bench.parse([*options, "--results", "elsewhere"], name)
        elif hasattr(module := importlib.import_module(name), "parse"):
            module.parse([*options, "--results", "elsewhere"])
