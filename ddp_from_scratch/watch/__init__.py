"""Times training steps: timelines, and reports of ranks that stall or come late."""
