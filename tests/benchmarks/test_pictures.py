"""Pictures of the benchmarks: the bars, marks and words that are drawn, not their pixels."""

from dataclasses import asdict

import pytest

from benchmarks import overlap, scaling, two_hosts
from benchmarks.harness import report
from benchmarks.harness.report import COLOURS, Bar
from benchmarks.harness.wire_contenders import POWER_SGD, REDUCER, TORCH, TORCH_POWER_SGD
from benchmarks.harness.wire_meter import Result
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.samples import Samples


@pytest.fixture
def drawn(monkeypatch):
    """Figures by the name of their file, as they would be saved."""
    if report.pyplot is None:
        pytest.skip("there is no matplotlib")
    figures = {}
    monkeypatch.setattr(
        report, "_save", lambda name, figure, folder: figures.update({name: figure})
    )
    yield figures
    report.pyplot.close("all")


def bars_of(plot):
    """Name, colour and length of each bar, from top to bottom."""
    names = [label.get_text() for label in plot.get_yticklabels()]
    return [
        (name, report.matplotlib.colors.to_hex(bar.get_facecolor()), bar.get_width())
        for name, bar in zip(names, plot.patches, strict=True)
    ]


def marks_of(plot):
    """Where the marks of the limits are: x and y."""
    lines = [line for line in plot.lines if line.get_marker() == "|"]
    return [tuple(point) for line in lines for point in line.get_xydata().tolist()]


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_bars_have_colours_marks_labels_and_groups(drawn):
    bars = [
        Bar("first", (1.0, 2.0, 3.0), "reference"),
        Bar("second", (3.0, 4.0, 5.0), "torch", "1.00", limit=2.5, apart=True),
        Bar("third", (2.0, 3.0, 4.0), "ours", "0.75", limit=1.5),
    ]
    report.draw_bars("file", "a title", "ms", {"above": bars}, limit="the least")
    (plot,) = drawn["file"].axes
    colours = [COLOURS[kind] for kind in ("reference", "torch", "ours")]
    assert bars_of(plot) == list(
        zip(("first", "second", "third"), colours, (2.0, 4.0, 3.0), strict=True)
    )
    assert marks_of(plot) == [(2.5, 1.5), (1.5, 2.5)]  # half a bar is left before the second
    assert [text.get_text() for text in plot.texts] == ["", "1.00", "0.75"]
    assert (plot.get_xlim()[0], plot.get_xlabel()) == (0, "ms")
    assert plot.get_title("left") == "above"
    assert drawn["file"].get_suptitle() == "a title"
    assert legend_of(drawn["file"]) == ["torch", "no communication", "this library", "the least"]


def test_without_marks_the_legend_has_none(drawn):
    report.draw_bars("file", "", "", {"": [Bar("a", (1.0, 1.0, 1.0), "ours")]})
    assert legend_of(drawn["file"]) == ["torch", "no communication", "this library"]


