"""What a check finds: the check's name, a level, what is so, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    name: str
    level: Level
    text: str
    why: str = ""
    fix: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(name, "ok", text)


def warning(name: str, text: str, why: str, fix: str) -> Finding:
    """Return a finding that costs speed, or fails in some jobs."""
    return Finding(name, "warning", text, why, fix)


def error(name: str, text: str, why: str, fix: str) -> Finding:
    """Return a finding with which a job fails."""
    return Finding(name, "error", text, why, fix)


def worst(findings: list[Finding]) -> Level:
    """Return the highest level."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
