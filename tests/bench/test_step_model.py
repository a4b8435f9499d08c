"""The model of a step: by hand, against its JavaScript, and against what the library allocates."""

import json
import random
import re
from dataclasses import asdict
from itertools import chain, product

import pytest
import torch

import ddp_from_scratch as ddp
from ddp_from_scratch.bench import step_model, what_if
from ddp_from_scratch.bench.__main__ import main, parse
from ddp_from_scratch.bench.contenders import OPTIMIZERS
from ddp_from_scratch.bench.step_model import Gradient, Layers, Setting, memory, predict
from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.core.layout import bucket_caps
from tests.support.on_ranks import on

MB = 10**6


def layers(core_gbs=0.0):
    """Forward 10 ms, backward 20, optimizer 5; the two gradients take 10 ms of a wire each."""
    both = (Gradient(10 * MB, 8.0), Gradient(10 * MB, 20.0))
    return Layers("two", 10.0, 20.0, 5.0, both, copy_gbs=10.0, core_gbs=core_gbs)


def setting(**changed):
    # 8 Gbit/s are 1 MB/ms; of two ranks, each sends a bucket once.
    values = {"caps": (0,), "ranks": 2, "latency_us": 0.0, "gbit": 8.0, "cores": 1.0}
    return Setting(**(values | {"overlap": True} | changed))


@pytest.fixture
def _free_calls(monkeypatch):
    monkeypatch.setattr(step_model, "CALL_MS", 0.0)


def kinds(step):
    return [(bar.kind, bar.bucket, round(bar.begin, 6), round(bar.end, 6)) for bar in step.bars]


@pytest.mark.usefixtures("_free_calls")
def test_a_bucket_is_sent_while_backward_continues():
    step = predict(layers(), setting())
    assert kinds(step) == [
        ("forward", -1, 0, 10),
        ("backward", -1, 10, 18),
        ("pack, unpack", 0, 18, 19),
        ("in flight", 0, 19, 29),
        ("backward", -1, 19, 31),
        ("pack, unpack", 1, 31, 32),
        ("backward", -1, 32, 32),
        ("in flight", 1, 32, 42),
        ("exposed wait", -1, 32, 42),
        ("optimizer", -1, 42, 47),
    ]
    assert (step.exposed, step.total) == pytest.approx((10, 47))


@pytest.mark.usefixtures("_free_calls")
@pytest.mark.parametrize(
    ("changed", "exposed", "total"),
    [
        ({"ranks": 1}, 0, 35),
        ({"overlap": False}, 19, 56),  # the second copy is hidden
        ({"caps": (2**62,)}, 20, 57),
        ({"ranks": 4}, 15 + 2, 54),  # 1.5 times the bytes: 15 ms each
        ({"latency_us": 1000.0}, 12, 49),  # two messages
        ({"gbit": 80.0}, 1, 38),
        ({"cores": 0.5}, 10, 84),  # forward, backward, copies and the step take twice as long
        ({"cores": 2.0}, 10, 47),
    ],
)
def test_a_step_with_another_setting(changed, exposed, total):
    step = predict(layers(), setting(**changed))
    assert (step.exposed, step.total) == pytest.approx((exposed, total))


@pytest.mark.usefixtures("_free_calls")
def test_sending_competes_for_a_core():
    # Sending takes a whole core: 10 ms of it beside backward, and both at half the speed.
    step = predict(layers(core_gbs=1.0), setting())
    assert (step.exposed, step.total) == pytest.approx((10, 57))
    assert predict(layers(core_gbs=1.0), setting(cores=2.0)).total == pytest.approx(47)


# The page ---------------------------------------------------------------------------------------


def drawn(rng):
    """A random model and setting, as plain values."""
    ready, gradients = 0.0, []
    for _ in range(rng.randint(1, 30)):
        ready += rng.choice([0.0, rng.random()])
        gradients.append((4 * rng.randint(1, rng.choice([100, 10**6])), ready))
    rest = [10 * rng.random() for _ in range(3)]
    forward, backward, optimizer = rest[0], ready * rng.choice([0.9, 1.1]), rest[1]
    core_gbs = rng.choice([0.0, 2.0])
    model = Layers("m", forward, backward, optimizer, gradients, 1 + rest[2], core_gbs)
    caps = bucket_caps(rng.choice([None, 0, 0.01, 1, float("inf")]))
    asked = Setting(
        caps,
        rng.choice([1, 2, 3, 8, 64]),
        rng.choice([0.0, 50.0, 1000 * rng.random()]),
        rng.choice([0.1, 1.0, 100.0]),
        rng.choice([0.3, 1.0, 1.5, 4.0]),
        rng.random() < 0.7,
    )
    return model, asked


def script(page, name):
    (text,) = re.findall(f'<script id="{name}"[^>]*>(.*?)</script>', page, re.DOTALL)
    return text