def test_overlap_draws_each_size_beside_the_step_without_communication(drawn, tmp_path):
    times = {NO_COMMUNICATION: 10.0}
    for cap, of_torch, at_end, during in ((1.0, 20.0, 16.0, 15.0), (25.0, 20.0, 14.0, 12.0)):
        ways = (overlap.TORCH, overlap.AT_END, overlap.DURING)
        milliseconds = zip(ways, (of_torch, at_end, during), strict=True)
        times |= {f"{way}, {cap:g} MB": ms for way, ms in milliseconds}
    samples = [Samples(name, [ms] * 3) for name, ms in times.items()]
    overlap.draw("file", "a model; mpi, 2 ranks", samples, [1.0, 25.0], tmp_path)
    (plot,) = drawn["file"].axes
    blue = COLOURS["ours"]
    assert bars_of(plot) == [
        (NO_COMMUNICATION, COLOURS["reference"], 10.0),
        ("1 MiB: torch DDP", COLOURS["torch"], 20.0),
        ("Reducer, sends at backward's end", blue, 16.0),
        ("Reducer, sends during backward", blue, 15.0),
        ("25 MiB: torch DDP", COLOURS["torch"], 20.0),
        ("Reducer, sends at backward's end", blue, 14.0),
        ("Reducer, sends during backward", blue, 12.0),
    ]
    ratios = [text.get_text() for text in plot.texts]
    assert ratios == ["", "1.00", "0.80", "0.75", "1.00", "0.70", "0.60"]
    assert [x for x, _ in marks_of(plot)] == [10.0] * 6
    assert "ms per step" in plot.get_xlabel()
    assert drawn["file"].get_suptitle().endswith("a model; mpi, 2 ranks")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_two_hosts_draws_a_panel_for_each_speed_with_the_least_that_a_step_can_take(
    drawn, tmp_path, backend
):
    results = [
        Result(NO_COMMUNICATION, [40.0] * 3, 0, [[9]], 20.0),
        Result(TORCH, [200.0] * 3, 8, [[9]], 100.0),
        Result(REDUCER, [100.0] * 3, 8, [[9]], 100.0),
        Result(POWER_SGD, [50.0] * 3, 8, [[9]], 30.0),
        Result(TORCH_POWER_SGD, [60.0] * 3, None, [[9]], None),
    ]
    # As read from files.
    by_speed = {gbit: [asdict(r) for r in results] for gbit in (1.0, 0.1)}
    two_hosts.draw("mlp", backend, 2, by_speed, tmp_path)
    figure = drawn[f"two_hosts-mlp-{backend}-2"]
    assert [plot.get_title("left") for plot in figure.axes] == ["0.1 Gbit/s", "1 Gbit/s"]
    names = [(name, length) for name, _, length in bars_of(figure.axes[0])]
    assert names == [
        (NO_COMMUNICATION, 40.0),
        (TORCH, 200.0),
        (TORCH_POWER_SGD, 60.0),
        (REDUCER, 100.0),
        (POWER_SGD, 50.0),
    ]
    ratios = [text.get_text() for text in figure.axes[0].texts]
    assert ratios == ["0.20", "1.00", "0.30", "0.50", "0.25"]
    # No less than computing takes, and none where it is not known what crosses.
    assert marks_of(figure.axes[0]) == [(100.0, 1.0), (100.0, 3.0), (40.0, 4.0)]
    assert ("PowerSGD needs gloo" in figure.axes[-1].get_xlabel()) == (backend == "mpi")


def test_scaling_draws_each_number_of_ranks_with_its_ideal(drawn, tmp_path):
    runs = []
    for ranks in (1, 2, 4):
        times = {"alone": 8.0 * ranks, "torch": 20.0 * ranks, "averaged": 10.0 * ranks}
        cases = [
            {"layers": s.layers, "width": s.width, "batch": s.batch}
            | {kind: [ms] * 2 for kind, ms in times.items()}
            | {"memory": dict.fromkeys(scaling.KINDS, 1)}
            for s in scaling.shapes(ranks)
        ]
        runs.append({"ranks": ranks, "cores": 2, "cases": cases})
    scaling.report("gloo", runs, tmp_path)
    weak, strong = drawn["scaling-gloo"].axes
    assert weak.get_title("left") == "weak scaling: every rank has a batch of 16"
    assert strong.get_title("left") == "strong scaling: all ranks share a batch of 64"
    assert [name for name, _, _ in bars_of(weak)][:4] == [
        "1 rank: no communication",
        "torch DDP, views",
        "Reducer",
        "2 ranks: no communication",
    ]
    assert [colour for _, colour, _ in bars_of(weak)] == 3 * [
        COLOURS[kind] for kind in ("reference", "torch", "ours")
    ]
    assert [text.get_text() for text in weak.texts] == 3 * ["0.40", "1.00", "0.50"]
    # Four ranks take turns on two cores: twice the time, and half of it with a shared batch.
    assert [x for x, _ in marks_of(weak)] == [8.0] * 6 + [16.0] * 3
    assert [x for x, _ in marks_of(strong)] == [8.0] * 3 + [4.0] * 6
