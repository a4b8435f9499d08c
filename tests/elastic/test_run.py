"""Elastic runs: ranks are lost at chosen moments, and the bits stay those of a quiet run."""

import json
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ddp_from_scratch as ddp
from ddp_from_scratch import start_ranks

# Trains 8 steps on 8 virtual ranks; `fault(where, step)` is called at several places of a step.
PROGRAM = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import ddp_from_scratch as ddp

out, me = Path(sys.argv[1]), int(os.environ.get("DDP_MEMBER", 0))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fault(where, step):
    {fault}

class LateBackward(torch.autograd.Function):
    "Calls fault() in backward, behind the loss and before all gradients."
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        fault("backward", run.step)
        return g

if me > {most}:
    sys.exit(2)  # cannot join
with ddp.process_group("gloo") as world:
    torch.manual_seed(me)  # who joins must get the others' parameters
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 4),
    )
    reducer = ddp.Reducer(model, virtual_ranks=8, bucket_cap_mb=0, **{options})
    optimizer = {optimizer}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run = ddp.elastic(world, reducer, optimizer, scheduler)

    def one_virtual_rank(virtual_rank):
        y = LateBackward.apply(model(torch.randn(6, 10)))
        loss = y.square().mean()
        loss.backward()
        finished.append(virtual_rank)
        return loss.item()

    if me == 0:
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    step, finished = None, []
    for attempt in run.attempts(8):
        with attempt:
            fault("begin", run.step)
            optimizer.zero_grad()
            finished = finished if run.step == step else []
            step = run.step
            losses = reducer.run_virtual_ranks(one_virtual_rank)
            fault("averaged", run.step)
            optimizer.step()
            scheduler.step()
            if (step, me) == (3, 0):
                (out / "step3").write_text(json.dumps([finished, losses]))
            fault("stepped", run.step)
    text = hashlib.sha256()
    for tensor in model.state_dict().values():
        text.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        text.update(state[sorted(state)[0]].numpy().tobytes())
    (out / f"way-{{me}}").write_text(reducer.stats().transport)
    place = f"{{world.rank}} of {{run.world.world_size}}" if me == 0 else ""
    (out / f"end-{{me}}").write_text(f"{{text.hexdigest()}} {{scheduler.last_epoch}} {{place}}")
"""
ADAMW = "ddp.AdamW(model.parameters(), lr=0.05, reducer=reducer)"
# Its step waits for other ranks, so a rank that is lost before it breaks that step.
MUON = """ddp.Muon([
        {"params": [model[0].weight, model[3].weight]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "use_muon": False},
    ], lr=0.05, reducer=reducer)"""


@pytest.fixture(autouse=True)
def as_many_threads_as_here(monkeypatch):
    """Another number, other bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


def ends(out, fault, code=0, optimizer=ADAMW, most=99, **options):
    """What each process that reached the end had: checksum, steps of the scheduler.

    Processes above number `most` cannot join.
    """
    out.mkdir()
    fault = textwrap.indent(fault, "    ").strip()
    program = PROGRAM.format(fault=fault, options=options, optimizer=optimizer, most=most)
    command = [sys.executable, "-c", program, str(out)]
    assert start_ranks(command, [3], max_restarts=3) == code
    return [" ".join(file.read_text().split()[:2]) for file in sorted(out.glob("end-*"))]


@pytest.fixture
def optimizer():
    return ADAMW


@pytest.fixture
def quiet(tmp_path, optimizer):
    """The end of a run of one rank, in this process: as under any launcher that replaces none."""
    (out := tmp_path / "quiet").mkdir()
    program = PROGRAM.format(fault="pass", options={}, optimizer=optimizer, most=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", str(out)])
        exec(program, {"__name__": "__main__"})
    return " ".join((out / "end-0").read_text().split()[:2])


# Once, at step 3. The other process that is started in its place has another number.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "who", "optimizer"),
    [("backward", 1, ADAMW), ("averaged", 0, ADAMW), ("stepped", 1, ADAMW), ("averaged", 1, MUON)],
)
def test_a_rank_that_is_killed_costs_no_bit(where, who, optimizer, quiet, tmp_path):
    fault = f"if (where, step, me) == ({where!r}, 3, {who}): die()"
    found = ends(tmp_path / "out", fault, optimizer=optimizer)
    assert set(found) == {quiet}
    assert quiet.endswith(" 8")
    assert len(found) in (2, 3)  # the last steps may be over before another one has joined


TWO_ARE_LOST = """
if (where, step, me) == ("backward", 3, 1):
    die()
if (where, step, me) == ("backward", 3, 2) and run.world.world_size == 2:
    die()
"""


@pytest.mark.slow
def test_what_other_ranks_have_finished_is_kept(quiet, tmp_path):
    # The first of 3 ranks finishes virtual rank 1, as one of 2 ranks also 2, and alone the others.
    assert ends(tmp_path / "out", TWO_ARE_LOST, most=2) == [quiet]
    finished, losses = json.loads((tmp_path / "out" / "step3").read_text())
    assert sorted(finished) == list(range(8))
    assert len(set(losses)) == 8


