"""What a rank prints when NCCL fails: who has failed, and NCCL's own reason."""

import pytest
import torch.distributed as dist

from ddp_from_scratch.launch import rank_process

FULL_SHM = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error \
(run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error: failed to extend /dev/shm/nccl-7aXkQe to 33030532 bytes, error: No space left on device (28)
"""
PEER_GONE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or \
there was a network error, NCCL version 2.30.7
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer 10.0.0.2<47311>
"""


def said_of(monkeypatch, capfd, text):
    def fail():
        raise dist.DistBackendError(text)

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(rank_process.os, "_exit", end)
    monkeypatch.setattr(rank_process, "_wait_to_be_stopped", lambda: None)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        rank_process.run_to_exit(fail)
    return ended.value.code, capfd.readouterr().err


def test_a_failure_of_nccl_is_the_ranks_own(monkeypatch, capfd):
    assert said_of(monkeypatch, capfd, FULL_SHM) == (
        1,
        "error: rank 3: NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL "
        "version 2.30.7. Last error: failed to extend /dev/shm/nccl-7aXkQe to 33030532 bytes, "
        "error: No space left on device (28)\n",
    )


@pytest.mark.parametrize(
    "text", [PEER_GONE, "NCCL communicator was aborted on rank 3.", "NCCL watchdog: remote error"]
)
def test_a_peer_that_is_gone_is_lost(monkeypatch, capfd, text):
    code, said = said_of(monkeypatch, capfd, text)
    assert (code, said.startswith("error: rank 3 lost the other ranks: NCCL")) == (1, True)
