"""Passes the output of ranks on, in whole lines: with a prefix, to a file for each rank, or not.

    rank 0: stdout, stderr --pipes--> the agent's thread --lines--> the agent's stdout, stderr
    rank 1: stdout, stderr --'                                  `-> DIR/rank-0.log, DIR/rank-1.log

The pipes are named ones, since ranks are started by another process than the agent.
"""

import os
import re
import select
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_from_scratch.common.errors import UsageError, one_line
from ddp_from_scratch.launch.rank_process import say

OUTPUT = "DDP_OUTPUT"  # the variable that tells a forked rank its path

# The end of a line, or of one state of a progress bar. A last "\r" may be half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST = 2**16  # bytes of a line; a longer one is passed on in parts


class Target:
    """A file that takes whole lines, until it cannot be written to."""

    def __init__(self, file: int, name: str) -> None:
        self.file: int = file
        self._name, self._failed = name, False

    def write(self, text: bytes) -> None:
        try:
            while text and not self._failed:
                text = text[os.write(self.file, text) :]
        except OSError as error:
            self._failed = True
            say(
                f"warning: {self._name} cannot be written to ({error.strerror}): continuing without"
            )


@dataclass(eq=False)
class _Stream:
    prefix: bytes
    shown: Target | None
    log: Target | None
    rest: bytes = b""  # of a line that has not ended

    def take(self, text: bytes) -> None:
        text = self.rest + text
        end = 0
        for line_end in _END.finditer(text):
            begin, end = end, line_end.end()
            self._pass_on(text[begin:end])
        self.rest = text[end:]
        if len(self.rest) > _LONGEST:
            self._pass_on(self.rest)
            self.rest = b""

    def end(self) -> None:
        if self.rest:
            self._pass_on(self.rest + b"\n" * (self.rest[-1:] != b"\r"))
        self.rest = b""

    def _pass_on(self, line: bytes) -> None:
        if self.log is not None:
            self.log.write(line)
        if self.shown is not None:
            # A traceback may have a prefix already, from `run_to_exit` or from torch.
            known = (self.prefix, self.prefix.replace(b" ", b"", 1).replace(b"] ", b"]:"))
            self.shown.write(line if line.startswith(known) else self.prefix + line)


class Output:
    """The output of this machine's ranks. `close` writes what is left.

    Args:
        name: of a rank, as "rank {}".
        prefix: whether a line that is shown begins with the rank's name, as "[rank 2] ".
        shown: the ranks whose output is shown; None: all.
        folder: where each rank has a file with all of its output; existing files are appended to.

    Raises:
        UsageError: the folder cannot be written to.
    """

    def __init__(
        self, name: str, prefix: bool, shown: Collection[int] | None, folder: Path | None
    ) -> None:
        self._name, self._prefix, self._shown, self._logs = name, prefix, shown, folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise UsageError(
                    f"the output directory {folder} cannot be written to ({one_line(error)}): "
                    f"choose another one"
                ) from error
        self._pipes = tempfile.TemporaryDirectory(prefix="ddp-output-")
        self._targets = [Target(1, "standard output"), Target(2, "standard error")]
        self._streams: dict[int, _Stream] = {}  # by the pipe's file descriptor
        self._closed, self._wake = threading.Event(), os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake[0], select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="ddp-output", daemon=True)
        self._thread.start()

    def open(self, number: int) -> str:
        """Makes a rank's pipes; returns their path, to which 1 and 2 are added."""
        path, name = f"{self._pipes.name}/{number}.", self._name.format(number)
        log = None
        if self._logs is not None:
            file = self._logs / f"{name.replace(' ', '-')}.log"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            try:
                log = Target(os.open(file, flags, 0o666), str(file))
            except OSError as error:
                raise UsageError(f"{file} cannot be written to ({one_line(error)})") from error
        is_shown = self._shown is None or number in self._shown
        for stream, target in enumerate(self._targets, 1):
            os.mkfifo(f"{path}{stream}", 0o600)
            # Open for writing, too, or it would end whenever no process of the rank has it open.
            pipe = os.open(f"{path}{stream}", os.O_RDWR | os.O_NONBLOCK)
            prefix = f"[{name}] ".encode() if self._prefix else b""
            self._streams[pipe] = _Stream(prefix, target if is_shown else None, log)
            self._poll.register(pipe, select.POLLIN)
        os.write(self._wake[1], b".")  # the thread polls the new pipes, too
        return path

    def close(self) -> None:
        """Passes on what ended ranks have written, the last unfinished lines too. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            os.write(self._wake[1], b".")
            self._thread.join(5.0)  # a terminal may be stopped (Ctrl-S)
            self._pipes.cleanup()

    def _run(self) -> None:
        while not self._closed.is_set():
            for file, _ in self._poll.poll():
                if file == self._wake[0]:
                    os.read(file, 4096)
                else:
                    self._read(file)
        for file, stream in self._streams.items():
            while self._read(file):
                pass
            stream.end()
        for file in {*self._streams, *(s.log.file for s in self._streams.values() if s.log)}:
            os.close(file)

    def _read(self, file: int) -> bool:
        with suppress(BlockingIOError):
            text = os.read(file, 2**16)
            self._streams[file].take(text)
            return bool(text)
        return False


def connect(path: str) -> None:
    """Connects this process's standard output and error to pipes of `Output.open`."""
    for stream in (1, 2):
        pipe = os.open(f"{path}{stream}", os.O_WRONLY)
        os.dup2(pipe, stream)
        os.close(pipe)
