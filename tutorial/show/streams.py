"""Prints and draws chapter 18: the timelines of both streams, way by way."""

from tutorial import pictures


def show(found, path):
    """Shows `{way: (host, compute stream, NCCL's stream, reads complete sums)}`."""
    print(f"{'':<15} step ends  computing  host waits  reads complete sums")
    panels = {}
    for name, (host, compute, nccl, complete) in found.items():
        computing = sum(end - begin for _, begin, end in compute.ran)
        waited = sum(end - begin for begin, end in host.waits)
        print(f"{name:<15} {compute.end:9.2f} {computing:10.2f} {waited:11.2f}  {complete}")
        panels[name] = {
            "host": [("wait", *span) for span in host.waits],
            "computes": compute.ran,
            "NCCL": nccl.ran,
        }
    pictures.timelines(path, panels)
