"""Times training steps: timelines, and reports of stalled steps and stragglers."""
