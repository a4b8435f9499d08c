"""Computes the timeline of a step on a GPU with two streams: what waits for what. Needs no GPU.

python -m tutorial.18_streams.streams
"""

from tutorial.options import read_options
from tutorial.show.streams import show

LAYERS = 4


class Host:
    """The thread that runs the program. It queues operations, and continues at once."""

    def __init__(self, queue):
        self.queue, self.now, self.waits = queue, 0.0, []

    def synchronize(self, stream):
        """Waits until the stream has nothing left to do, as `tensor.item()` does."""
        self.waits.append((self.now, max(self.now, stream.end)))
        self.now = self.waits[-1][1]


class Stream:
    """A queue of the GPU: its operations run in order, each as soon as the one before has ended."""

    def __init__(self, host):
        self.host, self.end, self.ran = host, 0.0, []

    def run(self, what, ms):
        """Queues an operation that takes so many ms."""
        self.host.now += self.host.queue
        begin = max(self.end, self.host.now)
        self.end = begin + ms
        self.ran.append((what, begin, self.end))

    def record(self):
        """Returns an event, which is complete when all operations queued so far have ended."""
        return self.end

    def wait(self, event):
        """Lets all that is queued from now on begin after an event. The host does not wait."""
        self.end = max(self.end, event)


def launch(compute, nccl, ms):
    """Queues an all-reduce of what is computed so far; returns the event of its end."""
    nccl.wait(compute.record())
    nccl.run("in flight", ms)
    return nccl.record()


def after_backward(host, compute, nccl, backward, send):
    """Launches all sums when backward is queued, as the naive loop does."""
    for _ in range(LAYERS):
        compute.run("backward", backward)
    return [launch(compute, nccl, send) for _ in range(LAYERS)]


def overlap(host, compute, nccl, backward, send):
    """Launches each sum in its hook, and waits at the end: `handle.wait()`."""
    sums = []
    for _ in range(LAYERS):
        compute.run("backward", backward)
        sums.append(launch(compute, nccl, send))
    return sums


def future_at_once(host, compute, nccl, backward, send):
    """As `overlap`, but asks for a future at each launch, which lets the current stream wait."""
    sums = []
    for _ in range(LAYERS):
        compute.run("backward", backward)
        sums.append(launch(compute, nccl, send))
        compute.wait(sums[-1])
    return sums


def host_waits(host, compute, nccl, backward, send):
    """As `overlap`, but looks at a number of each sum: the host waits, and queues nothing."""
    sums = []
    for _ in range(LAYERS):
        compute.run("backward", backward)
        sums.append(launch(compute, nccl, send))
        host.synchronize(nccl)
    return sums


def no_wait(host, compute, nccl, backward, send):
    """As `overlap`, but forgets the wait: it returns no event."""
    overlap(host, compute, nccl, backward, send)
    return []


def run(way, queue, backward, send):
    """Returns the host, both streams, and whether the update read complete sums."""
    host = Host(queue)
    compute, nccl = Stream(host), Stream(host)
    for event in way(host, compute, nccl, backward, send):
        compute.wait(event)
    compute.run("update", 1.0)
    return host, compute, nccl, compute.ran[-1][1] >= nccl.end


def main():
    """Shows the timeline of each way."""
    options = read_options(
        __doc__,
        queue=(0.01, "ms that the host takes to queue an operation"),
        backward=(3.0, "ms of a layer's backward"),
        send=(2.0, "ms of a layer's all-reduce"),
    )
    ways = after_backward, overlap, future_at_once, host_waits, no_wait
    given = options.queue, options.backward, options.send
    show({way.__name__: run(way, *given) for way in ways}, options.picture)


if __name__ == "__main__":
    main()
