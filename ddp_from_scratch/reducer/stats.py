"""Settings and buckets of a Reducer at one moment, for logs and `repr`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReducerStats:
    """Settings and buckets of a `Reducer`.

    Attributes:
        bucket_bytes: size of each bucket, in the order of launch.
        bucket_cap_bytes: size at which a bucket is closed, the largest of its caps.
        parameters, parameter_bytes: number of parameters, and their size together.
        iteration: number of averages so far.
        rebuilt: True if the buckets are in the order in which gradients became ready.
        overlap, gradient_as_bucket_view, find_unused_parameters, static_graph: settings.
        comm_hook: its name.
        transport: "shared memory" if a machine's ranks reduce there, else the backend's name.
    """

    bucket_bytes: tuple[int, ...]
    bucket_cap_bytes: int
    parameters: int
    parameter_bytes: int
    iteration: int
    rebuilt: bool
    overlap: bool
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    comm_hook: str
    transport: str

    def __str__(self) -> str:
        sizes = [size / 2**20 for size in self.bucket_bytes]
        shown = ", ".join(f"{size:.3g}" for size in sizes[:8])
        noun = "bucket" if len(sizes) == 1 else "buckets"
        more = ", ..." if len(sizes) > 8 else ""
        on = [
            name
            for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
            if getattr(self, name)
        ]
        settings = [f"overlap={self.overlap}", f"comm_hook={self.comm_hook}", *on]
        settings.append(f"by {self.transport}")
        return (
            f"{self.parameters} parameters in {len(sizes)} {noun} of {shown}{more} MiB, "
            f"{', '.join(settings)}"
        )
