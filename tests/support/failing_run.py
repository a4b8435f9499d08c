"""Commands as a user would start them.

with Run(sys.executable, "run.py", "--epochs", "1") as run:
    assert run.wait() == 0, run.text
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.support.ranks import MPIRUN, ROOT

RUN_PY = str(ROOT / "run.py")
LIMIT_S = 60.0  # what "did not hang" means here; a run takes about 8 s on an idle machine

# Without a number of threads, torchrun warns that it sets it.
MACHINE = MPIRUN | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

START_RANKS = (
    "import sys; from ddp_from_scratch import start_ranks; sys.exit(start_ranks(sys.argv[1:], [2]))"
)
# What stands before a program; run.py starts its ranks itself.
LAUNCHERS = {
    "none": [sys.executable],
    "start_ranks": [sys.executable, "-c", START_RANKS, sys.executable],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
}


class Run:
    """A command and every process that it starts, told apart by a mark in their environment."""

    def __init__(self, *command: str, **environ: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="run-")
        self._mark = f"DDP_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | MACHINE | {name: value} | environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                # Tests that run in the background have been told to ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode()

    @property
    def err(self) -> str:
        # Without the line about ranks and cores, which there is on machines with many.
        text = self._err.read_bytes().decode()
        return re.sub(r"^\d+ ranks x \d+ (cores|threads).*\n", "", text, flags=re.MULTILINE)

    @property
    def text(self) -> str:
        return f"{self.out}\n--- standard error:\n{self.err}"

    def wait(self, limit: float = LIMIT_S) -> int:
        """Its exit code, 128 + N after signal N."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {limit:g} s:\n{self.text}") from None
        return 128 - code if code < 0 else code

    def wait_for(self, text: str, limit: float = LIMIT_S) -> None:
        end = time.monotonic() + limit
        while True:
            ended = self.process.poll() is not None
            if text in self.text:
                return
            assert not ended, f"ended without printing {text!r}:\n{self.text}"
            assert time.monotonic() < end, f"did not print {text!r}:\n{self.text}"
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def processes(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = line
            except OSError:
                continue  # gone meanwhile, or not ours
        return found

    def assert_nobody_left(self, limit: float = 15.0) -> None:
        end = time.monotonic() + limit
        while left := self.processes():
            assert time.monotonic() < end, f"still running: {left}\n{self.text}"
            time.sleep(0.1)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self._folder.cleanup()
