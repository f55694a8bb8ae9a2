"""What tests do to texts and encodings: read them, interrupt and damage them, and look at what is in a folder."""

import pytest

from whereformer import files
from whereformer.data.corpus import TextSource


def load_documents(paths, column=None):
    return ["".join(document) for document in TextSource(paths, column).documents()]


def only_folder(cache):
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    return folder


def contents(cache):
    """The bytes of all files of the only entry."""
    return {file.name: file.read_bytes() for file in only_folder(cache).iterdir() if file.name != ".lock"}


def stop_before_the_end(run):
    """Run something, and interrupt it when all is encoded and nothing has its name yet."""

    def move_folder(source, target):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "move_folder", move_folder)
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
