"""The timeline of a run: `--timeline`."""

from ddp_from_scratch.profiling.text import as_text
from ddp_from_scratch.profiling.timeline import TOO_FEW, Timeline
from ddp_from_scratch.reducer.reducer import Reducer
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import TIMELINE_STEPS, Settings


def of_run(settings: Settings, reducer: Reducer) -> Timeline | None:
    """Begins the timeline that was asked for, if any. Collective."""
    if settings.timeline is None:
        return None
    return Timeline(reducer, settings.timeline, settings.timeline_steps or TIMELINE_STEPS)


def close(timeline: Timeline | None, report: Report) -> None:
    """Writes what there is and prints a step. Collective.

    Raises:
        UsageError: see `Timeline`.
    """
    if timeline is None:
        return
    timeline.close()
    if timeline.record is None:
        report.warning(TOO_FEW)
        return
    step = timeline.record.typical
    report.line("\n" + as_text(timeline.record, step, colour=report.colours) + "\n")
    report.line(f"timeline {timeline.folder}/timeline.html")
    if not timeline.has_picture:
        report.line("no picture: that takes matplotlib (pip install matplotlib)")
