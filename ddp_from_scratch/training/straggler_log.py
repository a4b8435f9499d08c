"""Straggler reports of a run, `--stragglers`, as numbers for its metrics."""

from ddp_from_scratch.checks.straggler_report import StragglerReport
from ddp_from_scratch.reducer.reducer import Reducer


def values(report: StragglerReport, reducer: Reducer, batch_size: int) -> dict[str, float]:
    """The numbers that `--log-dir` gets with each report.

    Args:
        report: of some steps.
        reducer: of these steps.
        batch_size: images of all ranks in a step.
    """
    late = {"straggler_rank": report.rank, "straggler_ms": report.late_ms}
    return {
        "images_per_second": 1e3 * batch_size / max(report.step_ms, 1e-3),
        "step_ms": report.step_ms,
        **{f"{phase}_ms": ms for phase, ms in report.others_ms.items()},
        "exposed_ms": report.exposed_ms,
        "averaged_bytes": sum(reducer.stats().bucket_bytes),
        **(late if report.is_late else {}),
    }
