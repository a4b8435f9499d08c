"""Shards the model: a rank keeps its part of each layer, and gathers a layer while it is used.

python -m tutorial.21_shard_it.shard_it
"""

from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tutorial.options import read_options
from tutorial.ranks import start
from tutorial.show.shard_it import show

WIDTH, LAYERS, BATCH, STEPS, RATE = 512, 8, 64, 8, 1e-3


class Layer:
    """A layer whose parameters are divided: this rank's shard stays, the whole comes and goes.

    shard of rank 0   | w w w w w w |     all-gather ->   | w w w w w w | w w w b b 0 |
    shard of rank 1   | w w w b b 0 |     (0 fills up)      the whole, while it is used
    """

    def __init__(self, module):
        rank, nproc = dist.get_rank(), dist.get_world_size()
        self.parameters = list(module.parameters())
        flat = torch.nn.utils.parameters_to_vector(self.parameters).detach()
        dist.broadcast(flat, src=0)
        self.whole = torch.nn.functional.pad(flat, (0, -len(flat) % nproc))
        self.shard = torch.nn.Parameter(self.whole.chunk(nproc)[rank].clone())
        views = self.whole[: len(flat)].split([p.numel() for p in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view_as(parameter)
        self.nbytes, self.missing = self.whole.nbytes, len(self.parameters)
        self.handle, self.gradients = None, None
        self.free()

    def free(self):
        """Gives the memory of the whole parameters back; the tensors stay, empty."""
        self.whole.untyped_storage().resize_(0)

    def gather(self):
        """Begins to fetch the other ranks' shards, unless they are here or on their way."""
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.nbytes)
            shard = self.shard.detach()
            self.handle = dist.all_gather_into_tensor(self.whole, shard, async_op=True)

    def wait(self):
        """Returns when the whole parameters are here."""
        self.gather()
        if self.handle:
            self.handle.wait()
            self.handle = None

    def flatten(self):
        """Copies the gradients into one flat tensor."""
        pad = torch.zeros(self.whole.numel() - sum(p.numel() for p in self.parameters))
        self.gradients = torch.cat([p.grad.flatten() for p in self.parameters] + [pad])

    def reduce(self):
        """Begins to sum the gradients: each rank gets its shard of the sum."""
        for parameter in self.parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        self.handle = dist.reduce_scatter_tensor(self.shard.grad, self.gradients, async_op=True)

    def finish(self):
        """Waits for the sum, frees the whole gradients, and is ready for a new step."""
        self.handle.wait()
        self.shard.grad /= dist.get_world_size()
        self.missing, self.handle, self.gradients = len(self.parameters), None, None


class ShardedModel:
    """Gathers each layer before its forward and before its backward, and the next one meanwhile."""

    def __init__(self, modules, prefetch=True):
        self.modules, self.layers = modules, [Layer(module) for module in modules]
        self.prefetch, self.sending = prefetch, None  # sending: whose gradients are on their way
        self.most = 0  # bytes of whole parameters and whole gradients at one time
        for layer in self.layers:
            for parameter in layer.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, x=layer: self.on_ready(x))

    def fetch(self, place, following):
        """Waits for a layer; the next one that will be used is fetched while this one computes."""
        self.layers[place].wait()
        if self.prefetch and 0 <= following < len(self.layers):
            self.layers[following].gather()
        self.note()

    def forward(self, x):
        """Computes the output, layer by layer."""
        for place, module in enumerate(self.modules):
            self.fetch(place, place + 1)
            x = torch.relu(module(x))
            # Backward begins with the last layer: it stays. In evaluation there is no backward.
            if place + 1 < len(self.layers) or not x.requires_grad:
                self.layers[place].free()
            if x.requires_grad:
                x.register_hook(lambda _, place=place: self.fetch(place, place - 1))
        return x

    def on_ready(self, layer):
        """When a layer's last gradient is there: frees the parameters, and sends the gradients."""
        layer.missing -= 1
        if not layer.missing:
            self.note()
            layer.free()
            self.finish()
            layer.flatten()
            self.note()
            layer.reduce()
            self.sending = layer

    def finish(self):
        """Waits for the gradients that are on their way, of one layer at most."""
        if self.sending:
            self.sending.finish()
            self.sending = None

    def note(self):
        """Notes how many bytes of whole parameters and whole gradients there are now, if most."""
        whole = [layer.whole.untyped_storage().nbytes() for layer in self.layers]
        gradients = [g for x in self.layers for g in (x.gradients, *(p.grad for p in x.parameters))]
        self.most = max(self.most, sum(whole) + sum(g.nbytes for g in gradients if g is not None))


def make_modules():
    """Returns the layers of chapter 1's model, the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def train(forward, finish, parameters):
    """Takes steps of Adam; returns the time of each."""
    adam, times = torch.optim.Adam(parameters, lr=RATE), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH, generator=generator)
        dist.barrier()
        begin = perf_counter()
        (forward(x) - 1).square().mean().backward()
        finish()
        adam.step()
        adam.zero_grad()
        times.append(1000 * (perf_counter() - begin))
    state = sum(s.nbytes for of_one in adam.state.values() for s in of_one.values())
    return times, state


def run(prefetch):
    """Trains sharded, and with torch's `fully_shard`; returns times, bytes, and whether equal."""
    ours = ShardedModel(make_modules(), prefetch)
    shards = [layer.shard for layer in ours.layers]
    times, state = train(ours.forward, ours.finish, shards)
    parts = sum(shard.nbytes for shard in shards)
    held = {"shards": parts, "their gradients": parts, "state": state, "whole": ours.most}

    theirs = torch.nn.Sequential(*(torch.nn.Sequential(m, torch.nn.ReLU()) for m in make_modules()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*theirs, theirs]:
        fully_shard(part, mesh=mesh)
    of_torch, _ = train(theirs, lambda: None, theirs.parameters())
    same = True
    for layer, part in zip(ours.layers, theirs, strict=True):
        layer.wait()
        whole = [p.full_tensor().flatten() for p in part.parameters()]
        same &= torch.cat(whole).equal(layer.whole[: sum(map(len, whole))])
    return times, of_torch, held, same


def main():
    """Starts the ranks, and shows what each holds beside what it would hold undivided."""
    options = read_options(__doc__, nproc=2, prefetch=(["yes", "no"], "gather a layer early"))
    results = start(run, options.nproc, options.prefetch == "yes")
    show(results, LAYERS * (WIDTH + 1) * WIDTH, options.picture)


if __name__ == "__main__":
    main()
