"""One module under the name of another: for programs that import cupy.cuda.nccl themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class StandIn(MetaPathFinder, Loader):
    """Answers imports of `name` with the names of the module `own`."""

    def __init__(self, name: str, own: str) -> None:
        self.name, self.own = name, own

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the one name."""
        return ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        names = vars(sys.modules[self.own])
        kept = {name: value for name, value in names.items() if not name.startswith("_")}
        vars(module).update(kept, __doc__=names["__doc__"], __getattr__=names["__getattr__"])

    def install(self) -> None:
        """Answer imports from now on; raise RuntimeError if modules use another module of that name."""
        if self in sys.meta_path:
            return
        users = sorted(self._users())
        if users:
            raise RuntimeError(
                f"{self.name} was imported before, and is used by {', '.join(users)}; expected install() "
                "before the import of these modules"
            )
        self._forget()
        sys.meta_path.insert(0, self)
        if self._parent() is not None:
            importlib.import_module(self.name)

    def uninstall(self) -> None:
        """Answer no more imports; modules that have imported it keep what they have."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._forget()

    def _forget(self) -> None:
        module = sys.modules.pop(self.name, None)
        parent, last = self._parent(), self.name.rpartition(".")[2]
        if module is not None and getattr(parent, last, None) is module:
            delattr(parent, last)

    def _parent(self) -> ModuleType | None:
        return sys.modules.get(self.name.rpartition(".")[0])

    def _users(self) -> Iterator[str]:
        """Yield the modules that hold the imported module, or a class or function of it."""
        module = sys.modules.get(self.name)
        if module is None:
            return
        theirs = {id(module)} | {id(value) for value in vars(module).values() if _is_own(value)}
        apart = {self.name, self.name.rpartition(".")[0]} | {
            value.__module__ for value in vars(module).values() if _is_own(value)
        }
        for name, other in list(sys.modules.items()):
            held = vars(other).values() if isinstance(other, ModuleType) and name not in apart else ()
            if any(id(value) in theirs for value in list(held)):
                yield name


def _is_own(value: object) -> bool:
    """Tell whether a value of the module is a class or function that belongs to this interface."""
    return "nccl" in str(getattr(value, "__module__", "")) and hasattr(value, "__qualname__")
