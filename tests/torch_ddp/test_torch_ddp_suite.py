"""torch's own tests of DistributedDataParallel, on CPU and gloo, with our class in torch's place.

They are in torch's wheel and need `expecttest`. All that torch's own class passes in the same
arrangement ours passes, too, except for those in EXCLUDED.
"""

from functools import partial

import pytest

from tests.support.ranks import Crew
from tests.support.torch_ddp_suite import names, torch_test

_MAPPING = "calls the function that maps parameters to the C++ reducer's indices"
_USED_MAP = "reads the C++ reducer's map of used parameters"
_WORDS = "wants torch's message word for word, with indices and advice; ours names the parameters"
_BUFFER_HOOKS = "registers a buffer hook; buffers are sent at the end of backward, not in forward"

EXCLUDED = {
    "test_ddp_build_debug_param_to_name_mapping": _MAPPING,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _MAPPING,
    "test_ddp_broadcast_buffer_via_hook": _BUFFER_HOOKS,
    "test_ddp_buffer_hook_allreduce": _BUFFER_HOOKS,
    "test_ddp_buffer_hook_allreduce_return_future": _BUFFER_HOOKS,
    "test_ddp_control_flow_different_across_ranks": _USED_MAP,
    "test_ddp_control_flow_same_across_ranks": _USED_MAP,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _WORDS,
    "test_ddp_multiple_nested_unused_params_error": _WORDS,
    "test_ddp_unused_params_rebuild_buckets_exception": _WORDS,
    "test_invalid_static_graph": _WORDS,
    "test_ddp_logging_data_cpu": "wants the timings that the C++ logger takes",
    "test_detect_ddp_is_actually_static": "asks the C++ reducer",
    "test_skip_all_reduce_unused_parameters": "reads the C++ logger's number of buckets",
}

# The profiler's events that it counts are gloo's own.
OVER_GLOO = {"test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler"}

# Never skipped: a mistake in `on_cpu` would skip most.
RUN = {"test_DistributedDataParallelCPU", "test_ddp_uneven_inputs"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def run():
    """What one of torch's tests gives on each rank, and why, as `outcome` does."""
    pytest.importorskip("expecttest")
    crews = []  # of their own: to import torch's test tools changes the environment

    def on_ranks(name, ours, **options):
        if not crews or crews[-1].ended:  # by another test
            crews.append(Crew("gloo", 2, fresh=True))
        return crews[-1](partial(torch_test, name=name, ours=ours, **options), limit=100)

    yield on_ranks
    for crew in crews:
        crew.end()


@pytest.mark.parametrize("name", [name for name in names() if name not in EXCLUDED])
def test_what_torchs_own_class_passes_ours_passes(run, name):
    found = run(name, ours=True, **({"shared_memory": False} if name in OVER_GLOO else {}))
    states = {state for state, _ in found}
    if states == {"pass"}:
        return
    assert name not in RUN, found
    if states == {"skip"}:
        pytest.skip("of torch's tests are skipped by torch")
    assert {state for state, _ in run(name, ours=False)} != {"pass"}, found
    pytest.skip("of torch's tests fail with torch's own class, too")
