"""The training loop: the same bits after every interruption, one process or several, and no wait for the device."""

import math
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from tests.failing import largest_file
from tests.recipes.trainings import same
from whereformer import manifest, ranks
from whereformer.data.tokenizers import build_vocabulary
from whereformer.data.windows import Stage, Windows
from whereformer.errors import InputError
from whereformer.lab.small_encoders import build, small_config
from whereformer.lab.train import Checkpoints, NotFiniteError, Training, train
from whereformer.models import EncoderConfig

STEPS = 12
STREAM = torch.randint(5, 64, (20_000,), generator=torch.Generator().manual_seed(0))
WINDOWS = Windows(STREAM, build_vocabulary(64), [Stage(16, STEPS, 8)], 0.4)


def model(position="tisa", dropout=0.1):
    config = small_config(
        vocab_size=64,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        blocks="2",
        position=position,
        max_position_embeddings=16,
    )
    config = EncoderConfig.from_dict({**config.to_dict(), "hidden_dropout_prob": dropout})
    return build(config, 0).requires_grad_(True)


def batches(step):
    batch = WINDOWS.batch(step)
    batch["labels"][0, : step % 8] = -100  # so that processes have different numbers of labels
    return batch


def plan(**options):
    return Training(**{"steps": STEPS, "rate": 5e-3, "log_every": 5, **options})


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class StopError(Exception):
    pass


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_killed_training_continues_to_the_same_bits(schedule, tmp_path):
    training = plan(schedule=schedule, log_every=1)
    to = Checkpoints(tmp_path, 4, {"seed": 0})

    def scores(model):
        return {"score": lambda step: model.head.decoder.bias.sum().item(), "score_at": (3, 10)}

    unbroken = model()
    expected = train(unbroken, batches, training, **scores(unbroken))

    def stop(steps, loss):
        first_steps.append(steps)
        if sum(first_steps) == 9:
            raise StopError

    first_steps = []
    with pytest.raises(StopError):
        train(killed := model(), batches, training, checkpoints=to, on_log=stop, **scores(killed))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
    (tmp_path / "checkpoint-12.partial").mkdir()  # of a kill while it was written
    later_steps, again = [], model()
    progress = train(
        again, batches, training, checkpoints=to, on_log=lambda steps, loss: later_steps.append(steps), **scores(again)
    )
    assert progress == expected
    assert later_steps[0] == 8
    assert same(weights(again), weights(unbroken))


