"""Jobs as tasks of a Ray cluster, whose machines all see the folder of the run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from .._extras import require
from ..errors import InputError, one_line
from ..provenance import this_version

Key = TypeVar("Key")
Result = TypeVar("Result")

RETRIES = 3
"""How many times a job begins again if its worker or machine is lost."""
LOCAL = "local"
"""The address that stands for a cluster on this machine, which ends with the command."""


def map_on_cluster(
    address: str,
    folder: Path,
    compute: Callable[[Key], Result],
    keys: Sequence[Key],
    *,
    threads: int,
    gpus: float,
    quiet: bool,
) -> Generator[tuple[Key, Result]]:
    """Yield each key with ``compute(key)``, in the order of completion.

    Args:
        address: of a cluster, or LOCAL.
        folder: the folder of a run, which jobs read and write.
        compute: can be pickled, as the keys can.
        threads: the threads of a CPU that a job uses.
        gpus: the GPUs that a job uses; a fraction, if jobs share one.
        quiet: whether the jobs' prints do not arrive here.

    Raises:
        InputError: for ``ray``, if the cluster cannot be reached, a machine does not see the folder or has another
            version of this package, or machines are lost again and again. Errors of jobs are raised unchanged.
    """
    require("ray", "ray")
    import ray

    # A machine may have another folder of the same name.
    token = folder.resolve() / f".ray-{uuid4().hex}"
    with ExitStack() as stack:
        if not ray.is_initialized():
            _connect(ray, address, quiet)
            stack.callback(ray.shutdown)
        token.touch()
        stack.callback(token.unlink, missing_ok=True)
        task = ray.remote(_run_job).options(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)
        work = ray.put(compute)
        waiting = {task.remote(work, token, Path.cwd(), this_version(), key): key for key in keys}
        try:
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


def _connect(ray: Any, address: str, quiet: bool) -> None:
    """Connect to a cluster, or start one on this machine."""
    try:
        host, _, port = address.rpartition(":")
        if host and "/" not in host:
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would try for minutes, then exit
        ray.init(None if address == LOCAL else address, log_to_driver=not quiet, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise InputError("ray", f"cannot reach a cluster at {address}: {one_line(str(error))}") from None


def _run_job(compute: Callable[[Key], Result], token: Path, start: Path, version: str, key: Key) -> Result:
    """Compute one job on a machine of the cluster, in the folder where the command started; paths may be relative.

    The machine must have this version of the package, and see the run's folder.
    """
    machine = socket.gethostname()
    if this_version() != version:
        raise InputError("ray", f"{machine} has whereformer {this_version()}, and this machine {version}")
    if not token.exists() or not start.is_dir():
        missing = start if token.exists() else token.parent
        raise InputError("ray", f"{machine} does not see {missing}; use storage that all machines share")
    with chdir(start):
        return compute(key)
