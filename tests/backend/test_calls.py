"""Ranks that call different collectives on gloo, and beside it in shared memory."""

import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_from_scratch import Reducer
from ddp_from_scratch.backend import call_watch
from ddp_from_scratch.backend.calls import AVERAGES, MONITORED, Position, find_mismatch
from ddp_from_scratch.common.errors import CommunicationError
from tests.support.failing_run import LAUNCHERS, Run
from tests.support.on_ranks import on
from tests.support.ranks import Crew

pytestmark = pytest.mark.program

FAULTS = Path(__file__).parents[2] / "docs/how-to/find-faults.md"
SAME = ": all ranks must call the same collectives in the same order"
SUM = "all_reduce of 3 x torch.float32"


# A mismatch may cut the connections of the default group, too: other tests have other ranks.
@pytest.fixture(scope="module")
def two():
    crew = Crew("gloo", 2)
    yield crew
    crew.end()


@pytest.fixture(scope="module")
def three():
    crew = Crew("gloo", 3)
    yield crew
    crew.end()


@contextmanager
def a_hasty_watch():
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in ("_LOOK_EVERY_S", 0.05), ("_STILL_S", 0.3), ("_SURE_S", 0.2):
            patch.setattr(call_watch, name, seconds)
        yield


@contextmanager
def raises_on_both(world, group, match, kind=RuntimeError):
    """Neither rank leaves before the other has raised: its group would end with the test."""
    with pytest.raises(kind, match=match):
        yield
    store, name = dist.distributed_c10d._get_default_store(), f"raised in {group.group_name}"
    store.set(f"{name} {world.rank}", "")
    store.wait([f"{name} 0", f"{name} 1"])


def a_step(group, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    reducer = Reducer(model, group, **options)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        return reducer

    return step


CALLS = {
    "broadcast": lambda group: dist.broadcast(torch.zeros(3), 1, group=group),
    "all_reduce": lambda group: dist.all_reduce(torch.zeros(3), group=group),
    "barrier": lambda group: dist.barrier(group),
    "all_gather_object": lambda group: dist.all_gather_object([None] * 2, "x", group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        torch.zeros(2), torch.zeros(4), group=group
    ),
    "monitored_barrier": lambda group: dist.monitored_barrier(group),
}


def alone(world, name):
    group = dist.new_group([0, 1])
    with a_hasty_watch():
        step = a_step(group)
        step()
        average = r"all_reduce\(AVG\) of 20 x torch.float32 for bucket 0 of Reducer \d+"
        text = rf"rank 0 is in {name}( of 3 x torch.float32)?.*rank 1 is in {average}"
        other = rf"rank 1 is in {average} while rank 0 is in {name}"
        if world.rank == 0:
            # The error of `monitored_barrier` is gloo's own, after a line on standard error.
            expected = "" if name == "monitored_barrier" else f"{text}|{other}"
            with raises_on_both(world, group, expected):
                CALLS[name](group)
        else:
            expected = f"failed: ({text}|{other}).*same order"
            with raises_on_both(world, group, expected, CommunicationError):
                step()


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_of_one_rank(name, two):
    two(alone, name)


@on("two")
def test_an_asynchronous_collective_that_only_one_rank_called(world):
    """The next average raises at once, whether the call has ended or not."""
    group = dist.new_group([0, 1])
    step = a_step(group)
    step()
    step()
    if world.rank == 0:
        dist.broadcast(torch.zeros(3), 0, group=group, async_op=True)
    text = (
        r"different numbers of .*gloo group: rank 0 1 \(broadcast of 3 x torch.float32\); rank 1 0"
    )
    with raises_on_both(world, group, text, CommunicationError):
        step()


@on("two")
def test_by_gloo_alone(world):
    group = dist.new_group([0, 1])
    with a_hasty_watch():
        step = a_step(group, shared_memory=False)
        step()
        if world.rank == 0:
            expected = r"barrier.* while .*all_reduce of 20|20.*bar"
            with raises_on_both(world, group, expected, CommunicationError):
                dist.barrier(group)
        else:
            with raises_on_both(world, group, ""):  # gloo's own, after a line on standard error
                step()


@on("two")
def test_a_collective_of_another_group(world):
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    with a_hasty_watch():
        step = a_step(group)
        step()
        if world.rank == 0:
            with raises_on_both(world, group, "is in barrier", CommunicationError):
                dist.barrier(other)
        else:
            with raises_on_both(world, group, "rank 0 is in barrier", CommunicationError):
                step()


@on("three")
def test_what_is_no_mismatch(world):
    group, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    with a_hasty_watch():
        step = a_step(group)
        step()
        published = call_watch._watched[group]._store
        for number in range(6):
            handle = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            if world.rank == 0:
                dist.send(torch.ones(1), dst=1, group=group)
                if number == 3:
                    published.wait(["1", "2"])  # they have waited in vain, and compare
            if world.rank == 1:
                dist.recv(torch.ones(1), src=0, group=group)
            if world.rank < 2:
                dist.all_reduce(torch.ones(1), group=pair)
            thread = threading.Thread(target=dist.barrier, args=(group,))
            thread.start()
            thread.join()
            step()
            handle.wait()
        assert step().iteration == 8


@on("three")
def test_a_collective_that_only_some_ranks_call_from_another_thread(world):
    """A comm hook's second one runs in the main thread, or in gloo's, which wakes the future."""
    group = dist.new_group([0, 1, 2])
    step = a_step(group)
    step()
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
    else:
        thread = threading.Thread(
            target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": group}
        )
        thread.start()
        thread.join()
    if world.rank == 0:  # rank 2 has made one call less, so the ranks compare
        dist.send(torch.ones(1), dst=1, group=group)
    if world.rank == 1:
        dist.recv(torch.ones(1), src=0, group=group)
    assert step().iteration == 2


@on("two")
def test_a_mismatch_of_a_destroyed_group_ends_nothing(world):
    """Something may still hold the group: an exception, or autograd."""
    group = dist.new_group([0, 1])
    a_step(group)()
    one = call_watch._watched[group]
    one._store.set("mismatch", "of a group that is gone")
    dist.destroy_process_group(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "_STILL_S", 0.0)
        for _ in range(3):
            call_watch._look(one)
    assert (one.found, group in call_watch._watched) == ("", False)


@on("two")
def test_a_call_while_the_position_is_read(world):
    """It is not published: the average would seem to come after a call of gloo's that follows."""
    group = dist.new_group([0, 1])
    step = a_step(group)
    step()
    read, published = Position.of, []

    def slow(*arguments):
        position = read(*arguments)
        published.append(position)
        for other in groups:
            dist.all_reduce(torch.ones(1), group=other)
        return position

    groups = [group, dist.new_group([0, 1])]
    one = call_watch._watched[group]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "_look", lambda _: None)  # the thread does not look meanwhile
        patch.setattr(Position, "of", slow)
        patch.setattr(call_watch, "_STILL_S", 0.0)
        one.look(group, None)  # notes progress
        one.look(group, None)
    assert len(published) == 1
    assert not one._published


