"""torch's own tests of DistributedDataParallel, on CPU and gloo, with our class in torch's place.

They are in torch's wheel (`torch.testing._internal.distributed.distributed_test`, which needs
`expecttest`). All that torch's own class passes in the same arrangement ours passes, too, except
for those in EXCLUDED.
"""

from functools import partial

import pytest
import torch

from tests.support.ranks import Crew
from tests.support.torch_ddp_suite import PASSED, SKIPPED, names, torch_test

_FAILS_HERE = "torch's own class fails here, too"
_SYNC_BATCH_NORM = f"{_FAILS_HERE}: torch's SyncBatchNorm wants a GPU"
_GPU_STREAMS = f"{_FAILS_HERE}: it uses a GPU's streams"
_MAPPING = "calls the function that maps parameters to the C++ reducer's indices"
_USED_MAP = "reads the C++ reducer's map of used parameters"
_WORDS = "wants torch's message word for word, with indices and advice; ours names the parameters"
_ERROR_LOG = "wants the error in the C++ logger's record; ours is raised, not recorded"

EXCLUDED = {
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BATCH_NORM,
    "test_ddp_apply_optim_in_backward": _GPU_STREAMS,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _GPU_STREAMS,
    "test_ddp_apply_optim_in_backward_ignored_params": _GPU_STREAMS,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _GPU_STREAMS,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _GPU_STREAMS,
    "test_ddp_native_mixed_precision_ignored_params": _GPU_STREAMS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _GPU_STREAMS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _GPU_STREAMS,
    "test_ddp_compile_static_graph": _GPU_STREAMS,
    "test_post_localSGD_optimizer_parity": _GPU_STREAMS,
    "test_post_localSGD_optimizer_parity_grad_is_view": _GPU_STREAMS,
    "test_post_localSGD_optimizer_step_reload": _GPU_STREAMS,
    "test_ddp_device": f"{_FAILS_HERE}: it compares the numbers of GPUs",
    "test_ddp_logging_data_gpu": f"{_FAILS_HERE}: it compares the numbers of GPUs",
    "test_ddp_build_debug_param_to_name_mapping": _MAPPING,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _MAPPING,
    "test_ddp_control_flow_different_across_ranks": _USED_MAP,
    "test_ddp_control_flow_same_across_ranks": _USED_MAP,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _WORDS,
    "test_ddp_multiple_nested_unused_params_error": _WORDS,
    "test_ddp_unused_params_rebuild_buckets_exception": _WORDS,
    "test_invalid_static_graph": _WORDS,
    "test_ddp_python_error_logged": _ERROR_LOG,
    "test_ddp_logging_data_cpu": "wants the timings that the C++ logger takes",
    "test_ddp_sync_module_states": "asks for the size of the C++ broadcast's buckets",
    "test_detect_ddp_is_actually_static": "asks the C++ reducer",
    "test_skip_all_reduce_unused_parameters": "reads the C++ logger's number of buckets",
    "test_static_graph_api_cpu": "wants an error where ours works: a graph declared static later",
}

# The profiler's events that it counts are gloo's own.
OVER_GLOO = {"test_ddp_profiling_torch_profiler"}

# Never skipped: a mistake in `on_cpu` would skip most. Older versions ask it another question.
RUN = {"test_DistributedDataParallelCPU"}
RUN |= {"test_ddp_uneven_inputs"} if torch.__version__ >= "2.15" else set()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def crews():
    """Of their own: to import torch's test tools changes the environment."""
    pytest.importorskip("expecttest")
    started = []
    yield started
    for crew in started:
        crew.end()


@pytest.fixture
def run(crews):
    """What one of torch's tests gives on each rank of the last crew, or of a new one."""

    def on_ranks(name, ours, **options):
        if not crews or crews[-1].ended:  # by another test
            crews.append(Crew("gloo", 2, fresh=True))
        return crews[-1](partial(torch_test, name=name, ours=ours, **options), limit=100)

    return on_ranks


@pytest.mark.parametrize("name", [name for name in names() if name not in EXCLUDED])
def test_torchs_own_test_passes(run, name):
    found = run(name, ours=True, **({"shared_memory": False} if name in OVER_GLOO else {}))
    for result in found:
        assert result.startswith((PASSED, SKIPPED)), result
    if found[0].startswith(SKIPPED):
        assert name not in RUN
        pytest.skip("of torch's tests are skipped by torch")


@pytest.mark.parametrize(
    "name", [name for name, why in EXCLUDED.items() if why.startswith(_FAILS_HERE)]
)
def test_what_is_excluded_for_it_fails_with_torchs_own_class(run, name):
    for result in run(name, ours=False):
        assert not result.startswith(PASSED)
