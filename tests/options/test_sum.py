"""`reduce="sum"`: nothing divides. The table of programs trains with it; here sums are exact."""

import ddp_from_scratch as ddp
from tests.support.on_ranks import on
from tests.support.terms import Terms, as_large

ODD = (7.0, 11.0, 15.0)  # 1/3 of each is rounded, and three times that would be rounded again


@on("gloo-3")
def test_sums_of_three_ranks_are_exact(world):
    ways = {}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0, "overlap": False}
    for options in (*ways, {"shared_memory": False}):
        with as_large():
            model = Terms(3, 5)
            reducer = ddp.Reducer(model, reduce="sum", **options)
            reducer.register_comm_hook(None, ddp.comm_hooks.average)  # as without
            for number in range(3):
                model.zero_grad()
                if number == 2:
                    reducer.weight(world.rank)  # 0, 1 and 2: the sum of amounts x gradients
                model(ODD[world.rank]).backward()
                total = 41 if number == 2 else 33
                assert model.p0.grad.tolist() == [total] * 3
                assert model.p1.grad.tolist() == [2 * total] * 5
            assert 'reduce="sum"' in str(reducer)
            reducer.remove()