# The others wait in step 5 until it wants to join: at the latest behind step 6 it is let in.
ONE_JOINS = """
from ddp_from_scratch.world.elastic import job_store
if (where, step, me) == ("begin", 2, 1):
    die()
if me > 2:
    (out / "trained").write_text(str(step))
while (where, step) == ("stepped", 5) and me < 3 and max(job_store().generation.members) < 3:
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_one_joins_and_trains(quiet, tmp_path):
    found = ends(tmp_path / "out", ONE_JOINS, static_graph=True, check_every=1, straggler_every=4)
    assert found == [quiet] * 3
    assert (tmp_path / "out" / "trained").read_text() == "7"
    assert {file.read_text() for file in (tmp_path / "out").glob("way-*")} == {"shared memory"}


@pytest.mark.slow
def test_an_exception_is_a_lost_rank_and_the_second_time_a_bug(tmp_path, capfd):
    # Before the averages: behind them another rank may have finished the step.
    always = "if (where, step, run.world.rank) == ('backward', 3, 0): raise ValueError('no')"
    assert ends(tmp_path / "out", always, code=1) == []
    said = capfd.readouterr().err
    assert "process 0 ended with exit code 1: continuing with 2 ranks" in said
    assert "step 4 failed again with ValueError: no" in said


# Reducers are made on a rank alone, and know their rank and the others from the first attempt on.
NAMES_A_RANK = """
rank, virtual_rank = run.world.rank, reducer.virtual_rank_range[-1]
if (where, step) == ("backward", 2) and reducer.sync:  # rank 1 is late, and its watch has seen it
    if rank == 1:
        (out / "late").touch()
    while not (out / "late").exists():
        time.sleep(0.01)
    time.sleep(3 if rank == 1 else 1)
if (where, step, rank) == ("begin", 3, 1):
    model[0].bias.requires_grad_(False)
"""
WRITES = """
@torch.no_grad()
def write(module, inputs):
    module[3].bias.{write}
if not hasattr(model, "writes"):
    model.writes = model.register_forward_pre_hook(write)
"""


@pytest.mark.slow
def test_reports_and_errors_name_the_rank(tmp_path, capfd):
    assert ends(tmp_path / "out", NAMES_A_RANK, code=1, stall_after=0.5) == []
    said = capfd.readouterr().err
    assert "  rank 0: 6 of 6 gradients have arrived\n  rank 1: 0 of 6 gradients" in said
    assert (
        "parameter 0.bias became requires_grad=False on rank 1 after the Reducer was made" in said
    )


@pytest.mark.slow
def test_forward_passes_that_write_are_compared(quiet, tmp_path, capfd):
    equally = WRITES.format(write="mul_(1)")
    assert ends(tmp_path / "out", equally + ONE_JOINS) == [quiet] * 3
    own = WRITES.format(write="add_(inputs[0].mean())")
    assert ends(tmp_path / "other", own, code=1) == []
    assert "average 1: parameter 3.bias is not the same on all ranks" in capfd.readouterr().err


def test_what_cannot_go_on_is_refused_and_an_attempt_is_one_step_of_one_optimizer():
    with ddp.process_group("gloo") as world:
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        reducer, without = ddp.Reducer(model, virtual_ranks=1), ddp.Reducer(other)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="no virtual ranks: make it with virtual_ranks=V"):
            ddp.elastic(world, without, optimizer)
        with pytest.raises(ddp.UsageError, match="needs gloo, and the backend is mpi"):
            ddp.elastic(replace(world, backend="mpi"), reducer, optimizer)
        with pytest.raises(TypeError, match="takes one optimizer"):
            ddp.elastic(world, reducer, optimizer, torch.optim.Adam(model.parameters()))
        ddp.wait(dist.all_reduce(torch.ones(1), async_op=True))
        with pytest.raises(ValueError, match="not a member of the process group"):
            ddp.wait(None)
        run = ddp.elastic(world, reducer, optimizer)
        for attempt in run.attempts(1):
            with attempt:
                optimizer.step()
                with pytest.raises(RuntimeError, match="steps twice in one attempt"):
                    optimizer.step()

        def two_steps():
            optimizer.step()
            optimizer.step()
            run.step += 2
            return "trained"

        assert (run.repeat(two_steps), run.step, run.generation) == ("trained", 3, 0)
        assert run.regrouping is None


def test_errors_of_a_lost_rank_are_told_from_others():
    by_gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    for lost in (ddp.CommunicationError("a rank of the group was lost"), RuntimeError(by_gloo)):
        assert ddp.is_communication_error(lost)
    for own in (RuntimeError("not enough memory"), ddp.UsageError("no such file")):
        assert not ddp.is_communication_error(own)
