"""torch's tools on the mpi backend: flight recorder, its analyser, groups with a second backend."""

import socket
import subprocess
import sys

import pytest
import torch

from ddp_from_scratch import UsageError
from ddp_from_scratch.mpi import flight_recorder
from ddp_from_scratch.mpi.torch_backend import IS_OFFERED
from tests.support.ranks import ROOT, mpirun
from tests.support.tiers import slow

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


def run(program, ranks=2, **environment):
    result = mpirun(ranks, START + program, **environment)
    assert result.returncode == 0, result.stderr


def analysis(folder):
    analyser = "torch.distributed.flight_recorder.fr_trace"
    result = subprocess.run(
        [sys.executable, "-m", analyser, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@recorded
@pytest.mark.slow
def test_the_analyser_names_the_rank_that_did_not_come(tmp_path):
    """By its rank in the world, in a group that counts from 0."""
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
    run(program, ranks=3, TORCH_FR_BUFFER_SIZE="100")
    said = analysis(tmp_path)
    assert said.count("missing ranks") == 1
    assert "collective: mpi:all_reduce\nmissing ranks: {2}" in said
    assert "the_step_that_waits at" in said


@recorded
def test_the_debug_server_has_stuck_ranks_write_their_files(tmp_path):
    """As in docs/how-to/find-faults.md; a rank that does not answer cannot write its own."""
    pytest.importorskip("tabulate")
    pytest.importorskip("jinja2")
    page = (ROOT / "docs" / "how-to" / "find-faults.md").read_text()
    excerpt = page.split("## With torch's own tools")[1].split("```\n")[1]
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0)), other.bind(("", 0))
        port, meeting = one.getsockname()[1], other.getsockname()[1]
    excerpt = excerpt.replace("29500", str(meeting)).replace("server()", f"server(port={port})")
    program = f"""
import pathlib, pickle, time, urllib.request
import torch
from mpi4py import MPI
{excerpt}
dist.init_process_group("mpi")
dist.all_reduce(torch.ones(3))
if here.rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)

def fetch(path):
    while True:
        try:
            return urllib.request.urlopen(f"http://localhost:{port}/{{path}}").read().decode()
        except OSError:
            time.sleep(0.05)  # the server is starting

MPI.COMM_WORLD.Barrier()
if here.rank == 0:
    assert "<td>{{1}}" in fetch("fr_trace?backend=mpi").replace(" ", "")
    fetch("fr_dump_file?backend=mpi")
MPI.COMM_WORLD.Barrier()
while True:  # written by a thread of its own
    try:
        pickle.loads(pathlib.Path(f"{tmp_path}/rank_{{here.rank}}").read_bytes())
        break
    except (OSError, EOFError, pickle.UnpicklingError):
        time.sleep(0.05)
MPI.COMM_WORLD.Barrier()
if here.rank == 1:
    work = dist.all_reduce(torch.ones(3), async_op=True)
work.wait()
dist.destroy_process_group()
"""
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    result = mpirun(2, program, TORCH_FR_BUFFER_SIZE="100", **dumps)
    assert result.returncode == 0, result.stderr
    assert "missing ranks: {1}" in analysis(tmp_path)


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
    for wrong in (torch.ones(2, device="meta"), torch.ones(2).to_sparse()):
        try:
            dist.all_reduce(wrong)
        except RuntimeError as error:
            assert "on the mpi backend needs dense tensors on a CPU" in str(error)
        else:
            raise AssertionError(wrong)
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except RuntimeError as error:
        assert "the ranks called different operations" in str(error)
    dist.destroy_process_group()
    """
    run(program, TORCH_FR_BUFFER_SIZE="100")


@recorded
def test_a_group_that_is_closed_leaves_no_recorder():
    program = """
    from ddp_from_scratch.mpi.flight_recorder import FlightRecorder
    dist.init_process_group("mpi")
    for _ in range(2):
        part = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=part)
        dist.destroy_process_group(part)
        del part
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, FlightRecorder)]
    dist.destroy_process_group()
    """
    run(program, TORCH_FR_BUFFER_SIZE="100")


@recorded
def test_nothing_is_recorded_where_no_size_is_given():
    run("""
    dist.init_process_group("mpi")
    assert type(dist.group.WORLD) is mpi.ProcessGroupMPI
    dist.all_reduce(torch.ones(3))
    assert entries() == []
    dist.destroy_process_group()
    """)


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
    assert flight_recorder.is_on() == on
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    told = "TORCH_FR_BUFFER_SIZE must be a number of entries, got 'many'"
    with pytest.raises(UsageError, match=told):
        flight_recorder.is_on()


@pytest.mark.skipif(not IS_OFFERED, reason="torch takes no backends in Python")
@pytest.mark.parametrize("debug", [slow("OFF"), "DETAIL"])
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
    dist.barrier()
    dist.monitored_barrier()
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1]
    received = torch.empty(1)
    messages = (dist.isend, tensor[:1]), (dist.irecv, received)
    for work in dist.batch_isend_irecv([dist.P2POp(*each, 1 - rank) for each in messages]):
        work.wait()
    assert received == 4
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
    run(program, TORCH_DISTRIBUTED_DEBUG=debug)
