"""`run.py --go-on`: ranks are lost in each part of a run, and the checkpoint stays the same."""

import json
from pathlib import Path

import pytest

from tests.support.tiers import slow
from tests.training.going_on_runs import finish, last, start


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoint of a run on 2 ranks without --go-on."""
    folder = tmp_path_factory.mktemp("quiet")
    finish(start(folder, "", "--epochs", "3", nproc=2))
    return last(folder)


FAULTS = {
    "a step": "before('_backward', lambda t: me == '1' and t.global_step == 7 and die())",
    "the end of a step": "before('_answer', lambda t: me == '2' and t.global_step == 7 and die())",
    "an evaluation": "before('_evaluate', lambda t: me == '0' and t.epoch == 1 and die())",
    "before a checkpoint": "before('_save', lambda t: me == '1' and t.epoch == 2 and die())",
    "in the last checkpoint": """
import torch
save = torch.save
def half(state, file):
    save(state, file)
    if me == "0" and state["epoch"] == 3:
        file.flush()
        die()
torch.save = half
""",
    "the start": "before('_begin', lambda t: me == '1' and die())",
    "the first meeting": """
import ddp_from_scratch.training.loop as training_loop
broadcast = training_loop.broadcast_parameters
training_loop.broadcast_parameters = lambda model: die() if me == "1" else broadcast(model)
""",
    "the joining of another": """
before("_backward", lambda t: me == "1" and t.global_step == 4 and die())
if me == "3":
    before("_restore", lambda t: die())
""",
}


FIRST = ["the joining of another"]


@pytest.mark.parametrize("name", FIRST + [slow(name) for name in FAULTS if name not in FIRST])
def test_a_rank_that_is_killed_costs_no_bit(
    name: str, quiet: dict[str, bytes], tmp_path: Path
) -> None:
    _, err = finish(start(tmp_path, FAULTS[name], "--epochs", "3", "--go-on"))
    assert "was killed by SIGKILL" in err
    assert last(tmp_path) == quiet


def test_each_event_is_a_line_and_a_metric(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    fault = "before('_backward', lambda t: me == '1' and t.global_step == 7 and die())"
    options = ["--epochs", "2", "--go-on", "--max-failures", "0", "--log-dir", str(metrics)]
    out, err = finish(start(tmp_path, fault, *options))
    assert err == (
        "process 1 was killed by SIGKILL: going on with 2 ranks; no replacement is left of 0\n"
    )
    assert "going on with 2 ranks in epoch 2, step 3: another group after " in out
    lines = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if "ranks" in line]
    assert (event["step"], event["ranks"]) == (8, 2)
    assert event.keys() == {"step", "ranks", "group_seconds", "step_seconds"}


def test_one_rank_that_is_asked_to_stop_stops_all(tmp_path: Path) -> None:
    fault = """
before("_step", lambda t: me == "1" and t.global_step == 7 and os.kill(os.getpid(), 15))"""
    out, err = finish(start(tmp_path, fault, "--go-on", "--epochs", "3"), 143)
    assert "stopped in epoch 2, step 4/5; saved" in out
    assert "going on" not in err


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--go-on", "--log-dir", str(tmp_path / "file" / "x")]
    _, err = finish(start(tmp_path, "", *options), code=2)
    assert err.startswith("error: cannot write metrics to ")
    assert len(err.splitlines()) == 1


def test_a_run_that_goes_on_can_be_stopped_and_resumed(
    quiet: dict[str, bytes], tmp_path: Path
) -> None:
    stop = "before('_step', lambda t: me == '1' and t.global_step == 7 and os.kill(PARENT, 15))"
    # The supervisor is the parent of the process that ranks are forked from.
    parent = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    options = ["--epochs", "3", "--go-on"]
    out, _ = finish(start(tmp_path, stop.replace("PARENT", parent), *options), code=143)
    assert "stopped in epoch 2, step " in out
    finish(start(tmp_path, "", *options, "--resume", "auto", nproc=4))
    assert last(tmp_path) == quiet
