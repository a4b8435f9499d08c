from importlib import import_module
from math import inf

import pytest
import torch
import torch.distributed as dist

buckets = import_module("tutorial.07_buckets.buckets")


def agreed(exercise):
    return exercise.agree([[2, 0, 1], [0, 1, 2], [1, 2, 0]][dist.get_rank()])


def test_agree(on_ranks):
    for rank, order in enumerate(on_ranks(3, agreed)):
        assert isinstance(order, list), "a list of numbers, as was given"
        assert order == [2, 0, 1], f"rank {rank} returns another order than rank 0 has"


class Crossed(torch.nn.Module):
    """A model that does not use its layers in the order in which it has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(4))

    def forward(self, x):
        for number in (2, 0, 3, 1):
            x = self.layers[number](x).tanh()
        return x


class Watched(buckets.DataParallel):
    """Begins with one bucket, as torch's class does, and records the order of readiness."""

    def __init__(self, model):
        super().__init__(model, inf)
        self.parameters, self.order = list(model.parameters()), []
        self.buckets = buckets.assign(self.parameters, inf)
        self.bucket_of = dict.fromkeys(self.parameters, self.buckets[0])

    def on_ready(self, parameter):
        self.order += [n for n, other in enumerate(self.parameters) if other is parameter]
        super().on_ready(parameter)


def train(model, call, after_step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x = torch.randn(16, 40)
        optimizer.zero_grad()
        call(x).square().sum().backward()
        after_step(step)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def beside_torch(exercise, cap):
    model = Crossed()
    parallel = Watched(model)

    def after_step(step):
        for number, bucket in enumerate(parallel.buckets):
            said = f"bucket {number} was not launched: has each parameter its `bucket_of`?"
            assert bucket.handle, said
        parallel.finish()
        if step == 0:
            order = exercise.agree(parallel.order)
            exercise.rebuild(parallel, parallel.parameters, order, cap)

    ours = train(model, model, after_step)
    model = Crossed()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
    theirs = train(model, wrapped, lambda step: None)
    sizes = [4 * bucket.flat.numel() for bucket in parallel.buckets]
    wanted = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return sizes, [int(size) for size in wanted.split(",")], (ours - theirs).abs().max().item()


@pytest.mark.parametrize("cap", [1, 10_000, 1_000_000])
def test_rebuild_gives_the_bits_of_torchs_class(on_ranks, cap):
    for sizes, wanted, difference in on_ranks(3, beside_torch, cap):
        said = f"bytes of the buckets {sizes}, of those of torch's class {wanted}"
        if sorted(sizes) == sorted(wanted):
            said += ": do parameters lie in the order of being ready?"
        assert sizes == wanted, said
        said = "right sizes, other bits: do parameters lie in the order of being ready?"
        assert difference == 0, said
