"""Names and limits of process groups, for checks before torch is imported."""

BACKENDS = ("gloo", "nccl", "mpi")

# Seconds. The backends count in milliseconds and overflow far beyond.
MAX_TIMEOUT = 1e6
