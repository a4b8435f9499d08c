"""All contenders train the same, on ranks; and the program runs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ddp_from_scratch.bench import contenders as c
from ddp_from_scratch.bench import prepare, timing
from ddp_from_scratch.bench.workloads import Transformer, Workload, text_batch
from tests.support.on_ranks import on
from tests.support.ranks import MPIRUN, ROOT
from tests.support.tiers import slow

TINY = Workload(
    "tiny", lambda: Transformer(11, 5, width=8, heads=2, depth=1), lambda: text_batch(2, 5, 11)
)


def train_all(world, optimizer):
    backends = ["gloo", "mpi"] if world.backend == "mpi" else [world.backend]
    specs = c.rows(backends, optimizer, [spec.name for spec in c.CONTENDERS])
    others = {spec.group for spec in specs if spec.group} - {world.backend}
    groups = {name: torch.distributed.new_group(backend=name) for name in sorted(others)}
    compared = c.contenders(TINY, world.device, specs, groups, optimizer)
    rounds = timing.rounds_for(None, 2, world.device, "")
    samples = timing.interleave(compared, rounds, world.device)
    timing.check_equal(compared)
    assert [s.name for s in samples] == [s.name for s in specs]
    assert {len(s.milliseconds) for s in samples} == {2}
    by_the_clock = list(timing.rounds_for(1e-9, None, world.device, ""))
    assert by_the_clock == list(range(timing.FEWEST_ROUNDS))
    for group in groups.values():
        torch.distributed.destroy_process_group(group)
    return [s.milliseconds for s in samples]


@pytest.mark.parametrize(
    ("backend", "optimizer"), [("gloo", "adamw"), slow("mpi", "sgd"), slow("gloo", "sgd")]
)
def test_every_contender_trains_to_the_same_parameters(ranks, backend, optimizer):
    everyone = ranks(backend, 2)(train_all, optimizer)
    assert everyone[0] == everyone[1]  # the slowest rank's


@on("gloo-2")
def test_what_did_not_train_alike_is_not_compared(world):
    def wrong(model, group, optimizers):
        training = prepare.reducer()(model, group, optimizers)
        return prepare.Training(
            training.forward, training.zero_grad, lambda loss: training.update(2 * loss)
        )

    references = [s for s in c.CONTENDERS if s.name in c.REFERENCES]
    for way, error in {
        prepare.alone: "not the same on all",
        wrong: "x and torch DDP, default have",
    }.items():
        torch.manual_seed(world.rank)
        chosen = [*references, c.ContenderSpec("x", way)]
        compared = c.contenders(TINY, world.device, chosen)
        timing.interleave(compared, range(1), world.device)
        with pytest.raises(RuntimeError, match=error):
            timing.check_equal(compared)


OWN = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).double()
    return model, torch.randn(4, 8).double(), lambda model, batch: model(batch).square().mean()
"""


@pytest.mark.slow
def test_a_model_of_ones_own(tmp_path):
    """With dropout, and parameters that no flat kernel takes alone."""
    (tmp_path / "mine.py").write_text(OWN)
    command = [sys.executable, "-m", "ddp_from_scratch.bench", "--rounds", "2"]
    command += ["--model", f"{tmp_path / 'mine.py'}:make", "--contender", "NodeSharedSGD"]
    command += ["--optimizer", "adamw", "--backend", "gloo", "mpi", "--results", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | MPIRUN, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    rows = {f"NodeSharedAdamW on {backend}" for backend in ("gloo", "mpi")}
    assert {*rows, c.NO_COMMUNICATION} <= {s["name"] for s in content["samples"]}
    assert {len(s["milliseconds"]) for s in content["samples"]} == {2}
    assert "for this model: " in done.stdout or "no verdict: the machine was" in done.stdout
