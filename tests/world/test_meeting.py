"""Ranks that compare their views of the job in a store. Threads stand for ranks."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddp_from_scratch import UsageError
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.world.meeting import Arrival, Meeting
from tests.support.failing_run import RUN_PY, Run
from tests.support.refusal import refusal

LONG = timedelta(seconds=15)


def pod(rank, size):
    """The place of a rank that knows RANK and WORLD_SIZE alone."""
    return Placement(rank, size, 0, 0, 0, "torchrun")


def view(place, backend="gloo", machine="here", **local):
    return Arrival(backend, place.world_size, machine, local, f"process {place}")


def met(places, views, before=lambda place: None):
    """The place or error that each rank gets."""
    store = dist.HashStore()

    def attend(place, own):
        meeting = Meeting(store, place, LONG)
        try:
            with meeting.telling_all():
                before(place)
                return meeting.attend(own)
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(attend, places, views))


def test_ranks_without_local_variables_find_those_on_their_machine():
    places = [pod(rank, 5) for rank in range(5)]
    views = [view(p, machine=m) for p, m in zip(places, "baabb", strict=True)]
    found = [(p.local_rank, p.local_world_size, p.node_rank) for p in met(places, views)]
    assert found == [(0, 3, 0), (0, 2, 1), (1, 2, 1), (1, 3, 0), (2, 3, 0)]


def test_a_launcher_that_tells_all_is_believed():
    # As a launcher places ranks in containers of one machine.
    places = [Placement(rank, 2, rank, 2, 0, "torchrun") for rank in range(2)]
    views = [view(p, machine=m) for p, m in zip(places, "ab", strict=True)]
    assert met(places, views) == places


def test_azureml_sets_local_rank_alone():
    places = [pod(rank, 2) for rank in range(2)]
    views = [view(p, LOCAL_RANK=p.rank) for p in places]
    assert [p.local_rank for p in met(places, views)] == [0, 1]
    views = [view(p, machine=f"{p.rank}", LOCAL_RANK=p.rank) for p in places]
    (told,) = set(met(places, views)[1:])
    assert told.startswith("rank 1 has LOCAL_RANK=1, but by the machines of all ranks it is 0: set")


def test_local_variables_on_some_ranks_alone_are_an_error_on_all():
    places = [pod(0, 2), Placement(1, 2, 1, 2, 0, "torchrun")]
    views = [view(places[0]), view(places[1], LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)]
    (told,) = set(met(places, views))
    assert told == (
        "rank 0 has neither LOCAL_RANK nor LOCAL_WORLD_SIZE and rank 1 has LOCAL_RANK and "
        "LOCAL_WORLD_SIZE: set LOCAL_RANK and LOCAL_WORLD_SIZE on all ranks, or on none"
    )


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_differ_in_world_size_all_say_so(sizes):
    places = [pod(rank, size) for rank, size in enumerate(sizes)]
    (told,) = set(met(places, [view(place) for place in places]))
    assert told.startswith(f"the world size is {sizes[0]} on rank 0 and {sizes[1]} on rank 1: WOR")


def test_two_processes_of_one_rank_are_an_error_on_all():
    places = [pod(0, 3), pod(1, 3), pod(1, 3)]
    views = [view(place) for place in places]
    views[2] = Arrival("gloo", 3, "here", {}, "another process")
    (told,) = set(met(places, views))
    assert told.startswith("two processes have RANK=1, or two jobs have one MASTER_ADDR and MASTER")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_reaches_those_that_wait_for_it(rank):
    def fail(place):
        if place.rank == rank:
            raise UsageError("GLOO_SOCKET_IFNAME has bond1")

    places = [pod(0, 2), pod(1, 2)]
    told = met(places, [view(place) for place in places], fail)
    assert told == ["GLOO_SOCKET_IFNAME has bond1"] * 2


def test_missing_ranks_and_another_backend_are_named():
    store, brief = dist.HashStore(), timedelta(seconds=0.1)
    places = [Placement(r, 3, r, 3, 0, "torchrun") for r in range(3)]

    def attend(rank, backend="gloo"):
        return Meeting(store, places[rank], brief).attend(view(places[rank], backend))

    told = refusal(attend, 1)
    assert told.startswith("rank 1 waited 0.1 s for all 3 ranks: not all have started; missing: [0")
    assert "missing: [2]" in refusal(attend, 0)
    assert "backend is gloo on rank 0 and nccl on rank 2: it must" in refusal(attend, 2, "nccl")
    for rank in range(2):
        assert attend(rank) == places[rank]


def test_waiting_for_a_rank_prints_nothing(capfd):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(store, pod(0, 2), timedelta(seconds=0.1))
    assert refusal(meeting.attend, view(pod(0, 2))).endswith("missing: [1]")
    assert capfd.readouterr() == ("", "")


# Processes with the variables that torch's env:// reads, as Kubeflow starts them:

TELLS = """
import torch
import torch.distributed as dist
import ddp_from_scratch as ddp
with ddp.process_group("gloo", timeout=100) as world:
    tensor = torch.tensor(world.rank + 1)
    dist.all_reduce(tensor)
    print(tensor.item(), world.local_rank, world.local_world_size)
"""


def run_pods(command, of_rank_1):
    """Runs two processes; returns of each its exit code, output and lines of errors."""
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(probe.port)
    del probe
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        pods = [{"RANK": "0"}, {"RANK": "1"} | of_rank_1]
        runs = [stack.enter_context(Run(*command, **both | own)) for own in pods]
        return [(run.wait(), run.out, run.err.splitlines()) for run in runs]


@pytest.mark.program
def test_processes_with_rank_and_world_size_alone():
    assert run_pods([sys.executable, "-c", TELLS], {}) == [(0, "3 0 2\n", []), (0, "3 1 2\n", [])]


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_rank_1", "told"),
    [
        ({"GLOO_SOCKET_IFNAME": "bond1"}, "GLOO_SOCKET_IFNAME has bond1, an interface that"),
        ({"WORLD_SIZE": "3"}, "the world size is 2 on rank 0 and 3 on rank 1: WORLD_SIZE must"),
    ],
)
def test_processes_that_differ_all_say_so_in_one_line(of_rank_1, told):
    command = [sys.executable, RUN_PY, "--epochs", "1", "--quiet"]
    for code, out, errors in run_pods(command, of_rank_1):
        assert (code, out, len(errors)) == (2, "", 1), errors
        assert errors[0].startswith(f"error: {told}")
