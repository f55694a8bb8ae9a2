"""The run command: run a recipe of a user's own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from ..errors import InputError
from ..files import check_regular
from ..lab.recipe import Recipe

if TYPE_CHECKING:
    from ..lab.terminal import Terminal


@dataclass(frozen=True)
class RunFile:
    """Run a recipe of your own: a Python file with one subclass of whereformer.lab.recipe.Recipe.

    Its fields are the options; `whereformer run FILE --help` shows them.
    """

    file: Annotated[Path, Positional]
    """The Python file. The recipe's options follow it."""

    @staticmethod
    def recipe(file: str) -> type[Recipe]:
        """Import a file, and return its recipe.

        Raises:
            InputError: if it is no Python file, or has none or several.
        """
        path = Path(file)
        check_regular("file", path)
        if path.suffix != ".py" or not path.stem.isidentifier():
            raise InputError("file", f"expected a Python file such as my_recipe.py, got {file!r}")
        # Processes that train import it by this name.
        sys.path.insert(0, str(path.resolve().parent))
        module = import_module(path.stem)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise InputError("file", f"there is another module named {path.stem}; give the file another name")
        found = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Recipe) and kind.__module__ == path.stem
        ]
        if len(found) != 1:
            raise InputError("file", f"expected one recipe in {file}, got {len(found)}")
        return found[0]

    def run(self, console: Terminal) -> None:
        """Refuse what comes before the file; the command line does the rest."""
        raise InputError("file", "expected the file first, and its options after it")
