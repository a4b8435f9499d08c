"""A record as one HTML page that opens offline."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_from_scratch.profiling.picture import COLOURS
from ddp_from_scratch.profiling.record import Record, StepTimes
from ddp_from_scratch.profiling.text import summary

_TEMPLATE = Path(__file__).with_name("page.html")


def as_html(record: Record) -> Iterator[str]:
    """Returns the parts of the page: `page.html` with the record in it, a step at a time."""
    head, tail = _TEMPLATE.read_text(encoding="utf-8").split("{{record}}")
    yield head
    for text in _data(record):
        # In a script element "</script" would end it, and "<!--<script" hide its end.
        yield text.replace("<", "\\u003c")
    yield tail


def _data(record: Record) -> Iterator[str]:
    data = {
        "title": record.title,
        "nbytes": record.nbytes,
        "hosts": [host.partition("/")[0] for host in record.hosts],
        "typical": record.steps.index(record.typical),
        "colours": COLOURS,
    }
    yield json.dumps(data)[:-1] + ', "steps": ['
    for number, step in enumerate(record.steps):
        yield ", " * (number > 0) + json.dumps(_step(record, step), default=_shallow)
    yield "]}"


def _step(record: Record, step: StepTimes) -> dict[str, Any]:
    exposed = [rank.exposed for rank in step.ranks]
    return _shallow(step) | {
        "length": step.length,
        "exposed": max(exposed),
        "summary": summary(record, step),
    }


def _shallow(times: Any) -> dict[str, Any]:
    # Neither `asdict`, which copies every time, nor `vars`, which leaves a dict with each object.
    return {field.name: getattr(times, field.name) for field in fields(times)}
