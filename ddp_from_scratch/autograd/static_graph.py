"""A graph that is the same in every step: learnt in the first backward pass, then relied upon."""


class StaticGraph:
    """How many gradients each parameter gets in a backward pass.

    1. The first pass is counted to its end; nothing is known before it.
    2. From then on a parameter is ready with its last gradient (with reentrant checkpointing, or
       a parameter shared by several checkpointed segments, autograd accumulates several), and
       those that got none are known to be unused before the pass begins.
    3. `end_pass` names what did not come as it did in the first.

    Args:
        count: the number of parameters.
    """

    def __init__(self, count: int) -> None:
        self._expected: list[int] | None = None
        self._counted = [0] * count

    def count(self, index: int) -> bool:
        """Counts one gradient; True when it is the last of its parameter in this pass."""
        self._counted[index] += 1
        return self._expected is not None and self._counted[index] == self._expected[index]

    def unused(self) -> set[int]:
        """The parameters that get no gradient, as far as that is known yet."""
        return {index for index, times in enumerate(self._expected or []) if times == 0}

    def end_pass(self) -> list[tuple[int, int, int]]:
        """Ends a pass; returns (parameter, gradients now, gradients in the first) that differ."""
        counted, self._counted = self._counted, [0] * len(self._counted)
        if self._expected is None:
            self._expected = counted
        pairs = zip(counted, self._expected, strict=True)
        return [(i, now, then) for i, (now, then) in enumerate(pairs) if now != then]
