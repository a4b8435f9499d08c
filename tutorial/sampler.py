"""Watches a program: the line of its main thread, and torch's record of its collectives."""

import pickle
import sys
import threading
import traceback
from time import perf_counter

import torch


class Sampler(threading.Thread):
    """Records two hundred times per second which line of `file` the main thread runs."""

    def __init__(self, file):
        super().__init__(daemon=True)
        self.file, self.begin, self.seen = file, perf_counter(), []
        self.ended = threading.Event()

    def seconds(self):
        """Returns the time since it was made."""
        return perf_counter() - self.begin

    def run(self):
        """Samples until `ended` is set."""
        while not self.ended.wait(0.005):
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            own = [frame for frame in stack if frame.filename == self.file and frame.name != "run"]
            if own:
                self.seen.append((self.seconds(), own[-1]))

    def at(self, moment):
        """Returns the main thread's line at a moment; None if the program had ended."""
        later = [frame for time, frame in self.seen if time >= moment]
        return f"{later[0].name}, line {later[0].lineno}: {later[0].line}" if later else None

    def spans(self):
        """Yields times of computing and of waiting in collectives, in ms, for the picture."""
        for (begin, frame), (end, _) in zip(self.seen, self.seen[1:], strict=False):
            waits = "dist." in frame.line or "backward" in frame.line
            yield "wait" if waits else "computing", 1000 * begin, 1000 * end


def recorded():
    """Returns what torch's flight recorder has recorded on this rank."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
    calls = [entry for entry in entries if entry["profiling_name"] == "gloo:all_reduce"]
    return f"{len(calls)} calls of all_reduce, sizes {calls[-1]['input_sizes']}" if calls else ""
