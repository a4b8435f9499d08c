"""One file that a run continues from, and what happens when it is not whole."""

import copy
import random

import pytest
import torch
from torch import nn

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.launch.environment import ALONE
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.loop import load_model
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.world import World
from tests.support.refusal import refusal

MODEL = nn.Linear(4, 3)


def state(step):
    """What a run of one rank writes after so many steps, with PowerSGD and loss scaling."""
    weights = {"weight": torch.full((3, 4), float(step)), "bias": torch.zeros(3)}
    momenta = {i: {"momentum_buffer": torch.zeros_like(w)} for i, w in enumerate(weights.values())}
    errors = [{"weight": torch.zeros(3, 4)}]
    return {
        "model": weights,
        "model_spec": {"name": "mlp", "channels": 1, "image_size": 8, "num_classes": 10},
        "optimizer": {"state": momenta, "param_groups": [{"params": [0, 1]}]},
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "compression": {"iteration": step, "errors": errors, "loss_scale": 1.0}
        | {"qs": {"weight": torch.zeros(4, 1)}},
        "ready_order": ["bias", "weight"],
        "buckets": {"bucket_cap_mb": [1.0, 25.0], "overlap": True},
        "epoch": 0,
        "step": step,
        "images": 32 * step,
        "totals": torch.zeros(3, dtype=torch.float64),
        "rng": [checkpoint.rng_state()],
        "settings": Settings(compress="powersgd", precision="fp16").as_saved(),
        "world_size": 1,
        "global_batch_size": 32,
    }


