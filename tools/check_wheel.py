"""Say whether a wheel can be a manylinux_2_28 one, and where it cannot, why."""

from __future__ import annotations

import platform
import subprocess
import sys


def main(wheel: str) -> int:
    """Let auditwheel relabel the wheel; a build machine that is too new is told, any other failure is one."""
    target = f"manylinux_2_28_{platform.machine()}"
    audit = [sys.executable, "-m", "auditwheel"]
    repair = [*audit, "repair", "--plat", target, "--only-plat", "--wheel-dir", "dist/manylinux", wheel]
    done = subprocess.run(repair, capture_output=True, text=True)
    if done.returncode == 0:
        print(f"{wheel} passes as {target}: see dist/manylinux")
        return 0
    print(subprocess.run([*audit, "show", wheel], capture_output=True, text=True).stdout)
    if "too-recent versioned symbols" in done.stderr:
        print(
            f"{wheel} is good here but not {target}: it was linked against this machine's newer C library.\n"
            "Run `make wheel` in the manylinux_2_28 image for one that is."
        )
        return 0
    print(done.stderr, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
