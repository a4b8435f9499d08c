"""torch's tools on the mpi backend: flight recorder, its analyser, groups with a second backend."""

import subprocess
import sys

import pytest
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.mpi import IS_OFFERED, recorder_is_on
from tests.support.failing_run import mpirun

recorded = pytest.mark.skipif(
    torch.__version__ < "2.15",
    reason=f"torch {torch.__version__} has a flight recorder for gloo and nccl alone",
)

START = """
    import gc, json, torch, torch.distributed as dist
    import ddp_from_scratch.mpi as mpi
    from torch._C import _distributed_c10d as c10d

    def entries():
        noted = json.loads(c10d._dump_fr_trace_json(backend="mpi")).get("entries", [])
        return [(entry["profiling_name"], entry["process_group"][0]) for entry in noted]
"""


@recorded
@pytest.mark.slow
def test_the_analyser_names_the_rank_that_did_not_come(tmp_path):
    program = f"""
    dist.init_process_group("mpi")
    rank, tensor = dist.get_rank(), torch.ones(3)
    dist.all_reduce(tensor)
    pair = dist.new_group([1, 2])

    def the_step_that_waits():
        return dist.all_reduce(tensor, group=pair, async_op=True)

    if rank == 1:
        work = the_step_that_waits()
    with open(f"{tmp_path}/rank_{{rank}}", "wb") as file:
        file.write(c10d._dump_fr_trace(backend="mpi"))
    if rank == 2:
        work = the_step_that_waits()
    if rank > 0:
        work.wait()
    dist.destroy_process_group()
    """
    mpirun(3, START + program, TORCH_FR_BUFFER_SIZE="100")
    analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    result = subprocess.run(analyser, capture_output=True, text=True, timeout=60)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert said.count("missing ranks") == 1
    assert "collective: mpi:all_reduce\nmissing ranks: {2}" in said
    assert "the_step_that_waits at" in said


@recorded
def test_a_recorded_group_does_what_others_do():
    """The same handles, errors and results; one entry a call, under the group's name."""
    program = """
    dist.init_process_group("mpi")
    rank, other, tensor = dist.get_rank(), 1 - dist.get_rank(), torch.ones(3)
    c10d._reset_fr_trace(backend="mpi")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success() and work.result()[0] is tensor
    dist.all_gather_into_tensor(torch.empty(6), tensor)
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(6))
    if rank == 0:
        assert dist.recv(tensor) == 1  # from any rank
    else:
        dist.send(tensor, 0)
    names = ["all_reduce", "_all_gather_base", "_reduce_scatter_base"]
    names.append("recv 0<-?" if rank == 0 else "send 1->0")
    assert entries() == [(f"mpi:{name}", "0") for name in names], entries()
    alone, _ = dist.new_subgroups(group_size=1)
    part = dist.split_group(split_ranks=[[1, 0]])
    c10d._reset_fr_trace(backend="mpi")
    for group in (alone, part):
        dist.all_reduce(tensor, group=group)
    assert entries() == [("mpi:all_reduce", g.group_name) for g in (alone, part)], entries()
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except RuntimeError as error:
        assert "the ranks called different operations" in str(error)
    dist.destroy_process_group()
    """
    mpirun(2, START + program, TORCH_FR_BUFFER_SIZE="100")


@recorded
@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"TORCH_FR_BUFFER_SIZE": "100"}, True),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}, True),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}, False),
    ],
)
def test_the_recorder_is_on_where_torch_is_given_a_size(monkeypatch, environment, on):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert recorder_is_on() == on
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    told = "TORCH_FR_BUFFER_SIZE must be a number of entries, got 'many'"
    with pytest.raises(UsageError, match=told):
        recorder_is_on()


@pytest.mark.skipif(not IS_OFFERED, reason="torch takes no backends in Python")
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.slow
def test_a_group_with_another_backend_for_gpus(debug):
    """gloo stands for nccl here, which needs GPUs. torch's own checks of DETAIL see ours."""
    program = f"""
    dist.init_process_group("cpu:mpi,cuda:gloo", init_method="mpi://")
    gc.collect()
    rank, tensor, gathered = dist.get_rank(), torch.ones(3), [None, None]
    assert {{device.type for device in dist.group.WORLD._device_types}} == {{"cpu", "cuda"}}
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor[0] == 4
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1]
    both = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=both)
    assert tensor[0] == 8
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except RuntimeError as error:
        expected = "called different operations" if {debug!r} == "OFF" else "Detected mismatch"
        assert expected in str(error)
    else:
        raise AssertionError
    dist.destroy_process_group()
    """
    mpirun(2, START + program, TORCH_DISTRIBUTED_DEBUG=debug)