@pytest.mark.slow
def test_a_compiled_model_trains_alike():
    compiled, expected = model(dropout=0.0), model(dropout=0.0)
    compiled.config.label_share = expected.config.label_share = 0.4
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert train(compiled, WINDOWS.batch, plan(compiled=True)).losses == pytest.approx(
        train(expected, WINDOWS.batch, plan()).losses
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1  # the whole model, for all steps
    for name, weight in weights(compiled).items():
        torch.testing.assert_close(weight, weights(expected)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("number", "last"), [(signal.SIGINT, 7), (signal.SIGTERM, 7), (signal.SIGINT, STEPS)])
def test_a_signal_saves_and_stops(number, last, tmp_path):
    to, handlers = Checkpoints(tmp_path, 100), signal.getsignal(number)

    def send(step):
        if step + 1 == last:
            os.kill(os.getpid(), number)
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        train(model(), send, plan(), checkpoints=to)
    assert signal.getsignal(number) is handlers
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{last}"]
    progress = train(continued := model(), batches, plan(), checkpoints=to)
    assert progress == train(unbroken := model(), batches, plan())
    assert same(weights(continued), weights(unbroken))


@pytest.mark.parametrize("damage", ["flip", "delete", "manifest", "other", "step"])
def test_a_checkpoint_that_is_damaged_or_of_another_training_is_passed_over(damage, tmp_path):
    lines = []
    to = Checkpoints(tmp_path, 4, {"seed": 0}, lines.append, max_checkpoints=2)
    expected = train(model(), batches, plan(), checkpoints=to)
    newest = tmp_path / "checkpoint-8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", newest.name]
    if damage == "flip":
        content = bytearray((newest / "state.pt").read_bytes())
        content[len(content) // 2] ^= 1
        (newest / "state.pt").write_bytes(content)
    elif damage == "delete":
        (newest / "state.pt").unlink()
    else:
        written = (newest / "manifest.json").read_text()
        changes = {"other": ('"seed": 0', '"seed": 1'), "step": ('"step": 8', '"step": 9')}
        (newest / "manifest.json").write_text(written.replace(*changes.get(damage, (written, written[:-9]))))
    assert train(model(), batches, plan(), checkpoints=to) == expected
    assert lines[0].startswith(f"skipping {newest}: ")
    assert lines[1:] == [f"{tmp_path}: continuing after step 4 of 12"]


def test_another_number_of_processes_continues_with_random_numbers_of_its_own(tmp_path):
    to = Checkpoints(tmp_path, 8, save_extra=lambda folder: (folder / "more.txt").write_text("more"))
    expected = train(model(), batches, plan(), checkpoints=to)
    checkpoint = tmp_path / "checkpoint-8"
    assert "more.txt" in (checkpoint / manifest.NAME).read_text()
    state = torch.load(checkpoint / "state.pt")
    torch.save({**state, "random": state["random"] * 2}, checkpoint / "state.pt")
    manifest.write(checkpoint, manifest.read(checkpoint))
    progress = train(model(), batches, plan(), checkpoints=to)
    assert progress.losses[:8] == expected.losses[:8]
    assert progress.losses[8:] == pytest.approx(expected.losses[8:], rel=0.05)
    assert progress.losses[8:] != expected.losses[8:]


class Touch:
    """What runs code when a pickle of it is opened."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("forged", ["code", "text", "nothing", "no model", "no random numbers", "means", "numbers"])
def test_a_forged_checkpoint_that_does_not_load_is_named(forged, tmp_path):
    to = Checkpoints(tmp_path / "a", 8)
    train(model(), batches, plan(), checkpoints=to)
    checkpoint = to.folder / "checkpoint-8"
    state, file = torch.load(checkpoint / "state.pt"), checkpoint / "state.pt"
    first = state["optimizer"]["state"][0]
    changes = {
        "code": {"model": Touch(tmp_path / "ran")},
        "no model": {"model": {}},
        "no random numbers": {"random": [{}]},
        "means": {"optimizer": {**state["optimizer"], "state": {0: {**first, "exp_avg": torch.ones(1)}}}},
        "numbers": {"optimizer": {**state["optimizer"], "state": {0: {"step": first["step"]}}}},
    }
    if forged in changes:
        torch.save({**state, **changes[forged]}, file)
    else:
        file.write_text("" if forged == "nothing" else "text")
    manifest.write(checkpoint, manifest.read(checkpoint))
    with pytest.raises(InputError, match=rf"^{checkpoint} cannot be loaded \([^()]{{5,200}}.*\); move it away$"):
        train(model(), batches, plan(), checkpoints=to)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "done",
    [None, {"step": 9}, {"step": 8, "losses": ["1"] * 8}, {"step": 8, "losses": [math.inf] * 8}, {"step": 0}, {"a": 1}],
)
def test_a_forged_training_is_passed_over(done, tmp_path):
    lines = []
    to = Checkpoints(tmp_path, 4, log=lines.append, max_checkpoints=2)
    expected = train(model(), batches, plan(), checkpoints=to)
    newest = tmp_path / "checkpoint-8"
    manifest.write(newest, {**manifest.read(newest), "done": done})
    assert train(model(), batches, plan(), checkpoints=to) == expected
    assert lines[0] == f"skipping {newest}: its manifest does not describe a checkpoint"


def test_a_checkpoint_of_another_version_is_passed_over(tmp_path, monkeypatch):
    lines = []
    to = Checkpoints(tmp_path, 4, log=lines.append)
    expected = train(model(), batches, plan(), checkpoints=to)
    version = manifest.version(tmp_path / "checkpoint-8")
    monkeypatch.setattr("whereformer.lab.train.this_version", lambda: "9.9.9")
    assert train(model(), batches, plan(), checkpoints=to) == expected
    assert lines == [
        f"skipping {tmp_path / 'checkpoint-8'}: it is of whereformer {version} (that version continues it)"
    ]


def test_a_checkpoint_that_was_passed_over_pushes_out_none_of_this_training(tmp_path):
    """It has a later step than those that follow, of which the newest one is needed."""
    train(model(), batches, plan(), checkpoints=Checkpoints(tmp_path, 4, "another", max_checkpoints=1))
    stops = plan(steps=STEPS, log_every=1)
    saved, lines = [], []

    def interrupted(step):
        if step == 4:
            saved.append(sorted(path.name for path in tmp_path.iterdir()))
        return batches(step)

    train(model(), interrupted, stops, checkpoints=Checkpoints(tmp_path, 4, "this", lines.append, 1))
    assert saved == [["checkpoint-4", "checkpoint-8"]]
    assert lines == [f"skipping {tmp_path / 'checkpoint-8'}: it was saved with different settings"]


def test_a_batch_without_labels_is_blamed_not_the_learning_rate():
    def empty(step):
        batch = batches(step)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)} if step == 2 else batch

    with pytest.raises(InputError, match=r"^step 3 has nothing to predict, so its loss is not a number") as error:
        train(model(), empty, plan())
    assert not isinstance(error.value, NotFiniteError)


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path):
    to = Checkpoints(tmp_path, 4)
    with largest_file(2000), pytest.raises(InputError, match=r"^cannot write .*/checkpoint-4: "):
        train(model(), batches, plan(), checkpoints=to)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_is_found_at_its_step(tmp_path):
    broken = model()

    def bad(step):
        if step == 6:
            torch.nn.init.constant_(broken.encoder.embeddings.word.weight, math.nan)
        return batches(step)

    with pytest.raises(NotFiniteError) as error:
        train(broken, bad, plan(), checkpoints=Checkpoints(tmp_path, 8))
    message = "learning_rate: the loss is not finite (NaN or inf) after 6 steps; 0.005 is too high, try 0.00125"
    assert str(error.value) == message
    assert error.value.problem == "the loss is not finite (NaN or inf) after 6 steps"
    assert not list(tmp_path.iterdir())


def test_parts_of_a_batch_take_the_step_of_all_of_it():
    single, parted = model(dropout=0.0), model(dropout=0.0)
    one = train(single, batches, plan()).losses
    two = train(parted, batches, plan(accumulate=2)).losses
    assert two == pytest.approx(one, rel=1e-4)
    for name, weight in weights(single).items():
        torch.testing.assert_close(parted.state_dict()[name], weight, atol=1e-3, rtol=1e-3)


def test_a_part_without_a_row_or_a_label_does_not_count():
    def two_rows(step):
        rows = {name: tensor[5:7] for name, tensor in batches(step).items()}
        return {**rows, "labels": rows["labels"].where(torch.tensor([[False], [True]]), -100)}

    one = train(model(dropout=0.0), two_rows, plan()).losses
    assert train(model(dropout=0.0), two_rows, plan(accumulate=3)).losses == pytest.approx(one, rel=1e-4)


def together(rank, folder, port):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    ranks.join(torch.device("cpu"))
    to, mine = Checkpoints(Path(folder), 4), model(dropout=0.0)
    done = train(mine, batches, plan(), checkpoints=to)
    assert ranks.gather(done.losses) == [done.losses] * 2
    again = model(dropout=0.0)
    assert train(again, batches, plan(), checkpoints=to) == done  # from step 8
    assert same(weights(again), weights(mine))
    if rank == 0:
        torch.save((done.losses, weights(mine)), Path(folder, "found.pt"))
    ranks.leave()


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    multiprocessing.spawn(together, (str(tmp_path), port), nprocs=2)
    losses, trained = torch.load(tmp_path / "found.pt")
    alone = model(dropout=0.0)
    assert train(alone, batches, plan()).losses == pytest.approx(losses, rel=1e-4)
    for name, weight in weights(alone).items():
        torch.testing.assert_close(trained[name], weight, atol=1e-3, rtol=1e-3)
    shutil.rmtree(tmp_path)


class Waits(TorchDispatchMode):
    """Counts, by step, the calls of ``.item()``, ``float(tensor)`` and ``bool(tensor)``.

    With ``sizes``, also results whose size depends on numbers.
    """

    def __init__(self, *, sizes=False):
        super().__init__()
        self.step, self.found, self.sizes = 0, Counter(), sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else ()
        by_mask = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if name == "_local_scalar_dense" or (self.sizes and (by_mask or name in ("nonzero", "masked_select"))):
            self.found[self.step] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("position", ["none", "rope", "tisa", "shaw", "learned"])
def test_no_step_waits_for_the_device(position):
    mode, prepared = Waits(), [batches(step) for step in range(STEPS)]

    def batch(step):
        mode.step = step + 1
        return prepared[step]

    with mode:
        train(model(position), batch, plan())
    assert set(mode.found) <= {0, 5, 10, 12}, mode.found