def newest(folder):
    settings, spec = Settings(checkpoint_dir=folder, resume="auto"), state(1)["model_spec"]
    return checkpoint.find_checkpoint(settings, spec, MODEL, Report(speaks=True, quiet=False))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path):
    """The newest by when they were written: a later one may have fewer steps behind it."""
    for step in (1000, 10, 100):
        path = checkpoint.save(tmp_path / "deep" / "er", state(step))
    assert names(path.parent) == ["checkpoint-000002.pt", "checkpoint-000003.pt"]
    assert checkpoint.files(path.parent)[0] == path
    loaded = checkpoint.load(path)
    assert loaded["model"]["weight"].tolist() == [[100.0] * 4] * 3
    # torch reads the file as any of its own.
    assert torch.load(path, weights_only=True)["step"] == 100


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = checkpoint.save(tmp_path, state(1))
    whole = path.read_bytes()
    draw = random.Random(0)
    for bit in [0, 8 * len(whole) - 1, *(draw.randrange(8 * len(whole)) for _ in range(300))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        told = refusal(checkpoint.load, path)
        assert told.startswith((f"{path} is damaged: its bytes", f"{path} is truncated, or is not"))
    path.write_bytes(whole)
    checkpoint.load(path)


class Foreign:
    pass


def test_a_file_that_no_run_has_written_is_one_clear_line_and_is_not_unpickled(tmp_path):
    whole = checkpoint.save(tmp_path, state(1)).read_bytes()
    contents = [whole[:kept] for kept in (0, 1, 100, -1)]
    contents += [b"hello\n" * 100, b"root:x:0:0\n" * 10, random.Random(7).randbytes(4000)]
    contents += [{"model": {}}, {"format": checkpoint.FORMAT}, [1, 2], Foreign(), torch.ones(2)]
    path = tmp_path / "foreign.pt"
    for content in contents:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        told = f"{path} is truncated, or is not a checkpoint of ddp_from_scratch"
        assert refusal(checkpoint.load, path) == told
    for path in (tmp_path, tmp_path / "none.pt"):
        assert refusal(checkpoint.load, path).startswith(f"cannot read checkpoint {path}: ")


def test_one_that_may_be_whole_is_not_passed_over(tmp_path, monkeypatch):
    """Another program, or the same in an hour, reads it."""
    checkpoint.save(tmp_path, state(1))
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    newer = checkpoint.save(tmp_path, state(2))
    monkeypatch.undo()
    told = "checkpoint version 2, this program reads up to 1: install a newer"
    with pytest.raises(UsageError, match=told):
        newest(tmp_path)
    newer.unlink()
    newer.symlink_to(newer.name)  # an OSError whoever runs the tests
    with pytest.raises(UsageError, match=r"cannot read checkpoint .*-000002\.pt: Too many"):
        newest(tmp_path)
    assert checkpoint.files(tmp_path)[0] == newer


def test_a_run_goes_back_to_the_newest_whole_one_and_says_so(tmp_path, capsys):
    good, bad = (checkpoint.save(tmp_path, state(step)) for step in (1, 2))
    damaged = bytearray(bad.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bad.write_bytes(damaged)
    assert newest(tmp_path)["step"] == 1
    told = capsys.readouterr()
    assert told.out == f"resuming from {good}: epoch 1, step 1\n"
    assert told.err == (
        f"warning: {bad} is damaged: its bytes are not those that were written (sha256 differs); "
        f"using checkpoint-000001.pt instead\n"
    )
    # The good one is not removed in favour of that, which somebody may want to look at.
    assert bad.with_suffix(".unreadable").read_bytes() == damaged
    newer = checkpoint.save(tmp_path, state(3))
    assert checkpoint.files(tmp_path) == [newer, good]
    for path in (good, newer):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be read"):
        newest(tmp_path)
    assert newest(tmp_path / "nothing") is None


def test_a_folder_of_another_run_is_refused_and_what_a_killed_one_left_removed(tmp_path):
    folder, elsewhere = tmp_path / "a", tmp_path / "b"
    path, other = (checkpoint.save(f, state(1)) for f in (folder, elsewhere))
    (folder / "checkpoint-000002.tmp").touch()
    with pytest.raises(UsageError, match="another run: continue that one with --resume auto"):
        checkpoint.prepare_folder(folder, resume=None)
    # Its checkpoints would be removed as soon as this run has two of its own.
    with pytest.raises(UsageError, match=f"holds the checkpoints of another run than.*{other}: "):
        checkpoint.prepare_folder(folder, resume=str(other))
    assert path.exists()
    for resume in ("auto", str(path), f"{tmp_path}/b/../a/{path.name}"):
        checkpoint.prepare_folder(folder, resume=resume).close()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-000001.pt"]
    checkpoint.prepare_folder(tmp_path / "c", resume=str(path)).close()


def test_a_link_is_not_followed(tmp_path):
    """It may lead to any file of the user's."""
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("precious")
    folder.mkdir()
    for name in (".lock", "checkpoint-000001.tmp"):
        (folder / name).symlink_to(precious)
    assert not checkpoint.save(folder, state(1)).is_symlink()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*\.lock is a symbolic link: remove"):
        checkpoint.prepare_folder(folder, resume="auto")
    assert precious.read_text() == "precious"


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    lock = checkpoint.prepare_folder(tmp_path, resume="auto")
    left = tmp_path / "checkpoint-000001.tmp"
    left.touch()  # it writes
    with pytest.raises(UsageError, match="in use by another run: give"):
        checkpoint.prepare_folder(tmp_path, resume="auto")
    assert left.exists()
    lock.close()
    checkpoint.prepare_folder(tmp_path, resume="auto").close()


def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path / "folder", state(1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*file/x cannot be written to: Not a"):
        checkpoint.prepare_folder(tmp_path / "file" / "x", resume=None)
    with pytest.raises(UsageError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file" / "x", state(1))
    save = torch.save

    def full_disk(content, file):
        """As on a full disk: torch's own error is of a position that it did not expect."""
        with open("/dev/full", "wb", buffering=0) as full:
            try:
                save(content, full)
            except OSError as error:
                raise RuntimeError("unexpected pos 640 vs 588") from error

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UsageError, match=r"cannot write .*000002\.pt: No space left on device$"):
        checkpoint.save(old.parent, state(2))
    assert names(old.parent) == [old.name]
    checkpoint.load(old)


def changed(content, path, value):
    """`content` with another value at "key/key", or without that key where it is `...`."""
    key, _, rest = path.partition("/")
    key = int(key) if key.isdecimal() else key
    if isinstance(content, tuple):
        return tuple(changed(list(content), path, value))
    content = copy.copy(content)
    if rest:
        content[key] = changed(content[key], rest, value)
    elif value is ...:
        del content[key]
    else:
        content[key] = value
    return content


def check(content):
    checkpoint.check_contents(content)
    checkpoint.check_fit(content, MODEL)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("epoch", 11, "epochs must be 11 or more, got 10"),
        ("settings/dataset", 3, "dataset of settings must be str, got 3"),
        ("model_spec/depth", 8, "model_spec has more"),
        ("scaler/scale", float("nan"), "scale of scaler must be 0 or more, got nan"),
        ("buckets/bucket_cap_mb", "big", "bucket_cap_mb is not a size"),
        ("rng/0/python", (3, (1, 2), None), "python of rng of rank 0 must have 625 entries"),
        ("rng/0/torch", torch.zeros(5056, dtype=torch.uint8), "rng of rank 0 cannot be used"),
        # What does not fit the model.
        ("model/bias", ..., "the model has no bias"),
        ("model/more", torch.zeros(4), "the model has no 'more'"),
        ("model/weight", torch.zeros(1).expand(3, 4), "weight of the model must be"),
        ("optimizer/state/1", {"momentum_buffer": torch.zeros(4)}, "state of parameter 1 must be"),
        ("ready_order", ["bias"], "ready_order does not name each parameter once"),
        ("compression/qs/weight", torch.zeros(5, 1), "compression of weight must be a tensor of"),
    ],
)
def test_wrong_contents(path, value, told):
    assert told in refusal(check, changed(state(1), path, value))


def test_a_checkpoint_with_wrong_contents_is_passed_over(tmp_path):
    older = {name: v for name, v in state(1)["settings"].items() if name != "stragglers"}
    checkpoint.check_contents(
        state(1) | {"settings": older | {"later": [1, 2]}}
    )  # of another version
    checkpoint.save(tmp_path, state(1))
    bad = checkpoint.save(tmp_path, state(2) | {"epoch": -1})
    with pytest.raises(UsageError, match=f"{bad} is no checkpoint that a run has written: epoch"):
        checkpoint.load(bad)
    assert newest(tmp_path)["step"] == 1


def places(content, prefix=""):
    for key in content if isinstance(content, dict) else range(len(content))[:3]:
        yield f"{prefix}{key}", content[key]
        if isinstance(content[key], dict | list | tuple):
            yield from places(content[key], f"{prefix}{key}/")


def kind_of(value):
    return dict if isinstance(value, dict) else type(value)


TYPES = ("x", True, 1j, b"x", [1], {"x": 1}, torch.ones(2), torch.ones((), dtype=torch.int64))
ODD = (..., None, -1, 0.5, 2**70, [], {}, [None], torch.zeros(2), float("nan"))


def test_whatever_stands_there_is_right_or_refused():
    """No value ends in another exception than that line, and none of another type is taken."""
    good = state(1)
    good |= {"rng": good["rng"] * 2, "world_size": 2}
    good["compression"]["errors"] *= 2
    check(good)
    refusals, loads = [], []
    for path, before in places(good):
        for value in TYPES + ODD:
            try:
                check(changed(good, path, value))
            except UsageError as error:
                refusals.append(str(error))
                continue
            # An optional value may also be given. And a run has param_groups of its own.
            optional = before is None and value in ("x", None)
            right = kind_of(value) is kind_of(before) or optional or "param_groups" in path
            if not right and any(value is one for one in TYPES):
                loads.append(f"{path}: {before!r:.20} -> {value!r:.20}")
    assert loads == []
    assert len(refusals) > 400
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_absurd_or_not_the_one_it_names_is_not_built(tmp_path):
    world = World(**vars(ALONE), backend="gloo", device=torch.device("cpu"))
    for key, value, why in (
        ("image_size", 2**20, "mlp: the model has no "),
        ("image_size", 2**40, "mlp: "),
        ("name", "mlp", "mlp: the model has no "),
        ("name", "mlq", "mlq: unknown model 'mlq'"),
    ):
        path = checkpoint.save(tmp_path, changed(state(1), f"model_spec/{key}", value))
        told = refusal(load_model, path, world, torch.distributed.group.WORLD)
        assert told.startswith(f"{path} does not fit its own model {why}")
