"""Jobs as tasks of a Ray cluster, whose machines all see the folder of the run."""

from __future__ import annotations

import pickle
import re
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from .._extras import require
from ..errors import InputError, one_line, short_repr
from ..provenance import this_version

Key = TypeVar("Key")
Result = TypeVar("Result")

RETRIES = 3
"""How many times a job begins again if its worker or machine is lost."""
PRINT_SECONDS = 0.5
"""How long the connection stays open for the last prints of jobs. Ray waits as long, but only if Python exits."""


def connect(address: str, *, quiet: bool) -> ExitStack:
    """Connect to a cluster until the block of the result ends, unless this process is connected already.

    Args:
        address: of a cluster, or "local" to start one on this machine.
        quiet: whether the jobs' prints do not arrive here.

    Raises:
        InputError: for ``ray``, if the address is not valid, ray is not installed, or the cluster cannot be reached.
    """
    server = re.fullmatch(r"(?:ray://)?([^/]+):(\d{1,5})", address)
    if server is None and address not in ("auto", "local"):
        raise InputError("ray", f"expected auto, local, HOST:PORT or ray://HOST:PORT, got {short_repr(address)}")
    connection = ExitStack()
    try:
        require("ray", "ray")
        import ray

        if server is not None:  # Ray would try for minutes, then exit
            socket.create_connection((server[1].strip("[]"), int(server[2])), timeout=10).close()
        if not ray.is_initialized():
            ray.init(address, log_to_driver=not quiet, include_dashboard=False)
            connection.callback(ray.shutdown)
            connection.callback(time.sleep, 0 if quiet else PRINT_SECONDS)
    except ImportError as error:
        raise InputError("ray", str(error)) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError("ray", f"cannot reach a cluster at {address}: {one_line(str(error))}") from None
    return connection


def map_on_cluster(
    folder: Path, compute: Callable[[Key], Result], keys: Sequence[Key], *, threads: int, gpus: float
) -> Generator[tuple[Key, Result]]:
    """Yield each key with ``compute(key)``, in the order of completion.

    Args:
        folder: the folder of a run, which jobs read and write.
        compute: can be pickled, as the keys can.
        threads: the threads of a CPU that a job uses.
        gpus: the GPUs that a job uses; a fraction, if jobs share one.

    Raises:
        InputError: for ``ray``, if a machine does not see the folder or has another version of this package, or
            machines are lost again and again. Errors of jobs are raised unchanged.
    """
    import ray

    # A machine may have another folder of the same name.
    token = folder.resolve() / f".ray-{uuid4().hex}"
    waiting: dict[Any, Key] = {}
    try:
        token.touch()
        task = ray.remote(_run_job).options(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)
        # Ray itself would load ``compute`` before the worker's path has the folder of a user's file.
        work = ray.put((sys.path, ray.cloudpickle.dumps(compute)))
        waiting |= {task.remote(work, token, Path.cwd(), this_version(), key): key for key in keys}
        while waiting:
            done, _ = ray.wait([*waiting])
            yield waiting[done[0]], ray.get(done[0])
            del waiting[done[0]]
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise InputError("ray", f"a machine was lost {RETRIES + 1} times: {one_line(str(error))}") from None
    finally:
        for reference in waiting:
            ray.cancel(reference)
        token.unlink(missing_ok=True)


def _run_job(work: tuple[list[str], bytes], token: Path, start: Path, version: str, key: Key) -> Any:
    """Compute one job on a machine of the cluster, in the folder where the command started; paths may be relative."""
    machine = socket.gethostname()
    if this_version() != version:
        raise InputError("ray", f"{machine} has whereformer {this_version()}, and this machine {version}")
    if not token.exists() or not start.is_dir():
        missing = start if token.exists() else token.parent
        raise InputError("ray", f"{machine} does not see {missing}; use storage that all machines share")
    search_path, compute = work
    with chdir(start):
        sys.path += [entry for entry in search_path if entry not in sys.path]
        return pickle.loads(compute)(key)
