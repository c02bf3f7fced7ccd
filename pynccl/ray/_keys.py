"""Ray's key-value store, which lives as long as the cluster, with the methods of a torch store."""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray.experimental import internal_kv

# Before the job: the store is one for all jobs of a cluster.
_PREFIX = "pynccl"


class Keys:
    """Keys below one path of this job. `live`, called by those who wait for others, may raise."""

    def __init__(self, *path: str, live: Callable[[], None] | None = None) -> None:
        self.path, self._live = path, live
        self.prefix = "/".join((_PREFIX, ray.get_runtime_context().get_job_id(), *path, ""))

    def __repr__(self) -> str:
        return f"Ray's key-value store ({'/'.join(self.path)})"

    def below(self, name: str) -> Keys:
        """Return the keys whose names begin with this one."""
        return Keys(*self.path, name)

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if it is not set."""
        value: bytes | None = internal_kv._internal_kv_get(self.prefix + name)
        return value

    def set(self, name: str, value: bytes | str) -> None:
        """Set a value."""
        internal_kv._internal_kv_put(self.prefix + name, value)

    def check(self, names: list[str]) -> bool:
        """Tell whether all of these are set."""
        self._require_live()
        return all(internal_kv._internal_kv_exists(self.prefix + name) for name in names)

    def add(self, name: str, number: int) -> int:
        """Add to a number, which begins at 0, and return the sum; atomic as long as the number is 0."""
        self._require_live()
        if number and not internal_kv._internal_kv_put(self.prefix + name, b"%d" % number, overwrite=False):
            return number
        total = int(self.get(name) or 0) + number
        if number:
            self.set(name, b"%d" % total)
        return total

    def _require_live(self) -> None:
        if self._live is not None:
            self._live()

    def delete_key(self, name: str) -> None:
        """Remove a value."""
        internal_kv._internal_kv_del(self.prefix + name)

    def clear(self) -> None:
        """Remove all keys below this prefix."""
        internal_kv._internal_kv_del(self.prefix, del_by_prefix=True)
