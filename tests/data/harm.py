"""What tests of caches do to an encoding: interrupt it, damage it, and look at what is in its folder."""

import numpy as np
import pytest

from whereformer.data import encode
from whereformer.lab.json_files import read_json, sealed, write_json


def only_folder(cache):
    [found] = [path for path in cache.iterdir() if path.is_dir()]
    return found


def contents(cache):
    """The bytes of all files of the only entry."""
    return {file.name: file.read_bytes() for file in only_folder(cache).iterdir() if file.name != ".lock"}


def stop_before_the_end(run):
    """Run something, and interrupt it when all is encoded and nothing has its name yet."""

    def move_folder(source, target):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode, "move_folder", move_folder)
        with pytest.raises(KeyboardInterrupt):
            run()


DAMAGE = ("missing", "cut", "flipped", "longer", "empty")


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        content[len(content) // 2] ^= 64
        path.write_bytes(content)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(content + b"more")


def rewrite(folder, name, dtype, change):
    """Change the numbers in a file of an entry, and make its table of contents say that this is what was written."""
    path = folder / name
    path.write_bytes(np.asarray(change(np.fromfile(path, dtype)), dtype).tobytes())
    reseal(folder)


def reseal(folder, **facts):
    """Make an entry's table of contents fit its files and these numbers."""
    content = read_json(folder / encode.CONTENTS)
    files = {name: encode._hash(folder / name) for name in content["files"]}
    write_json(folder / encode.CONTENTS, sealed({"files": files, "facts": {**content["facts"], **facts}}))
