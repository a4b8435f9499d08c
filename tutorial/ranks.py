"""Starts ranks: processes that all run one function and can send each other tensors.

results = start(function, 2, "an argument")  # function("an argument") on both ranks
"""

import os
import pickle
import re
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=15)  # how long a rank waits for another
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # needs no network


def start(function, nproc, *arguments):
    """Calls `function(*arguments)` on each rank; returns the results in order of rank.

    An exception on any rank ends all ranks, and ends the program with one line that names the rank.
    """
    # One server imports torch and forks all ranks, so they start quickly.
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__])
    processes, pipes, results = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(nproc):
                pipe, its_pipe = context.Pipe()
                place = rank, nproc, str(Path(folder) / "meeting-point")
                process = context.Process(target=_rank, args=(its_pipe, place, function, arguments))
                process.start()
                its_pipe.close()
                processes.append(process)
                pipes[pipe] = rank
            while len(results) < nproc:
                waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
                for pipe in connection.wait(waiting):
                    results[pipes[pipe]] = _receive(pipe, pipes[pipe])
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(nproc)]


def _receive(pipe, rank):
    try:
        error, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        error = "its process ended without a result"
    if error:
        sys.exit(f"rank {rank}: {error}")
    return result


def _rank(pipe, place, function, arguments):
    """Runs as one rank: joins the others, calls the function, sends its result to `start`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `start`, which ends all ranks
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)  # each rank uses one core, like one GPU
    rank, nproc, file = place
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=nproc, timeout=PATIENCE
        )
        answer = None, function(*arguments)
    except Exception as error:  # noqa: BLE001  # `start` shows it
        answer = _describe(error), None
    pipe.send_bytes(pickle.dumps(answer))
    with suppress(EOFError):
        pipe.recv_bytes()  # until `start` ends all: a rank that ends early would break others


def _describe(error):
    """The error in one line, with the program's last line that led to it."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if "torch" not in Path(line.filename).parts] or lines
    # A test that counts sends puts its own frame between the exercise and torch.
    own = [line for line in own if Path(line.filename).name == "exercise.py"] or own
    message = (str(error).strip().splitlines() or [""])[0]
    # gloo's messages for a rank that does not arrive or has ended; which one appears is a race.
    if re.search("Timed out waiting|Connection (closed|reset) by peer|Broken pipe", message):
        message = f"another rank did not answer ({PATIENCE.seconds} s at most)"
    where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
    return f"{type(error).__name__}: {message} ({where})"
