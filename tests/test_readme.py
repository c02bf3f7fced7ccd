"""The README's program does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, clean_environment


def test_the_program_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.S)
    session = re.search(r"^\$ pynccl (run -n 4) hello.py\n(.*?)\n```", text, re.M | re.S)
    assert program is not None
    assert session is not None
    (tmp_path / "hello.py").write_text(program[1])
    command = [sys.executable, "-m", "pynccl", *session[1].split(), "--cpu", str(tmp_path / "hello.py")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == session[2]


def test_it_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
