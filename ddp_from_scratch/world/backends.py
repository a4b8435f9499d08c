"""Names and limits of process groups, for what checks them before torch is imported."""

BACKENDS = ("gloo", "nccl", "mpi")
MAX_TIMEOUT = 1e6  # seconds; the backends count in milliseconds and overflow far beyond