def at(call="", waits_in="", **groups):
    """A position whose groups have these calls: `a=[3, "barrier"]`, the third was a barrier."""
    named = {name.replace("averages", AVERAGES): calls for name, calls in groups.items()}
    numbers = {name: calls[0] for name, calls in named.items()}
    return Position(waits_in, call, numbers, {name: calls[1:] for name, calls in named.items()})


A = AVERAGES + "a"
EARLIER = at(a=[4, SUM], averagesa=[7, ""])
AVERAGING = at("average", A, a=[4, SUM], averagesa=[8, "average"])


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (EARLIER, AVERAGING, ""),  # it is late
        (at(SUM, "a", a=[5, SUM, SUM], averagesa=[7, ""]), AVERAGING, f"rank 0 is in {SUM}"),
        (at(a=[5, SUM, SUM], averagesa=[7, ""]), AVERAGING, f"rank 0 has called {SUM}"),
        (at(a=[5, SUM, ""], averagesa=[7, ""]), AVERAGING, ""),  # another thread's call
        # Not the same group: independent, unless rank 0 waits there.
        (at(b=[1, SUM], **{"a": [4, SUM], "averagesa": [7, ""]}), AVERAGING, ""),
        (at(MONITORED, "a", a=[4, SUM]), AVERAGING, f"rank 0 is in {MONITORED}"),
        (at(a=[4, "barrier"]), at(a=[6, SUM, SUM, SUM]), "rank 0 has called barrier"),
        (at(a=[6, "barrier"]), at(a=[4, SUM]), ""),  # no call of one number is known of both
    ],
)
def test_positions(first, second, found):
    text = find_mismatch({0: first, 1: second})
    assert text.startswith(found)
    assert bool(text) == bool(found)
    assert not text or text.endswith(SAME)
    assert find_mismatch({0: first, 1: first}) == ""


def test_ranks_with_one_position_are_named_together():
    one = at(SUM, "a", a=[5, SUM, SUM], averagesa=[7, ""])
    text = find_mismatch({0: one, 1: AVERAGING, 2: AVERAGING, 3: EARLIER})
    assert text == f"rank 0 is in {SUM} while ranks 1, 2 are in average{SAME}"


EXITS = """
import sys, threading
import torch, ddp_from_scratch as ddp
with ddp.process_group("gloo", timeout=100.0) as world:
    model = torch.nn.Linear(2, 2)
    ddp.broadcast_parameters(model)
    reducer = ddp.Reducer(model)
    model(torch.ones(1, 2)).sum().backward()
    if world.rank == 1:
        threading.Thread(target=threading.Event().wait, args=(100,)).start()
        sys.exit(1)
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["start_ranks", "torchrun"])
def test_a_rank_that_exits_beside_a_thread_of_its_own(launcher, tmp_path):
    (tmp_path / "program.py").write_text(EXITS)
    with Run(*LAUNCHERS[launcher], str(tmp_path / "program.py")) as run:
        assert run.wait() == 1, run.text
        assert "rank 1 ended without reaching it" in run.text
        run.assert_nobody_left()


@pytest.mark.slow
def test_the_example_of_the_guide(tmp_path):
    section = FAULTS.read_text().partition("## A collective that not all ranks call")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    printed = re.search(r"^    (rank 0 is in .*)$", section, re.MULTILINE)[1]
    (tmp_path / "program.py").write_text(code)
    with Run(*LAUNCHERS["start_ranks"], str(tmp_path / "program.py")) as run:
        assert run.wait() == 1, run.text
        assert printed in run.text
