"""Cores are divided along sockets and NUMA nodes, on machines that are files; and real ranks."""

import os
import subprocess
import sys
from itertools import product
from unittest.mock import Mock

import pytest
import torch

from ddp_from_scratch import environment_without_rank, start_mpirun, start_ranks
from ddp_from_scratch.launch.agent import Agent
from ddp_from_scratch.launch.cores import (
    Core,
    advice,
    as_text,
    divide,
    numbers,
    own_cpus,
    read,
    share,
    variables,
)
from ddp_from_scratch.launch.environment import Placement
from ddp_from_scratch.world import threads as rank_threads
from tests.support.refusal import refusal
from tests.support.tiers import slow

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="ranks are bound on Linux alone"
)


def machine(root, sockets=1, nodes=1, cores=8, smt=1, offline=(), quota="", controllers=""):
    """Writes the files of a machine; counts are of a socket's nodes, a node's cores, a core's CPUs.

    As on most machines, the second CPUs of all cores come after the first ones. Returns all CPUs.
    """
    total, system = sockets * nodes * cores, root / "sys/devices/system"

    def write(name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")

    places = product(range(sockets), range(nodes), range(cores))
    of_node = {}
    for number, (socket, node, _) in enumerate(places):
        siblings = [number + total * thread for thread in range(smt)]
        of_node.setdefault(socket * nodes + node, []).extend(siblings)
        for cpu in {*siblings} - {*offline}:
            topology = system / f"cpu/cpu{cpu}/topology"
            write(topology / "physical_package_id", socket)
            write(topology / "thread_siblings_list", as_text({*siblings} - {*offline}))
    for node, cpus in of_node.items():
        write(system / f"node/node{node}/cpulist", as_text({*cpus} - {*offline}))
    there = {*range(total * smt)} - {*offline}
    write(system / "cpu/online", as_text(there))
    write("proc/self/cgroup", f"0:{controllers}:/job/step")
    if controllers:
        us = [str(round(float(quota) * 50_000)), "50000"] if quota else ["-1", "50000"]
        for name, text in zip(("quota", "period"), us, strict=True):
            write(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us", text)  # as a container sees its own
    else:
        write("sys/fs/cgroup/job/step/cpu.max", "max 100000")
        limit = round(float(quota) * 100_000) if quota else "max"
        write("sys/fs/cgroup/job/cpu.max", f"{limit} 100000")
    return there


# By machine and number of ranks: threads, what is bound, and the line that says so.
PLANS = {
    "one socket": (
        {"cores": 16},
        {
            1: (16, [], ""),
            2: (8, ["0-7", "8-15"], "2 ranks x 8 cores"),
            3: (5, ["0-4", "5-9", "10-14"], "3 ranks x 5 cores"),
            16: (1, [str(cpu) for cpu in range(16)], ""),
            17: (1, [], ""),
        },
    ),
    "two sockets": (
        {"sockets": 2, "cores": 16},
        {
            2: (16, ["0-15", "16-31"], "2 ranks x 16 cores, a rank for each socket"),
            4: (
                *(8, ["0-7", "8-15", "16-23", "24-31"]),
                "4 ranks x 8 cores, a rank for each half of sockets 0 and 1",
            ),
            3: (10, ["0-9", "10-19", "20-29"], "3 ranks x 10 cores"),  # one in both sockets
        },
    ),
    "two sockets of two NUMA nodes": (
        {"sockets": 2, "nodes": 2, "cores": 4},
        {
            2: (8, ["0-7", "8-15"], "2 ranks x 8 cores, a rank for each socket"),
            4: (
                *(4, ["0-3", "4-7", "8-11", "12-15"]),
                "4 ranks x 4 cores, a rank for each NUMA node",
            ),
            8: (
                *(2, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"]),
                "8 ranks x 2 cores, a rank for each half of NUMA nodes 0, 1, 2 and 3",
            ),
            5: (3, ["0-2", "3-5", "6-8", "9-11", "12-14"], "5 ranks x 3 cores"),
            # Spread over the nodes, not one behind the other.
            9: (1, ["0", "1", "2", "4", "5", "8", "9", "12", "13"], ""),
        },
    ),
    "two CPUs for each core": (
        {"sockets": 2, "cores": 4, "smt": 2},
        {
            2: (4, ["0-3,8-11", "4-7,12-15"], "2 ranks x 4 cores, a rank for each socket"),
            8: (1, ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"], ""),
            16: (1, [], ""),  # a core for each rank, not a CPU
        },
    ),
    "cores that are switched off": (
        {"cores": 8, "offline": (0, 1, 6)},
        {2: (2, ["2-3", "4-5"], "2 ranks x 2 cores")},
    ),
    "a cgroup's quota": (
        {"cores": 8, "quota": "2.5"},
        {1: (2, [], ""), 2: (1, [], ""), 3: (1, [], "")},
    ),
    "a quota of version 1": (
        {"cores": 8, "quota": "4.5", "controllers": "cpu,cpuacct"},
        {2: (2, [], "2 ranks x 2 threads, by a cgroup's quota of 4.5 CPUs"), 8: (1, [], "")},
    ),
    "one core": ({"cores": 1}, {1: (1, [], ""), 2: (1, [], "")}),
}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_get_neighbouring_cores_and_as_many_threads(name, tmp_path):
    of_machine, expected = PLANS[name]
    cores = read(machine(tmp_path, **of_machine), tmp_path)
    for ranks, (threads, cpus, text) in expected.items():
        plan = divide(cores, ranks)
        assert (plan.threads, plan.cpus, plan.text) == (threads, cpus, text) or (
            not cpus and (plan.threads, [*plan.cpus], plan.text) == (threads, [], text)
        )
        unbound = divide(cores, ranks, "none")
        assert (unbound.threads, [*unbound.cpus], unbound.text) == (threads, [], "")


def test_a_mask_with_holes_is_what_ranks_share(tmp_path):
    machine(tmp_path, sockets=2, cores=8)
    mask = {1, 2, 3, 5, 8, 9, 10, 14}
    plan = divide(read(mask, tmp_path), 2)
    assert plan.cpus == ["1-3,5", "8-10,14"]
    assert plan.workers == "1,2,3,5,8,9,10,14"
    # Not only the one that is left: a data loader of each rank would have it.
    assert divide(read(mask | {15}, tmp_path), 2).workers == "1,2,3,5,8,9,10,14,15"
    assert divide(read(mask, tmp_path), 3).cpus == ["1-2", "3,5", "8-9"]


def test_ranks_of_a_socket_may_have_all_of_it(tmp_path):
    cores = read(machine(tmp_path, sockets=2, cores=4), tmp_path)
    plan = divide(cores, 4, "socket")
    assert (plan.threads, plan.cpus) == (2, ["0-3", "0-3", "4-7", "4-7"])
    assert divide(cores, 4, "cores") == divide(cores, 4)
    assert (
        divide(cores, 8, "cores").text
        == "8 ranks x 1 core, a rank for each quarter of sockets 0 and 1"
    )


def test_what_cannot_be_bound_is_refused(tmp_path):
    cores = read(machine(tmp_path, cores=2), tmp_path)
    assert refusal(divide, cores, 3, "cores") == (
        "bind='cores' needs a core for each rank, got 3 ranks and 2 cores: use auto"
    )
    cores = read(machine(tmp_path / "2", cores=4, quota="2"), tmp_path / "2")
    assert "2 ranks and a cgroup's quota of 2 CPUs" in refusal(divide, cores, 2, "socket")
    assert refusal(divide, cores, 2, "core").startswith("bind must be one of auto, none, cores")


def test_a_system_that_says_nothing_has_a_core_for_each_cpu(tmp_path):
    cores = read({0, 1}, tmp_path)
    assert cores.cores == [Core((0,), 0, 0), Core((1,), 0, 0)]
    assert divide(cores, 2).cpus == ["0", "1"]


def test_lists_of_cpus_are_read_and_written():
    assert numbers("0-2,8\n") == [0, 1, 2, 8]
    assert as_text([8, 2, 1, 0]) == "0-2,8"
    assert (numbers(""), as_text([])) == ([], "")


def test_threads_follow_the_masks_of_the_ranks(tmp_path):
    cores = read(machine(tmp_path, sockets=2, cores=8, smt=2), tmp_path)
    for masks, threads in (
        (["0-7,16-23", "8-15,24-31"], 8),  # a socket each
        (["0-31"] * 4, 4),  # all of them for all
        (["0-31"] * 3, 5),
        (["0-7,16-23"] * 2 + ["8-15,24-31"] * 2, 4),  # two on a socket
        (["0,16", "1,17"], 1),  # a core each
        (["0", "16"], 1),  # half a core each
        (["0-31"] * 20, 1),
        (["0-31"], 16),
    ):
        assert share(masks, cores) == threads, masks
    cores = read(machine(tmp_path / "2", cores=8, quota="2.5"), tmp_path / "2")
    assert (share(["0-7"], cores), share(["0-7"] * 2, cores)) == (2, 1)


OMP = "set OMP_NUM_THREADS={}, or pass threads='auto' to process_group"


def test_what_a_launcher_leaves_idle_or_crowded_is_one_line(tmp_path):
    cores = read(machine(tmp_path, cores=16, smt=2), tmp_path)
    everything, a_core = ["0-31"] * 2, read({0, 1, 16, 17}, tmp_path)
    for *given, text in (
        (
            *("torchrun", everything, 1, cores, 16),
            f"each of the 2 ranks here computes with 1 thread for 8 cores: {OMP.format(8)}",
        ),
        (
            *("srun", everything, 16, cores, 16),
            f"each of the 2 ranks here computes with 16 threads for 8 cores: {OMP.format(8)}",
        ),
        (
            *("mpirun", ["0,16", "1,17"], 1, a_core, 16),
            "mpirun gives each of the 2 ranks here 1 core of 16: start with mpirun --map-by "
            "socket:PE=8",
        ),
        (
            *("srun", ["0,16", "1,17"], 1, a_core, 16),
            "srun gives each of the 2 ranks here 1 core of 16: start with srun --cpus-per-task=16",
        ),
        (
            *("mpirun", ["0,16"], 1, read({0, 16}, tmp_path), 16),
            "mpirun gives this rank 1 core of 16: start with mpirun --map-by socket:PE=16",
        ),
        # mpirun has no map for a rank in two sockets.
        (
            *("mpirun", ["0,16"], 1, read({0, 16}, tmp_path), 16, 2),
            "mpirun gives this rank 1 core of 16: start with mpirun --bind-to none -x "
            "OMP_NUM_THREADS=16",
        ),
        (
            *("mpirun", ["0,16", "1,17"], 1, a_core, 16, 2),
            "mpirun gives each of the 2 ranks here 1 core of 16: start with mpirun --map-by "
            "socket:PE=8",
        ),
        # Nothing is lost, or too little.
        ("mpirun", ["0,16", "1,17"], 1, a_core, 2, ""),
        ("torchrun", everything, 8, cores, 16, ""),
        ("torchrun", everything, 5, cores, 16, ""),
        ("torchrun", ["0-31"] * 16, 1, cores, 16, ""),
        ("torchrun", ["0-31"] * 40, 1, cores, 16, ""),
    ):
        assert advice(*given) == text


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (None, "1 thread for 8 cores"),
        ("auto", "1 thread for 8 cores"),
        (1, ""),
        (8, ""),
        (9, "9 threads for 8 cores"),
    ],
)
def test_few_threads_are_no_mistake_if_the_program_chose_them(tmp_path, monkeypatch, chosen, told):
    found = read(machine(tmp_path, cores=8), tmp_path)
    monkeypatch.delenv("DDP_STARTED_HERE", raising=False)
    monkeypatch.setattr(rank_threads, "_masks", lambda place: ("0-7",))
    monkeypatch.setattr(rank_threads, "_cores_of", lambda masks: found)
    now = chosen if isinstance(chosen, int) else 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: now)
    monkeypatch.setattr(rank_threads, "logger", said := Mock())
    rank_threads.note_lost_cores(Placement(0, 1, 0, 1, 0, "torchrun"), chosen)
    assert said.warning.called == bool(told)
    assert told in str(said.warning.call_args)


def test_a_number_of_threads_that_the_user_has_set_counts(tmp_path):
    plan = divide(read(machine(tmp_path, cores=8), tmp_path), 2)
    own = {"DDP_THREADS": "4", "DDP_WORKER_CPUS": "0,1,2,3,4,5,6,7"}
    of_ranks = own | {"OMP_NUM_THREADS": "4", "DDP_OMP_SET": "4"}
    assert variables(plan, "auto", {}) == of_ranks
    for users in "3", "4":
        assert variables(plan, "auto", {"OMP_NUM_THREADS": users}) == own
        in_a_rank = {"PATH": "x"} | own | {"OMP_NUM_THREADS": users}
        left = {"PATH": "x", "OMP_NUM_THREADS": users}
        assert environment_without_rank(in_a_rank) == left
    assert environment_without_rank({"PATH": "x"} | of_ranks) == {"PATH": "x"}
    # In a rank, which has the number of its own job.
    assert variables(plan, "auto", {"OMP_NUM_THREADS": "8", "DDP_OMP_SET": "8"}) == of_ranks
    assert variables(divide(read({0, 1}, tmp_path), 2, "none"), "none", {}) == {"DDP_THREADS": "1"}


def test_a_process_that_replaces_a_lost_one_gets_its_cores(monkeypatch):
    agent = Agent([], lambda member: {}, [], cpus=["0-1", "2-3", "4-5"])
    alive = []
    monkeypatch.setattr(agent, "_running", lambda: alive)
    for member, cpus in (0, "0-1"), (1, "2-3"), (2, "4-5"):
        assert agent._cpus_for(member) == cpus
        alive.append(member)
    alive.remove(1)
    assert agent._cpus_for(3) == "2-3"
    alive.append(3)
    assert agent._cpus_for(4) == ""


# On one core with two CPUs, or with a quota of one CPU, no rank is bound.
two_are_bound = pytest.mark.skipif(not divide(read(own_cpus()), 2).cpus, reason="one core")

TELL = """
import os, pathlib, sys, torch
rank, cpus = os.environ["RANK"], sorted(os.sched_getaffinity(0))
pathlib.Path(sys.argv[1], rank).write_text(f"{cpus} {torch.get_num_threads()}")
"""


@pytest.mark.program
@two_are_bound
@pytest.mark.parametrize(("bind", "how"), [("auto", []), slow("none", []), slow("auto", ["env"])])
def test_ranks_are_bound_forked_and_executed(bind, how, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = [*how, sys.executable, "-c", TELL, str(tmp_path)]
    assert start_ranks(command, [2], bind=bind) == 0
    told = [(tmp_path / rank).read_text() for rank in "01"]
    if bind == "none":
        assert [text.rpartition(" ")[0] for text in told] == [str(sorted(own_cpus()))] * 2
    else:
        plan = divide(read(own_cpus()), 2)
        assert told == [f"{numbers(cpus)} {plan.threads}" for cpus in plan.cpus]


ON_MPI = """
import os, sys
import torch
import ddp_from_scratch as ddp
with ddp.process_group("mpi") as world:
    text = f"{sorted(os.sched_getaffinity(0))} {torch.get_num_threads()} {world.cpus}"
    open(f"{sys.argv[1]}/{world.rank}", "w").write(text)
"""


@pytest.mark.slow
@two_are_bound
def test_ranks_of_a_mpirun_that_is_started_here_are_bound(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks in (1, 2):
        command = [sys.executable, "-c", ON_MPI, str(tmp_path)]
        assert start_mpirun(ranks, command) == 0
        plan = divide(read(own_cpus()), ranks)
        cpus = plan.cpus or [as_text(own_cpus())]
        assert [(tmp_path / str(rank)).read_text() for rank in range(ranks)] == [
            f"{numbers(own)} {plan.threads} {(*cpus,)}" for own in cpus
        ]


# A rank is bound to its own core, and its data loader has those of all.
DATA = """
import os
from torch.utils.data import Dataset
class Where(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return len(os.sched_getaffinity(0)), index
"""
LOADS = """
import os, pathlib, sys
import ddp_from_scratch as ddp
from ddp_from_scratch.training.datasets import make_loader
from ddp_from_scratch.training.settings import Settings
from where_it_is import Where
if __name__ == "__main__":
    with ddp.process_group("gloo") as world:
        loader = make_loader(Where(), Settings(workers=1), world, train=False)
        found = {count.item() for counts, _ in loader for count in counts}
        text = f"{len(os.sched_getaffinity(0))} {found}"
        pathlib.Path(sys.argv[1], str(world.rank)).write_text(text)
"""


@pytest.mark.slow
@two_are_bound
def test_data_loaders_have_all_cores(tmp_path):
    (tmp_path / "where_it_is.py").write_text(DATA)
    (program := tmp_path / "program.py").write_text(LOADS)
    assert start_ranks([sys.executable, str(program), str(tmp_path)], [2]) == 0
    own = len(numbers(divide(read(own_cpus()), 2).cpus[0]))
    all_cores = len(own_cpus())
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"{own} {{{all_cores}}}"] * 2


NOTED = """
import ddp_from_scratch as ddp
with ddp.process_group("gloo", threads={}):
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(len(read(own_cpus()).cores) < 2, reason="one core")
@pytest.mark.parametrize(("threads", "count"), [(100, 1), ("'auto'", 0), (1, 0)])
def test_a_launcher_that_crowds_cores_is_told_once_for_each_machine(threads, count):
    ranks = len(read(own_cpus()).cores)
    command = ["torchrun", "--no-python", "--nproc-per-node", str(ranks), sys.executable]
    done = subprocess.run(
        [*command, "-c", NOTED.format(threads)], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("set OMP_NUM_THREADS=1, or pass threads='auto'") == count
