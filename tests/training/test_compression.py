"""`run.py --compress`: as accurate as without; and what a resumed run keeps of it."""

import pytest
import torch

from ddp_from_scratch.sync.check_sync import check_sync
from ddp_from_scratch.training import loop
from ddp_from_scratch.training.loop import Trainer
from ddp_from_scratch.training.models import make_model
from ddp_from_scratch.training.settings import Settings
from tests.training.test_resume import POWERSGD, bits, make_trainer, stop_in_step


def accuracies(world, compressions):
    loop.make_model = make_model
    found = []
    for name in compressions:
        # In shared memory nothing is compressed.
        shared = world.backend != "gloo"
        settings = Settings(
            backend=world.backend, compress=name, epochs=6, quiet=True, shared_memory=shared
        )
        trainer = Trainer(settings, world)
        assert trainer.run() == 0
        check_sync(trainer.model, optimizers=[trainer.optimizer])
        found.append(trainer._evaluate())
    return found


@pytest.mark.slow
def test_it_trains_to_the_same_accuracy(ranks):
    full, *compressed = ranks("gloo", 2)(accuracies, [None, "bf16", "fp16", "powersgd"])[0]
    assert full > 0.97
    assert compressed == pytest.approx([full] * 3, abs=0.015)


@pytest.mark.slow
def test_it_trains_to_the_same_accuracy_on_mpi(ranks):
    full, compressed = ranks("mpi", 2)(accuracies, [None, "powersgd"])[0]
    assert full > 0.97
    assert compressed == full  # in shared memory


def stopped(world, folder, changes):
    trainer = make_trainer(world, folder, **POWERSGD | changes)
    stop_in_step(trainer, 17)
    trainer.run()
    return remembered(trainer)


def remembered(trainer):
    state = trainer.compression._power_sgd
    if state is None:
        return None
    saved = state.state_dict(trainer.model)
    scale = trainer.scaler.get_scale()
    return saved["iteration"], {n: (e / scale).tolist() for n, e in saved["errors"].items()}


def resumed(world, folder, changes):
    """What is remembered on resuming, and what was warned of."""
    told = []
    report = "ddp_from_scratch.training.report.Report.warning"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, lambda self, text: told.append(text))
        trainer = make_trainer(world, folder, resume="auto", **POWERSGD | changes)
    found = remembered(trainer)
    assert trainer.run() == 0
    check_sync(trainer.model)
    assert all(torch.tensor(values).isfinite().all() for values in bits(trainer)[0])
    return found, told


def test_another_world_size_goes_on_with_the_mean(ranks, tmp_path):
    ((count, first), (_, second)) = ranks("gloo", 2)(stopped, tmp_path, {})
    assert first != second
    replies = ranks("gloo", 3)(resumed, tmp_path, {})
    for (iteration, errors), _ in replies:
        assert iteration == count
        for name, values in errors.items():
            mean = (torch.tensor(first[name]) + torch.tensor(second[name])) / 2
            assert values == mean.tolist()
    told = replies[0][1]
    assert "world_size 2 -> 3" in told[0]
    assert "mean of what PowerSGD left out on the 2 ranks before" in told[1]


def test_another_precision_and_rank_keep_the_errors(ranks, tmp_path):
    before = ranks("gloo", 2)(stopped, tmp_path, {"precision": "fp16"})
    changes = {"powersgd_rank": 1, "bucket_cap_mb": 0.0}
    after = ranks("gloo", 2)(resumed, tmp_path, changes)
    assert [found for found, _ in after] == before
    assert "powersgd_rank 2 -> 1" in after[0][1][0]


def test_another_compression_says_what_is_lost(ranks, tmp_path):
    ranks("gloo", 2)(stopped, tmp_path, {})
    (found, told), _ = ranks("gloo", 2)(resumed, tmp_path, {"compress": "bf16"})
    assert found is None
    assert "compress powersgd -> bf16" in told[0]
    assert told[1:] == ["what PowerSGD left out of earlier averages is dropped"]


def test_a_run_without_it_goes_on_with_it(ranks, tmp_path):
    ranks("gloo", 2)(stopped, tmp_path, {"compress": None})
    (found, told), _ = ranks("gloo", 2)(resumed, tmp_path, {"precision": "fp16"})
    assert found == (0, {})
    assert "compress None -> powersgd" in told[0]
