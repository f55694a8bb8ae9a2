"""Compiles the kernel for the CPU when a wheel is built, and makes the links of README.md absolute for PyPI."""

import atexit
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

FOLDER = "whereformer/kernels/native"


class Readme(MetadataHookInterface):
    """The package's description: README.md, whose links to files lead to those of this version in the repository."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description."""
        version = re.search(r'__version__ = "(.*)"', Path(self.root, "src/whereformer/version.py").read_text())
        files = f"{metadata['urls']['Homepage']}/raw/v{version[1]}/"
        pages = files.replace("/raw/", "/blob/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!\w+:|#)", f"]({pages}", text)
        text = re.sub(r'src="(?!\w+:)', f'src="{files}', text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class Kernel(BuildHookInterface):
    """Adds the compiled kernel to a wheel; for an editable install, puts it among the sources.

    Where no compiler is, the wheel does without.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and say in one line what became of it."""
        if os.environ.get("WHEREFORMER_NATIVE") == "0":
            return
        folder = Path(self.root, "src", FOLDER)
        build = load(folder / "build.py")
        if version == "editable":
            self.app.display(f"whereformer: {build.attempt(folder, folder / build.LIBRARY.name)}")
            return
        # Outside of the sources, so that installing a clone changes nothing in it.
        built = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, built)
        library = built / build.LIBRARY.name
        self.app.display(f"whereformer: {build.attempt(folder, library)}")
        for file in built.iterdir():
            build_data["force_include"][str(file)] = f"{FOLDER}/{file.name}"
        if library.exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


def load(file: Path) -> Any:
    """Import a file of the package without the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("whereformer_native_build", file)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """Return the tag of this platform: on Linux that of the machine alone; auditwheel finds out the oldest system."""
    if sys.platform.startswith("linux"):
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return next(iter(platform_tags()))
