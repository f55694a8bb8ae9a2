"""What tests of caches do to an encoding: interrupt it, and look at what is in its folder."""

import json

import pytest

from whereformer.data import shards


def stop_at(count, run):
    """Run something, and interrupt it when the disk is to have the ``count``-th piece of a shard."""
    real, ended = shards.Appended.end_shard, []

    def end_shard(self):
        if len(ended) == count:
            raise KeyboardInterrupt
        ended.append(self.path)
        return real(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards.Appended, "end_shard", end_shard)
        with pytest.raises(KeyboardInterrupt):
            run()


def only_folder(cache):
    [found] = [path for path in cache.iterdir() if path.is_dir()]
    return found


def index_of(cache):
    return json.loads((only_folder(cache) / "index.json").read_text())["index"]


def contents(cache):
    """The bytes of all files of the only entry, but for the index, which tells the shards."""
    return {file.name: file.read_bytes() for file in only_folder(cache).iterdir() if file.name != "index.json"}


DAMAGE = ("missing", "cut", "flipped", "longer")


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
