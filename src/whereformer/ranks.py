"""The processes that torchrun or accelerate launch started for one run: how many, which one this is, what they share.

Without a launcher there is one process, nothing here communicates, and torch is not imported. The processes exchange
small things, such as counts and scores, over a group on the CPU; gradients are the training loop's business.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import MAX_NAME, InputError, short_repr
from .files import is_disk_full

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

PATIENCE = timedelta(days=1)
"""How long a process waits for another. The main process may encode text for hours, and if a process dies, its launcher
ends the others."""

ARRIVAL = timedelta(seconds=50)
"""How long processes wait for one another at the start. A launcher starts them all at once."""

MAX_PROCESSES = 2**20
"""The most processes."""

LAUNCHER = "start it by torchrun or accelerate launch, or unset RANK and WORLD_SIZE to use one process"
LOST = (
    "gloo/transport",
    "remote process exited",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
)
"""Parts of the errors of torch.distributed about processes that are gone."""
_joined: dict[str, Any] = {}
"""The "group" of the processes that have joined; None where it is torch's own."""


def size() -> int:
    """Return the number of processes, which a launcher tells by variables of the environment.

    Raises:
        InputError: if one of them is no such number.
    """
    return _read_env("WORLD_SIZE", 1, MAX_PROCESSES) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the number of this process; 0 is the main process."""
    return _read_env("RANK", 0, size() - 1) if size() > 1 else 0


def _read_env(name: str, least: int, most: int) -> int:
    value = os.environ.get(name, str(least))
    if not re.fullmatch("[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise InputError(None, f"expected {name} from {least} to {most}, got {short_repr(value)}; {LAUNCHER}")
    return int(value)


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def join(device: torch.device) -> None:
    """Join the other processes, for training on this kind of device. Each process on a machine gets its own GPU."""
    if size() == 1 or _joined:
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    number, count = rank(), size()
    try:
        store, _, _ = next(rendezvous("env://", timeout=ARRIVAL))
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            None, f"{count} processes did not meet within {ARRIVAL.seconds} seconds ({reason:.200}); {LAUNCHER}"
        ) from None
    store.set_timeout(PATIENCE)
    _joined["group"] = None
    if device.type == "cuda":
        torch.cuda.set_device(_read_env("LOCAL_RANK", 0, count - 1))
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    if backend != "gloo":
        _joined["group"] = distributed.new_group(backend="gloo", timeout=PATIENCE)


def leave() -> None:
    """Leave the other processes at the end of a run."""
    if _joined:
        from torch import distributed

        # A wrapped model that outlives its group would free it. It holds Python's lock while it waits for the group's
        # threads, which need that lock too.
        gc.collect()
        distributed.destroy_process_group()
        _joined.clear()


def wait() -> None:
    """Wait until all processes are here."""
    gather(None)


@contextmanager
def main_first() -> Iterator[None]:
    """Let the main process run the block before the others, which then find what it has written."""
    if not is_main():
        wait()
    yield
    if is_main():
        wait()


def from_main(make: Callable[[], Value]) -> Value:
    """Return what ``make`` returns in the main process, in all processes. Only the main process calls it."""
    return gather(make() if is_main() else None)[0]  # type: ignore[return-value]  # the first is the main process's


def gather(value: Value) -> list[Value]:
    """Return the values of all processes, in the order of their numbers, in all processes."""
    if size() == 1:
        return [value]
    from torch import distributed

    found: list[Any] = [None] * size()
    distributed.all_gather_object(found, value, group=_joined["group"])
    return found


def open_folder(out: Path, field: str = "out") -> AbstractContextManager[Any]:
    """Create a folder, and lock it against other commands. Of several processes of a run, only the main one holds it.

    Raises:
        InputError: for ``field``, if it can't be made, or another command holds its lock.
    """
    if not is_main():
        return nullcontext()
    from filelock import FileLock, Timeout

    try:
        os.path.abspath(out).encode()  # tokenizers write to no other path
        out.mkdir(parents=True, exist_ok=True)
        return FileLock(out / ".lock").acquire(blocking=False)
    except Timeout:
        raise InputError(field, f"another command is writing to {out}; wait for it or choose another folder") from None
    except (OSError, ValueError) as error:
        if is_disk_full(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(field, f"cannot write to {short_repr(str(out), MAX_NAME)}: {reason}") from None


def should_print_errors() -> bool:
    """Return whether this process says why it fails. Before they join, those of a machine fail alike."""
    return bool(_joined) or os.environ.get("LOCAL_RANK", "0") == "0"


def is_lost_process(error: Exception) -> bool:
    """Return whether an error is that of a connection to a process which has ended without a word, as if killed."""
    return bool(_joined) and isinstance(error, RuntimeError) and any(part in str(error) for part in LOST)
