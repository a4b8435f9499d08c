"""Where a thread of a program is, told from another thread."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_from_scratch.common.whereabouts import sources, whereabouts
from ddp_from_scratch.watch import place

HERE = Path(__file__).name


def place_in(function, end):
    """Where a thread is that has called this function, once that ends so."""
    waits, go = threading.Event(), threading.Event()

    def run():
        function(waits, go)

    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(10)
    while not (found := place.place_of(thread.ident)).endswith(end):
        pass  # until pytest's limit
    go.set()
    thread.join()
    assert place.place_of(thread.ident) == ""
    return found


def wait(waits, go):
    waits.set()
    go.wait()  # here


def test_the_line_of_the_program_and_what_it_has_called():
    source = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if text.endswith("  # here"))
    program, _, called = place_in(wait, "(wait)").partition(", in ")
    assert program.endswith(f"{HERE}:{line}: go.wait()  # here")
    assert called.startswith("threading.py:")


def test_what_the_program_has_called_of_this_package_is_named_before_others():
    source = "def inside(waits, go):\n    waits.set()\n    go.wait()\n"
    scope = {}
    path = Path(place.__file__).with_name("anything.py")
    exec(compile(source, str(path), "exec"), scope)
    end = ", in ddp_from_scratch/watch/anything.py:3 (inside)"
    program = place_in(lambda waits, go: scope["inside"](waits, go), end).removesuffix(end)
    assert f"{HERE}:" in program


def test_a_thread_without_a_line_of_the_programs(monkeypatch):
    monkeypatch.setattr(place, "_is_library", lambda frame: True)
    assert place_in(wait, "(wait)").startswith("threading.py:")


# As a finalizer does that waits for a thread to end, which is how a Reducer ends its watch.
COLLECTS_WHILE_LOOKING = """
import _thread, gc, threading
from ddp_from_scratch.watch.place import place_of

def collected(phase, info):
    if phase == "start":
        _thread.start_new_thread(int, ())

gc.callbacks.append(collected)
gc.set_threshold(5)
kept = []
for i in range(300):
    kept += [place_of(threading.get_ident()), []]
print(gc.isenabled())
gc.disable()
place_of(threading.get_ident())
print(gc.isenabled())
"""


@pytest.mark.program
def test_a_garbage_collection_meanwhile_does_not_deadlock_the_process():
    command = [sys.executable, "-c", COLLECTS_WHILE_LOOKING]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ran.stdout.split(), ran.stderr) == (["True", "False"], "")


# The main thread returns from its functions and calls others as soon as the other thread, which
# walks the main thread's stack, collects garbage.
RUNS_ON_WHILE_LOOKING = """
import gc, sys, threading
from ddp_from_scratch.common.frames import stack_of

waits, go, has_moved, end = [threading.Event() for _ in range(4)]

def narrow(depth):
    if depth:
        return narrow(depth - 1)
    waits.set()
    go.wait()

def wide(depth):
    a = b = c = d = e = f = g = h = i = j = k = l = m = depth
    if depth:
        return wide(depth - 1)
    has_moved.set()
    end.wait(5)

def collected(phase, info):
    if threading.get_ident() != main:
        inside = sys._getframe(1)
        if inside.f_code.co_name == "stack_of" and inside.f_locals.get("frames"):
            go.set()
            has_moved.wait()

def look():
    waits.wait()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    names = [frame.f_code.co_name for frame in stack_of(main)]
    gc.set_threshold(0)
    go.set()
    end.set()
    print(names.count("narrow"))

main = threading.get_ident()
looker = threading.Thread(target=look, daemon=True)
looker.start()
narrow(20)
wide(20)
looker.join()
"""


@pytest.mark.program
def test_a_garbage_collection_meanwhile_does_not_lose_frames_that_end():
    command = [sys.executable, "-c", RUNS_ON_WHILE_LOOKING]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ran.stdout.split(), ran.stderr) == (["21"], "")


def test_an_error_does_not_wait_for_a_store_that_does_not_answer():
    """As the store of a rank that is stopped."""

    class Blocked:
        def __init__(self):
            self.asked = threading.Event()
            self.answers = threading.Event()

        def whereabouts(self, rank, waited):
            self.asked.set()
            self.answers.wait()
            return "is nowhere"

    source = Blocked()
    sources.add(source)
    try:
        assert whereabouts([1], 3.0) == ""
        assert source.asked.is_set()
        source.answers.set()
        assert whereabouts([1, 2], 3.0) == "; rank 1 is nowhere; rank 2 is nowhere"
    finally:
        source.answers.set()
        sources.discard(source)
