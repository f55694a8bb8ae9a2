"""The processes that torchrun or accelerate launch started for one run: their number, this one's rank, and their data.

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
"""The longest time that a process waits for another. The main process may encode text for hours, and if a process dies,
its launcher ends the others."""
ARRIVAL = timedelta(seconds=50)
"""The longest time that processes wait for one another at the start. A launcher starts them all at once."""
MAX_PROCESSES = 2**20
"""The largest number of processes."""
LAUNCHER = "start it by torchrun or accelerate launch, or unset RANK and WORLD_SIZE to use one process"
LOST = (
    "gloo/transport",
    "remote process exited",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
)
"""Parts of the errors of torch.distributed about processes that have ended."""
_joined: dict[str, Any] = {}
"""The "group" of the processes that have joined; None for torch's default group."""


def size() -> int:
    """Return the number of processes, which a launcher sets in the environment; an InputError if it is not valid."""
    return _read_env("WORLD_SIZE", 1, MAX_PROCESSES) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the number of this process; 0 is the main process."""
    return _read_env("RANK", 0, size() - 1) if size() > 1 else 0


def _read_env(name: str, minimum: int, maximum: int) -> int:
    value = os.environ.get(name, str(minimum))
    if not re.fullmatch("[0-9]{1,9}", value) or not minimum <= int(value) <= maximum:
        raise InputError(None, f"expected {name} from {minimum} to {maximum}, got {short_repr(value)}; {LAUNCHER}")
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
            None, f"not all {count} processes connected within {ARRIVAL.seconds} seconds ({reason:.200}); {LAUNCHER}"
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
    """Wait until all processes have come to this call."""
    gather(None)


@contextmanager
def main_first() -> Iterator[None]:
    """Let the main process run the block before the others, which then find its files."""
    if not is_main():
        wait()
    yield
    if is_main():
        wait()


def from_main(make: Callable[[], Value]) -> Value:
    """Call ``make`` in the main process only, and return its result in all processes."""
    return gather(make() if is_main() else None)[0]  # type: ignore[return-value]  # the first is the main process's


def gather(value: Value) -> list[Value]:
    """Return the values of all processes, in the order of their numbers, in all processes."""
    if size() == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * size()
    distributed.all_gather_object(values, value, group=_joined["group"])
    return values


def open_folder(out: Path, field: str = "out") -> AbstractContextManager[object]:
    """Create a folder, and lock it against other commands. If a run has several processes, only the main one locks it.

    Raises:
        InputError: for ``field``, if the folder can't be created, or another command holds its lock.
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
    """Return whether this process prints its error. Before they join, all processes of a machine fail alike."""
    return bool(_joined) or os.environ.get("LOCAL_RANK", "0") == "0"


def is_lost_process(error: Exception) -> bool:
    """Return whether an error is a broken connection to a process that was killed or ended without an error."""
    return bool(_joined) and isinstance(error, RuntimeError) and any(part in str(error) for part in LOST)
