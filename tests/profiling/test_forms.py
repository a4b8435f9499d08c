"""The forms of a record: text, trace, picture, page."""

import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest

from ddp_from_scratch.profiling.page import as_html
from ddp_from_scratch.profiling.picture import COLOURS, draw, draw_ladder
from ddp_from_scratch.profiling.text import WIDTH, as_text, legend, two_lines
from ddp_from_scratch.profiling.timeline import write
from ddp_from_scratch.profiling.trace import as_json
from tests.profiling.records import record, with_steps
from tests.support.ranks import ROOT


def test_text_of_a_step():
    whole = record()
    text = as_text(whole, whole.typical)
    lines = text.splitlines()
    assert lines[:3] == ["Net, 3 MiB of gradients, 2 ranks by gloo", "step 7: 100.0 ms", ""]
    assert {len(line) for line in lines[3:9]} == {WIDTH}
    assert max(map(len, lines)) <= WIDTH
    labels, bars = zip(*(line.split("|")[:2] for line in lines[3:6]), strict=True)
    assert [label.rstrip() for label in labels] == [
        *("rank 0", "  bucket 0, 1 MiB", "  bucket 1, 2 MiB")
    ]
    # All have launched the second bucket, and it waits for the one before it: the blank.
    shapes = r"F{23,26}B+p+B+p+B+u?!+u *O+", r" {32,35}p+-+=+ +u+ *", r" {48,52}p+-+=+u? *"
    for shape, bar in zip(shapes, bars, strict=True):
        assert re.fullmatch(shape, bar), bar
    assert "\n".join(lines[3:6]) in (ROOT / "docs" / "how-to" / "timeline.md").read_text()
    symbols = re.findall(r"(?:^|  )(\S) [a-z]", legend(), re.MULTILINE)
    assert len(symbols) == 9
    assert set("".join(line.partition("|")[2] for line in lines)) <= {*symbols, *" |"}
    coloured = as_text(whole, whole.typical, colour=True)
    assert "\033" not in text
    assert re.sub(r"\033\[\d+m", "", coloured) == text != coloured


def test_two_lines_of_a_step_on_a_longer_scale():
    main, gradients = two_lines(record().typical, 200.0).splitlines()
    assert len(main) == len(gradients) == WIDTH
    assert re.fullmatch(r"main thread \|F+B+p?B+p?B+!+u? *O+ {43}\|", main), main
    assert re.fullmatch(r"gradients   \| +-+=+-*=* +\|", gradients), gradients


def test_of_many_buckets_those_are_shown_that_were_waited_for():
    (step,) = record().steps
    first, second = step.ranks[0].buckets
    many = [replace(first if index < 20 else second, index=index) for index in range(25)]
    ranks = tuple(replace(rank, buckets=tuple(many)) for rank in step.ranks)
    text = as_text(record(), replace(step, layout=(("a",),) * 25, ranks=ranks))
    shown = [int(number) for number in re.findall(r"  bucket (\d+),", text)]
    assert shown == 2 * [*range(7), *range(20, 25)]
    assert "25 buckets, of which those are shown that were waited for" in text


def test_text_says_what_is_exposed_and_who_was_late():
    whole = record(late=0.015)
    text = as_text(whole, whole.typical)
    assert (
        "rank 0: communication 38.0 ms, 74% hidden; exposed 10.0 ms\n"
        "rank 0 waited 10.0 ms for bucket 1, of which 7.0 until rank 1 launched it\n"
        "rank 1: communication 10.0 ms, 100% hidden; exposed 0.0 ms\n"
        "rank 1 was late: the others waited 7.0 ms for it in all"
    ) in text
    assert "overlaps" not in text
    assert "clocks" not in text
    (step,) = record(late=0.0).steps
    ranks = tuple(replace(rank, buckets=rank.buckets[:1]) for rank in step.ranks)
    step = replace(step, layout=(("a", "b"),), ranks=ranks)
    text = as_text(replace(record(), clock_error=0.25), step)
    assert "late" not in text
    assert "may differ by 0.25 ms" in text
    assert "1 bucket of 3 MiB: it is full near the end of backward" in text


def test_trace_has_every_event_in_microseconds():
    events = json.loads("".join(as_json(with_steps(100.0, 50.0))))["traceEvents"]
    forward = [e for e in events if e["name"] == "forward" and e["pid"] == 1]
    assert [e["dur"] for e in forward] == pytest.approx([30e3, 30e3])
    assert forward[1]["ts"] > 100e3  # the second step behind the first
    moves = next(e for e in events if e["name"] == "moves" and e["pid"] == 0)
    assert moves["args"] == {"step": 0, "bytes": 2**20, "parameters": ["b"]}
    assert {e["name"] for e in events if e["ph"] == "i"} == {"gradient of a", "gradient of b"}
    rows = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert rows == {"compute", "bucket 0", "bucket 1"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert {e["pid"] for e in events if e["name"] == "waits for rank 1"} == {0}


def test_pictures_are_drawn_where_matplotlib_is(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    assert draw(record(), record().typical, png, svg)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert [p for p in ("bucket 1, 2 MiB", *COLOURS.values()) if p not in svg.read_text()] == []
    draw_ladder("a model", {"naive": record().typical, "flat": record().typical}, svg)
    for part in ("a model", "naive: exposed 10.0 ms", "flat: exposed"):
        assert part in svg.read_text()
    assert svg.read_text().count("main thread") == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw(record(), record().typical, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_files_are_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, _=2: encoding or "ascii")
    write(replace(record(), title="Сеть"), tmp_path)
    assert (tmp_path / "timeline.txt").read_text(encoding="utf-8").startswith("Сеть\n")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])


def test_page_holds_the_record_and_loads_nothing():
    page = "".join(as_html(with_steps(5.0, 90.0, 20.0)))
    data = data_of(page)
    assert [step["iteration"] for step in data["steps"]] == [0, 1, 2]
    assert data["typical"] == 2
    assert not re.search(r"(src|href)=|@import|fetch\(", page)
    assert re.findall(r"https?://\S+?(?=\")", page) == ["http://www.w3.org/2000/svg"]
    # The second would hide the end of the script from the browser.
    for name in ("</script><b>", "<!--<script>"):
        page = "".join(as_html(replace(record(), title=name)))
        assert name not in page
        assert data_of(page)["title"] == name


@pytest.mark.parametrize("form", [as_json, as_html])
def test_many_steps_are_written_in_less_memory_than_their_text(form):
    whole = with_steps(*range(1, 401))
    tracemalloc.start()
    size = sum(len(part) for part in form(whole))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_page_in_a_browser(tmp_path):
    path = tmp_path / "timeline.html"
    path.write_text("".join(as_html(with_steps(100.0, 5.0, 100.0))))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
    command += ["--virtual-time-budget=2000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", path.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    view = found[found.index("<svg") : found.index("</svg>")]
    for text in ("rank 0", "rank 1", "bucket 0, 1.00 MiB", "bucket 1, 2.00 MiB"):
        assert f">{text}" in view
    assert "waits for bucket 1: exposed: 10.0 ms, from 70.0 ms to 80.0 ms" in view
    assert "gradient of a\n2.00 MiB" in view
    assert "launched last by rank 1" in view
    assert ">0: 100.0 ms, exposed 10.0 ms (median) (slowest)<" in found
    assert ">1: 5.00 ms, exposed 10.0 ms<" in found
