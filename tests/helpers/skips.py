"""A pytest plugin: counts skips, and names those that tests/skips.txt does not list.

With TESTS_SKIPS=strict these fail the run.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "skips.txt"


class Skips:
    def __init__(self, allowed: list[tuple[str, str]]) -> None:
        self.allowed = allowed
        self.listed: list[str] = []
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            # The longrepr of a skip is its file, line and reason.
            reason = report.longrepr[2].removeprefix("Skipped: ")  # type: ignore[index]
            self.add(report.nodeid.split("[")[0], reason)

    def add(self, test: str, reason: str) -> None:
        known = any(fnmatchcase(test, tests) and fnmatchcase(reason, why) for tests, why in self.allowed)
        (self.listed if known else self.unlisted).append(f"{test}: {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        # Workers of pytest-xdist do not report that a whole file is skipped, only that it fails.
        report = yield
        if report.skipped and os.environ.get("TESTS_SKIPS") == "strict":
            report.outcome, report.longrepr = "failed", f"a whole file is skipped: {report.longrepr}"
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        strict = os.environ.get("TESTS_SKIPS") == "strict"
        if strict and self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = len(self.listed) + len(self.unlisted)
        terminalreporter.write_line(f"{total} skips, {len(self.unlisted)} of them not in {LIST.name}")
        for line in sorted(set(self.unlisted)):
            terminalreporter.write_line(f"not in {LIST.name}: {line}", red=True)


def allowed() -> list[tuple[str, str]]:
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return [(tests, why.strip()) for tests, _, why in (line.partition(" ") for line in lines)]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(allowed()))