def test_the_page_computes_the_same():
    quickjs = pytest.importorskip("quickjs")
    page = what_if.as_html([layers()])
    data = script(page, "data")
    assert json.loads(data)["CALL_MS"] == step_model.CALL_MS
    context = quickjs.Context()
    context.eval(f"const data = {data};\n{script(page, 'functions')}")
    rng = random.Random(0)
    for _ in range(300):
        model, asked = drawn(rng)
        model = Layers(**asdict(model) | {"gradients": [Gradient(*g) for g in model.gradients]})
        arguments = f"{json.dumps(asdict(model))}, {json.dumps(asdict(asked))}"
        found = json.loads(context.eval(f"JSON.stringify(predict({arguments}, data))"))
        step = predict(model, asked)
        assert found["total"] == pytest.approx(step.total)
        assert found["exposed"] == pytest.approx(step.exposed)
        assert [bar[:2] for bar in found["bars"]] == [list(bar[:2]) for bar in step.bars]
        ends = [bar[2:] for bar in found["bars"]]
        assert list(chain(*ends)) == pytest.approx(list(chain(*(bar[2:] for bar in step.bars))))
        chosen = rng.choice(["", "none", "node", "world"]), rng.randint(0, 2), rng.random() < 0.5
        listed = json.dumps([asked.caps, asked.ranks, *chosen])[1:-1]
        arguments = f"{json.dumps(asdict(model))}, {listed}, data"
        theirs = json.loads(context.eval(f"JSON.stringify(memoryOf({arguments}))"))
        assert theirs == pytest.approx(memory(model, asked.caps, asked.ranks, *chosen))


def test_the_page_needs_nothing_else():
    page = what_if.as_html([layers()])
    assert "{{" not in page
    assert not re.search(
        r"(src|href)=\"(?!data:)|@import|url\(|fetch\(|https?://(?!www\.w3\.org)", page
    )
    assert len(page) < 60_000


def test_recorded_gradients_are_in_ready_order():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    workload = what_if.Workload(
        "two layers", lambda: model, lambda: torch.ones(2, 3), lambda net, batch: net(batch).sum()
    )
    before = torch.get_num_threads()
    found = what_if.record(
        workload, torch.device("cpu"), OPTIMIZERS["sgd"], steps=2, threads=before
    )
    assert sorted(g.nbytes for g in found.gradients[:2]) == [20, 80]
    assert [g.ready for g in found.gradients] == sorted(g.ready for g in found.gradients)
    assert 0 < found.gradients[0].ready <= found.gradients[-1].ready
    assert found.core_gbs == what_if.CORE_GBS


def test_the_program_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    page = tmp_path / "step.html"
    assert (
        main(["--model", "small", "--backend", "gloo", "--rounds", "2", "--what-if", str(page)])
        == 0
    )
    assert capsys.readouterr().out == f"{page}: open it in a browser\n"
    (model,) = json.loads(script(page.read_text(), "data"))["models"]
    assert model["name"] == "MLP, 0.5 MB, batch 16"
    assert len(model["gradients"]) == 4
    for wrong in ("--nproc 2", "--layouts", "--seconds 1", "--way kept", "--results elsewhere"):
        with pytest.raises(UsageError, match=f"leave {wrong.split()[0]} out"):
            parse(["--what-if", str(page), *wrong.split()], "bench")
    with pytest.raises(UsageError, match="must name a file in an existing folder"):
        parse(["--what-if", str(tmp_path / "none" / "step.html")], "bench")


# Memory -----------------------------------------------------------------------------------------


def allocated(tensors):
    """Returns the bytes of the memory of these tensors, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


@pytest.mark.usefixtures("alone")
def test_memory_of_one_rank_is_what_the_library_allocates():
    for shard, kind in product(("", "none", "node", "world"), ("sgd", "momentum", "adam")):
        check_memory(1, 0, shard, kind)


@on("gloo-2")
def test_memory_is_what_the_library_allocates(world):
    for shard, kind in product(("", "none", "node", "world"), ("sgd", "momentum", "adam")):
        check_memory(2, world.rank, shard, kind)


def check_memory(ranks, rank, shard, kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 101), torch.nn.Linear(101, 300)])
    views = shard == "" and kind != "adam"
    reducer = ddp.Reducer(model, bucket_cap_mb=0.1, gradient_as_bucket_view=views)
    states = {"sgd": 0, "momentum": 1, "adam": 2}[kind]
    settings = {"lr": 0.1} | ({"momentum": 0.9} if kind == "momentum" else {})
    of = torch.optim if shard == "" else ddp
    make = of.AdamW if kind == "adam" else of.SGD
    own = {"reducer": reducer, "shard": shard} if shard else {}
    optimizer = make(model.parameters(), **settings, **own)
    for _ in range(3):  # the buckets are laid out again after the first
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    names = chain(*reducer.buckets)
    gradients = [Gradient(model.get_parameter(name).nbytes, 0.0) for name in names]
    described = Layers("", 0.0, 0.0, 0.0, gradients, 1.0, 1.0)
    expected = memory(described, bucket_caps(0.1), ranks, shard, states, views)
    parameters = list(model.parameters())
    state = list(chain(*(values.values() for values in optimizer.state.values())))
    flats = [bucket.flat for bucket in reducer.core.flat_buckets]
    outside = [] if ranks > 1 and (views or shard) else [p.grad for p in parameters]
    shared = [value for value in state if shard == "node" and value.dim()]
    own = allocated(value for value in state if shard != "node" or not value.dim())
    parts = ranks if shard == "node" else 1  # the ranks of a machine have one copy
    found = allocated(parameters) / parts, allocated(outside), allocated(flats)
    assert found == expected[:3], (shard, kind)
    if rank == 0:  # the last rank's shares may be smaller
        assert own + allocated(shared) / parts == expected.state, (shard, kind)
