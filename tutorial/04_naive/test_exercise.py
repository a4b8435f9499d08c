import pytest
import torch
import torch.distributed as dist


def models(exercise):
    torch.manual_seed(dist.get_rank())  # different parameters on each rank
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(8, 3))  # and different running means
    before = [tensor.clone() for tensor in model.state_dict().values()]
    exercise.broadcast_model(model)
    return before, model.state_dict()


def test_broadcast_model(on_ranks):
    (rank_0, _), *_ = results = on_ranks(3, models)
    for rank, (before, after) in enumerate(results):
        assert rank == 0 or not before[0].equal(rank_0[0])
        for (name, tensor), expected in zip(after.items(), rank_0, strict=True):
            assert tensor.equal(expected), f"rank {rank} has another {name} than rank 0 had"


def mean_square(y):
    return y.square().mean()


def train(exercise):
    rank, nproc = dist.get_rank(), dist.get_world_size()
    model, optimizer = small_model()
    for batch in torch.randn(3, 6, 3):
        exercise.train_step(model, optimizer, mean_square, batch.chunk(nproc)[rank])
    return [parameter.detach() for parameter in model.parameters()]


def train_alone():
    """The training of one process, without the exercise: its mistakes are not in here."""
    model, optimizer = small_model()
    for batch in torch.randn(3, 6, 3):
        optimizer.zero_grad()
        mean_square(model(batch)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def small_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def test_train_step(on_ranks):
    alone = train_alone()
    for parameters in on_ranks(2, train):
        for parameter, expected in zip(parameters, alone, strict=True):
            if not torch.allclose(parameter, expected, atol=1e-6):
                pytest.fail("not the steps of one process: are gradients means, and not sums?")
