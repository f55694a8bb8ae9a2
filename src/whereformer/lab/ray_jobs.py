"""Jobs as tasks of a Ray cluster: other machines compute, and this one keeps the folder."""

from __future__ import annotations

import io
import os
import pickle
import socket
import tarfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import uuid4

from .._extras import require
from ..errors import InputError, one_line
from ..files import write_atomically
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

    A machine that sees the folder works in it. Others get the files of its subfolders once, and the files that a job
    writes there come back with its result. Paths in the folder, wherever ``compute`` holds them, are adapted.

    Args:
        address: of a cluster, or LOCAL.
        folder: the folder of a run.
        compute: can be pickled.
        keys: can be pickled.
        threads: the threads of a CPU that a job uses.
        gpus: the GPUs that a job uses; a fraction, if jobs share one.
        quiet: whether the jobs' prints do not arrive here.

    Raises:
        InputError: for ``ray``, if the cluster cannot be reached, a machine has another version of this package, or
            machines are lost again and again. Errors of jobs are raised unchanged.
    """
    require("ray", "ray")
    import ray

    folder = folder.resolve()
    token = folder / f".ray-{uuid4().hex}"
    with ExitStack() as stack:
        if not ray.is_initialized():
            _connect(ray, address, quiet)
            stack.callback(ray.shutdown)
        token.touch()
        stack.callback(token.unlink, missing_ok=True)
        files = ray.put(pack(folder, list_files(folder)))
        work = ray.put(_dump(compute, folder))
        task = ray.remote(_run_job).options(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)
        waiting = {task.remote(work, files, token, this_version(), key): key for key in keys}
        try:
            while waiting:
                done, _ = ray.wait([*waiting])
                result, outputs = ray.get(done[0])
                unpack(outputs, folder)
                yield waiting.pop(done[0]), result
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


def _run_job(work: bytes, files: bytes, token: Path, version: str, key: object) -> tuple[object, bytes]:
    """Compute one job on a machine of the cluster; return its result and the files that it wrote, if they must be sent.

    With a file named ``token``, the run's folder is here, and nothing is sent.
    """
    if this_version() != version:
        reason = f"{socket.gethostname()} has whereformer {this_version()}, and this machine {version}"
        raise InputError("ray", reason)
    with ExitStack() as stack:
        folder, sees_folder = token.parent, token.exists()
        if not sees_folder:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="whereformer-")))
            unpack(files, folder)
        before = {path: path.stat().st_mtime_ns for path in list_files(folder)}
        result = _load(work, folder)(key)
        written = [path for path in list_files(folder) if before.get(path) != path.stat().st_mtime_ns]
        return result, b"" if sees_folder else pack(folder, written)


def list_files(folder: Path) -> list[Path]:
    """Return the files that jobs read or write: those in subfolders, because records and reports are not theirs."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder]


def pack(folder: Path, paths: Iterable[Path]) -> bytes:
    """Return files of a folder as an archive, without links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in paths:
            archive.add(path, path.relative_to(folder), recursive=False)
    return buffer.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """Write the files of an archive, each atomically, into a folder. Paths that lead out of it are refused."""
    if not content:
        return
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            name = tarfile.data_filter(member, str(folder)).name
            file = archive.extractfile(member)
            if file is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / name, file.read())


def _dump(value: object, folder: Path) -> bytes:
    """Pickle a value for :func:`_load`, with paths in a folder relative to it."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)

    def find_relative(value: object) -> str | None:
        if isinstance(value, Path) and Path(os.path.abspath(value)).is_relative_to(folder):
            return str(Path(os.path.abspath(value)).relative_to(folder))
        return None

    pickler.persistent_id = find_relative  # type: ignore[method-assign]
    pickler.dump(value)
    return buffer.getvalue()


def _load(content: bytes, folder: Path) -> Any:
    """Load what :func:`_dump` returned, with the paths in another folder."""
    unpickler = pickle.Unpickler(io.BytesIO(content))
    unpickler.persistent_load = lambda relative: folder / relative  # type: ignore[method-assign]
    return unpickler.load()
