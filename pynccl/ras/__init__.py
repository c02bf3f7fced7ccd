"""NCCL's RAS service: the state of a running job, asked over its text protocol.

report  what a server answered, as frozen dataclasses
client  the connection
as_json, as_text  the two formats of an answer

Imported by `_tools`.
"""

from pynccl.ras.client import status as status
from pynccl.ras.report import Communicator as Communicator
from pynccl.ras.report import Group as Group
from pynccl.ras.report import Lag as Lag
from pynccl.ras.report import MissingProcess as MissingProcess
from pynccl.ras.report import MissingRank as MissingRank
from pynccl.ras.report import Rank as Rank
from pynccl.ras.report import RasError as RasError
from pynccl.ras.report import Status as Status

__all__ = [
    "Communicator",
    "Group",
    "Lag",
    "MissingProcess",
    "MissingRank",
    "Rank",
    "RasError",
    "Status",
    "status",
]
