"""The ranks of a job: opens their process group, and continues when one is lost."""
