"""A record as one HTML page that opens offline."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_from_scratch.profiling.picture import COLOURS
from ddp_from_scratch.profiling.record import Record, StepTimes
from ddp_from_scratch.profiling.text import summary

_TEMPLATE = Path(__file__).with_name("page.html")


def as_html(record: Record) -> str:
    """Returns the page: `page.html` with the record in it."""
    data = {
        "title": record.title,
        "nbytes": record.nbytes,
        "hosts": [host.partition("/")[0] for host in record.hosts],
        "typical": record.steps.index(record.typical),
        "steps": [_step(record, step) for step in record.steps],
        "colours": COLOURS,
    }
    # In a script element "</script" would end it, and "<!--<script" hide its end.
    text = json.dumps(data).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{record}}", text)


def _step(record: Record, step: StepTimes) -> dict[str, Any]:
    exposed = [rank.exposed for rank in step.ranks]
    return asdict(step) | {
        "length": step.length,
        "exposed": max(exposed),
        "summary": summary(record, step),
    }
