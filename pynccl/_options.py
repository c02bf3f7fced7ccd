"""Types of the options of the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A number of seconds in a range; click lets nan pass, which is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return seconds
