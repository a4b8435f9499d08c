"""This machine's processes and processor, as /proc shows them."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process that is not mistaken for a later one with the same number.

    As text: PID:START:NAMESPACE, where START and NAMESPACE are empty without /proc.
    """

    pid: int
    start: str  # clock ticks from the machine's start to that of the process
    namespace: str  # of process numbers: containers have their own

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Identifies the process that has this number here."""
        fields = stat_fields(pid)
        return cls(pid, fields[19] if fields else "", _namespace())

    @classmethod
    def parse(cls, text: str) -> "Process | None":
        """Reads such a text; None if it is not one."""
        pid, *rest = text.split(":", 2)
        if not pid.isdecimal() or len(rest) != 2:
            return None
        return cls(int(pid), *rest)

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @property
    def is_visible(self) -> bool:
        """False if its number means another process here, since it belongs to a container."""
        return self.namespace == _namespace()

    def is_alive(self) -> bool:
        """False once the process has ended. Only for one that is visible."""
        if fields := stat_fields(self.pid):
            return fields[19] == self.start and fields[0] not in "ZX"  # ended, not yet waited for
        if stat_fields(os.getpid()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def is_stopped(self) -> bool:
        """True while SIGSTOP or a debugger holds it. Only for one that is visible."""
        fields = stat_fields(self.pid)
        return bool(fields) and fields[19] == self.start and fields[0] in "Tt"


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third, the state, on; [] if it has ended."""
    try:
        # The second field, the name, is in parentheses and may contain any character.
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def processor_name() -> str:
    """Returns the name of this machine's processor; its architecture where the system has none."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*\S)", info.read_text() if info.exists() else "")
    return model[1] if model else platform.machine()
