"""The benchmarks: what they compute from samples."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import compare, memory, overlap
from ddp_from_scratch import UsageError
from ddp_from_scratch.bench.contenders import NO_COMMUNICATION
from ddp_from_scratch.bench.result_file import write
from ddp_from_scratch.bench.samples import Samples
from tests.support.ranks import MPIRUN, ROOT

NOISE = np.random.default_rng(3)


def run(*command, code=0):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | MPIRUN,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_hidden_share():
    hidden = overlap.hidden_share
    for exposed, communication, share in ((0, 8, 1.0), (8, 8, 0.0), (2, 8, 0.75), (12, 8, -0.5)):
        assert hidden(np.full(5, exposed), np.full(5, communication)) == (share, share, share)
    assert all(math.isnan(x) for x in hidden(np.full(5, 1.0), np.full(5, -1.0)))


def test_overlap_of_each_cap():
    times = {
        NO_COMMUNICATION: 10.0,
        "during backward, 1 MB": 12.0,
        "at its end, 1 MB": 14.0,
        "torch DDP, 1 MB": 13.0,
        "during backward, 25 MB": 11.0,
        "at its end, 25 MB": 14.0,
        "torch DDP, 25 MB": 16.0,
    }
    assert {s.name for s in overlap.specs([1.0, 25.0], "mpi")} == times.keys()
    plain = {"by gloo at its end, 1 MB": 16.0, "by gloo at its end, 25 MB": 16.0}
    assert {s.name for s in overlap.specs([1.0, 25.0], "gloo")} == (times | plain).keys()
    samples = [Samples(name, [time] * 4) for name, time in times.items()]
    small, large = overlap.overlaps(samples, [1.0, 25.0])
    assert (small.exposed, small.hidden[0], small.torch_hidden[0]) == (2.0, 0.5, 0.25)
    assert (large.exposed, large.hidden[0], large.torch_hidden[0]) == (1.0, 0.75, -0.5)
    on_gloo = samples + [Samples(name, [time] * 4) for name, time in plain.items()]
    small, large = overlap.overlaps(on_gloo, [1.0, 25.0])
    assert (small.hidden[0], small.torch_hidden[0], large.torch_hidden[0]) == (0.5, 0.5, 0.0)
    rows = overlap.table([small, large], samples[0]).splitlines()[2:4]
    assert ["12.0 *" in rows[0], "13.0 *" in rows[0], "11.0 *" in rows[1], "16.0 *" in rows[1]] == [
        False,
        True,
        True,
        False,
    ]


def test_what_auto_settled_on_is_told_beside_the_best():
    times = {"during backward, 1 MB": 10.0, "at its end, 1 MB": 8.0, "torch DDP, 1 MB": 1.0}
    samples = [Samples(name, [time] * 4) for name, time in (times | {"auto": 10.0}).items()]
    told = overlap.describe_auto(samples, {"bucket_cap_mb": 4.0, "overlap": True})
    assert told == (
        "auto: bucket_cap_mb=4.0, during backward: 10.0 ms, 1.250 (1.250 to 1.250) x the best "
        "of the sweep (over all rounds at its end, 1 MB, 8.0 ms)"
    )


def test_the_best_is_not_compared_in_the_rounds_that_made_it_the_best():
    auto = Samples("auto", [10.0] * 4)
    lucky = [Samples("first", [5.0, 10.0, 5.0, 10.0]), Samples("then", [10.0, 5.0, 10.0, 5.0])]
    assert overlap.ratio_to_best(auto, lucky) == (1.0, 1.0, 1.0)


ROLLUP = """5600-7fff ---p 00000000 00:00 0   [rollup]
Rss:              900 kB
Pss:              500 kB
Pss_Anon:         100 kB
Pss_File:         380 kB
Pss_Shmem:         20 kB
Private_Clean:    300 kB
Private_Dirty:     90 kB
"""


def test_memory_counts_no_files_and_what_is_shared_once():
    assert memory.parse_rollup(ROLLUP) == memory.Memory(90 * 1024, 120 * 1024)
    # Two ranks, before and in four phases; the peaks of the node are those of one phase.
    sample = {
        "name": "a",
        "private": [[10, 15, 90, 30, 30, 30], [20, 70, 25, 30, 30, 31]],
        "node": [[10, 15, 90, 30, 30, 30], [20, 70, 25, 30, 30, 31]],
    }
    assert memory.growth(sample, "private") == 80
    assert memory.growth(sample, "node") == 85
    assert memory.growth(sample, "private", steady=True) == 20
    assert memory.growth(sample, "node", steady=True) == 31


def test_memory_of_this_process_grows_with_what_it_allocates():
    if not memory.ROLLUP.exists():
        pytest.skip("no /proc/self/smaps_rollup")
    with memory.Watch(torch.device("cpu")) as watch:
        before = watch.peak()
        # More than glibc ever takes from memory that was freed.
        kept = torch.ones(2**24)
        after = watch.peak()
    size = kept.nbytes
    for growth in (after.private - before.private, after.node - before.node):
        assert 0.9 * size < growth < 1.5 * size


def result_file(path, times, *, slower_machine=1.0, **settings):
    """A file of 40 rounds in which each contender takes its time, within 5 %."""
    weather = slower_machine * (1 + 0.5 * NOISE.random(40))  # slows all contenders of a round
    content = {
        "settings": {"benchmark": "step_time", "nproc": 2, **settings},
        "machine": {"cores": 2},
        "samples": [
            {"name": name, "milliseconds": list(t * weather * (1 + 0.05 * NOISE.random(40)))}
            for name, t in times.items()
        ],
    }
    path.write_text(json.dumps(content))
    return path


def verdicts(old, new, **options):
    old, new = compare.read(old), compare.read(new)
    reference = compare.common_reference(old, new, options.pop("reference", None))
    return {c.name: c.verdict for c in compare.compare(old, new, reference, **options)}


def compare_files(monkeypatch, *paths):
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths)])
    return compare.main()


def test_compare_tells_what_got_slower_and_faster_on_another_machine(tmp_path, monkeypatch, capsys):
    before = {NO_COMMUNICATION: 10, "a": 20, "b": 20, "c": 20, "gone": 5}
    after = {NO_COMMUNICATION: 10, "a": 20, "b": 24, "c": 16, "new": 5}
    old = result_file(tmp_path / "old.json", before)
    new = result_file(tmp_path / "new.json", after, slower_machine=7.0)
    assert verdicts(old, new) == {"a": "", "b": "slower", "c": "faster"}
    assert verdicts(old, new, at_least=0.3) == {"a": "", "b": "", "c": ""}
    assert verdicts(old, new, reference="b") == {NO_COMMUNICATION: "faster"} | {
        "a": "faster",
        "c": "faster",
    }
    assert compare_files(monkeypatch, old, old) == 0
    capsys.readouterr()
    assert compare_files(monkeypatch, old, new) == 1
    told = capsys.readouterr().out
    assert "only in the old file: gone" in told
    assert "only in the new file: new" in told


def test_compare_finds_nothing_in_noise(tmp_path):
    times = {NO_COMMUNICATION: 10, **{f"contender {i}": 20 for i in range(8)}}
    old, new = (result_file(tmp_path / name, times) for name in ("old.json", "new.json"))
    assert set(verdicts(old, new).values()) == {""}


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    good = result_file(tmp_path / "good.json", {NO_COMMUNICATION: 1, "a": 2})
    other = result_file(tmp_path / "other.json", {NO_COMMUNICATION: 1, "a": 2}, nproc=4)
    with pytest.raises(UsageError, match="different benchmarks: nproc 2 and 4"):
        verdicts(good, other)
    with pytest.raises(UsageError, match="not in both files: b"):
        verdicts(good, good, reference="b")
    for text, told in (
        ("{", "no timed contenders"),
        ("[]", "no timed contenders"),
        ('{"samples": {"256": {"gloo": [1.0]}}}', "no timed contenders"),
        ('{"samples": [], "machine": {}, "settings": {}}', "two or more times"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=told):
            compare.read(tmp_path / "bad.json")
    missing = run("-m", "benchmarks.compare", str(good), str(tmp_path / "none.json"), code=2)
    assert missing.stderr.count("\n") == 1


def test_a_file_has_a_line_for_each_list_of_samples_and_can_be_compared(tmp_path):
    samples = [{"name": name, "milliseconds": [1 / 3, 2e-7, 3, 123456.7]} for name in "ab"]
    settings = {"benchmark": "step_time", "caps": [1.0, 4.0], "chosen": None}
    write("name", "title", samples, settings=settings, folder=tmp_path)
    path = tmp_path / "name.json"
    content = json.loads(path.read_text())
    assert content["settings"] == settings
    assert content["samples"][1] == {"name": "b", "milliseconds": [0.333333, 2e-07, 3, 123457.0]}
    lines = path.read_text().splitlines()
    assert lines.count('   "milliseconds": [0.333333, 2e-07, 3, 123457.0]') == 2
    assert compare.read(path).milliseconds["a"].shape == (4,)
