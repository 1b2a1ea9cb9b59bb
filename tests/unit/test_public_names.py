"""The package's public names are what they say, in whatever order modules are imported."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, types, specdec_ext
for module in pkgutil.walk_packages(specdec_ext.__path__, "specdec_ext."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
# Importing a submodule binds its name in the package: it must not hide a public function.
hidden = [n for n in specdec_ext.__all__ if isinstance(getattr(specdec_ext, n), types.ModuleType)]
assert not hidden, hidden
"""


def test_no_module_hides_a_public_name() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
