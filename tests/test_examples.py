"""The programs of `examples/` run on gloo and on mpi, and their ranks agree."""

import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from ddp_from_scratch.training.main import parse
from tests.support import forked
from tests.support.failing_run import LAUNCHERS, Run
from tests.support.ranks import ROOT

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples"
OWN = {
    "gpt.py": ["--steps", "30", "--write", "20"],
    "resnet.py": ["--images", "128", "--epochs", "1"],
    "gan.py": ["--steps", "50"],
    "train_your_own.py": ["--epochs", "1", "--length", "2000"],
}
OTHERS = {
    "lightning_mpi.py": ("lightning", ["--epochs", "2"]),
    "accelerate_mpi.py": ("accelerate", ["--epochs", "2"]),
    "trainer_mpi.py": ("transformers", ["--steps", "20"]),
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ON_CLUSTERS = {  # by program: the package, the command before it, the batches of each rank
    "lightning_strategy.py": ("lightning", TORCHRUN, ["4", "8"]),
    "ray_train.py": ("ray", [sys.executable], ["8", "8"]),
    "submitit_train.py": ("submitit", [sys.executable], ["8", "8"]),
}
OF_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def test_the_table_lists_every_program():
    listed = re.findall(r"^\| \[(.*?)\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*") if path.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    assert {*listed, "README.md"} == there
    assert {*OWN, *OTHERS, *ON_CLUSTERS} == {name for name in listed if name.endswith(".py")}


@pytest.mark.parametrize(
    ("program", "more"),
    [
        *((program, []) for program in OWN),
        *(("gpt.py", ["--optimizer", n]) for n in ["sgd", "muon"]),
    ],
)
def test_on_gloo(program, more, tmp_path):
    printed = forked.run([str(FOLDER / program), *OWN[program], *more], 2, tmp_path)
    assert re.search(r"parameters .* on 2 ranks", printed)


# Runs a program with its arguments. After that many steps, none if 0, rank 1 gets a signal.
STOPPED = """
import os, runpy, signal, sys
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = int(sys.argv.pop(1))

def stop(*_):
    global steps
    steps -= 1
    if steps == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR1)

register_optimizer_step_post_hook(stop)
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("exit code", end.code)
"""


@pytest.mark.parametrize(
    ("backend", "shard"), [("gloo", "none"), ("gloo", "world"), ("mpi", "none")]
)
def test_a_loop_of_ones_own_is_stopped_and_resumed_with_the_same_bits(backend, shard, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)

    def run(steps, checkpoint):
        options = ["--epochs", "2", "--length", "2000", "--backend", backend, "--shard", shard]
        command = [str(tmp_path / "stopped.py"), str(steps), str(FOLDER / "train_your_own.py")]
        command += [*options, "--checkpoint", str(tmp_path / checkpoint)]
        if backend == "mpi":
            return printed_by(*LAUNCHERS["mpirun"], *command)
        return forked.run(command, 2, tmp_path)

    def checksum(printed):
        (found,) = re.findall(r"parameters (\w+) on 2 ranks, saved", printed)
        return found

    whole = run(0, "whole.pt")
    stopped = run(7, "stopped.pt")
    assert stopped.count("exit code 138") == 2, stopped
    assert "stopped in epoch 1 after step 8/14" in stopped
    assert "epoch 1: loss" not in stopped
    resumed = run(0, "stopped.pt")
    assert resumed.count("exit code 0") == 2
    assert checksum(resumed) == checksum(whole) != checksum(stopped)
    last, same = (torch.load(tmp_path / name) for name in ("stopped.pt", "whole.pt"))
    for part in ("model", "optimizer"):
        torch.testing.assert_close(last[part], same[part], rtol=0, atol=0)


@pytest.mark.parametrize("program", OTHERS)
def test_on_mpi(program):
    package, options = OTHERS[program]
    pytest.importorskip(package)
    printed = printed_by(*LAUNCHERS["mpirun"], FOLDER / program, *options)
    assert re.search(r"parameters .* on 2 ranks|loss \d\.\d+ on 2 ranks, backend mpi", printed)


def test_the_trainers_page_shows_these_programs():
    page = (ROOT / "docs" / "how-to" / "trainer.md").read_text()
    rows = dict(re.findall(r"^\| .* \[(\w+\.py)\]\S+ \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {"trainer_mpi.py", "accelerate_mpi.py"} <= OTHERS.keys()
    for program, shown in rows.items():
        assert f"\nmpirun -n 2 python examples/{program}\n" in page
        source = (FOLDER / program).read_text()
        assert [text for text in re.findall("`(.*?)`", shown) if text not in source] == []


@pytest.mark.parametrize("program", ON_CLUSTERS)
def test_on_a_cluster_of_one_machine(program, tmp_path):
    package, command, batches = ON_CLUSTERS[program]
    pytest.importorskip(package)
    printed = printed_by("env", "-C", tmp_path, *command, FOLDER / program)
    line = r"rank (\d): (\d+) batches, loss \S+ parameters (\w+) on 2 ranks"
    found = {*re.findall(line, printed)}  # Ray prints it twice
    checksums = {checksum for _, _, checksum in found}
    assert len(checksums) == 1, printed
    assert sorted(found) == [(str(r), n, *checksums) for r, n in enumerate(batches)]


def printed_by(*command: object) -> str:
    with Run(*map(str, command), **OF_RAY) as run:
        assert run.wait(100) == 0, run.text
        return run.text


@pytest.mark.filterwarnings("default")  # of Lightning's own imports
def test_lightnings_strategy_refuses_what_communicates_within_an_epoch():
    pytest.importorskip("lightning")
    strategy = runpy.run_path(str(FOLDER / "lightning_strategy.py"))["JoinStrategy"]()
    settings = {"accumulate_grad_batches": 1, "max_steps": -1, "val_check_interval": 1.0}
    automatic = SimpleNamespace(automatic_optimization=False)
    for name, other in {**dict.fromkeys(settings, 2), "automatic_optimization": False}.items():
        trainer = SimpleNamespace(**settings | {name: other}, lightning_module=automatic)
        with pytest.raises(ValueError, match=f"JoinStrategy needs {name}="):
            strategy.setup(trainer)
    strategy.joining = object()
    for communicate in (strategy.barrier, strategy.reduce):
        with pytest.raises(RuntimeError, match="on_step=False, on_epoch=True"):
            communicate()


def test_the_notebook_runs_and_may_run_again(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel shows no output of its children
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("cloudpickle")
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    (starts,) = (cell for cell in notebook.cells if "start_ranks(train" in cell.source)
    notebook.cells.append(nbformat.from_dict(starts))
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(path))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=60, resources=where).execute()
    cells = [cell for cell in notebook.cells if "start_ranks(train" in cell.source]
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    sums = [re.findall(r"rank \d: parameters (\w+)", text) for text in printed]
    assert [(len(of_ranks), len(set(of_ranks))) for of_ranks in sums] == [(2, 1)] * 2


def test_the_pods_of_the_jobset_are_given_what_run_py_takes():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((FOLDER / "k8s" / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    (secret,) = container["env"]
    program, *options = container["command"]
    given = dict(option.removeprefix("--").split("=") for option in options if "=" in option)
    name = jobset["metadata"]["name"]
    assert given["master-addr"] == f"{name}-{replicated['name']}-0-0.{name}"
    ranks = given["nproc"].split(",")
    assert job["completionMode"] == "Indexed"
    assert len(ranks) == job["completions"] == job["parallelism"]
    assert {*ranks} == {container["resources"]["requests"]["cpu"]}
    assert mount["name"] == volume["name"]
    assert given["checkpoint-dir"] == mount["mountPath"]
    assert (secret["name"], program, pod["restartPolicy"]) == ("DDP_SECRET", "ddp-run", "Never")
    settings, where = parse([option.replace("$(JOB_COMPLETION_INDEX)", "1") for option in options])
    found = where.nproc, where.node_rank, where.master_addr
    assert found == (given["nproc"], 1, given["master-addr"])
    assert str(settings.checkpoint_dir) == mount["mountPath"]
