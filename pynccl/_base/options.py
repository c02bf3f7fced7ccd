"""Types of the options of the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class Integer(click.IntRange):
    """An IntRange that click's errors call "integer" where the value is not a number."""

    name = "integer"


class Number(click.FloatRange):
    """A number in a range; click lets nan pass, which is in none."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Seconds(Number):
    """A number of seconds in a range."""

    name = "number of seconds"
