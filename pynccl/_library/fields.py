"""NCCL's versioned structs, laid out for the loaded version."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from pynccl._base.values import shown
from pynccl._errors import NotSupportedError
from pynccl._library import loader
from pynccl._library.binding import ffi
from pynccl._library.generated import api
from pynccl._library.generated.api import Version as Version
from pynccl._library.loader import encode_version, version_text

# The newest NCCL whose structs are declared; fields of newer versions keep the library's defaults.
_NEWEST: Version = max(api.FUNCTIONS.values())
_MAGIC = {"ncclSimInfo_t": api.NCCL_SIM_INFO_MAGIC}
# NCCL keeps pointers to some strings while the communicator lives, so none is freed; they are few and small.
_strings: dict[bytes, Any] = {}

# The Python types that a field accepts, beside NumPy's bool.
_FITTING: dict[str, tuple[type, ...]] = {"int": (Integral,), "float": (Real,), "str": (str, tuple, ffi.CData)}
# Values that no text shows.
_SECRET = {"psk"}
_KINDS = {"int": "an int", "float": "a number", "str": "a str"}

S = TypeVar("S", bound="Struct")


class Struct:
    """A versioned struct; `since` has the first NCCL version of each field."""

    struct: ClassVar[str]
    oldest: ClassVar[Version]
    since: ClassVar[dict[str, Version]]
    undefined: ClassVar[int] = api.NCCL_CONFIG_UNDEF_INT

    def __new__(cls: type[S], *_: Any, **values: Any) -> S:
        _require_known(cls, values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            _require_kind(self.struct, field, getattr(self, field.name))

    # Once for all structs: dataclass would compile them for each, which takes a tenth of `import pynccl`.
    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if type(other) is type(self) else NotImplemented

    def __repr__(self) -> str:
        set_to = {name: value for name, value in self._values().items() if value is not None}
        texts = (f"{name}={'...' if name in _SECRET else repr(value)}" for name, value in set_to.items())
        return f"{type(self).__name__}({', '.join(texts)})"

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def known(self, version: Version) -> list[str]:
        """Return the fields of this version, in order."""
        return [name for name, since in self.since.items() if since <= version]

    def pack(self) -> Any:
        """Return the C struct for the loaded library; raise NotSupportedError for a field that it lacks."""
        version = loader.get_version()
        cell = ffi.new(f"{self.struct}*")
        known = self.known(version)
        cell.size = _size(self.struct, known[-1] if version >= self.oldest else "version")
        cell.magic = _MAGIC.get(self.struct, api.NCCL_API_MAGIC)
        cell.version = encode_version(min(version, _NEWEST))
        for field in fields(self):  # type: ignore[arg-type]
            self._set(cell, field.name, getattr(self, field.name), field.default, version)
        return cell

    def _set(self, cell: Any, name: str, value: Any, default: Any, version: Version) -> None:
        if value != default and self.since[name] > version:
            raise NotSupportedError(
                f"{self.struct}.{name} needs NCCL >= {version_text(self.since[name])}; "
                f"loaded {version_text(version)}, which would ignore it",
                function=self.struct,
            )
        ctype = dict(ffi.typeof(self.struct).fields)[name].type
        try:
            setattr(cell, name, _converted(ctype, value, self.undefined))
        except (TypeError, AttributeError) as error:
            raise type(error)(f"{self.struct}.{name}: {error}") from None
        except OverflowError as error:
            raise ValueError(f"{self.struct}.{name}: {error}") from None

    @classmethod
    def unpack(cls: type[S], cell: Any) -> S:
        """Return the values that the library wrote; None for fields that it lacks."""
        version = loader.get_version()
        values = {name: getattr(cell, name) for name, since in cls.since.items() if since <= version}
        return cls(**{name: tuple(v) if isinstance(v, ffi.CData) else v for name, v in values.items()})


def pack(cls: type[S], value: S | Mapping[str, Any] | None) -> Any:
    """Return the struct for an instance or a mapping of its fields; None gives NULL."""
    if value is None:
        return ffi.NULL
    if isinstance(value, Mapping):
        _require_known(cls, value)
        value = cls(**value)
    if not isinstance(value, cls):
        raise TypeError(
            f"config is of type {type(value).__name__}; expected a {cls.__name__} or a dict of its fields"
        )
    return value.pack()


def _require_known(cls: type[Struct], names: Iterable[Any]) -> None:
    """Raise TypeError for a name that is no field, with the nearest field or with all of them."""
    unknown = [name for name in map(str, names) if name not in cls.since]
    if not unknown:
        return
    from difflib import get_close_matches

    # nccl4py writes min_ctas.
    plain = {field.lower(): field for field in cls.since}
    found = (get_close_matches(name.replace("_", "").lower(), plain, 1) for name in unknown)
    near = [plain[field] for fields in found for field in fields]
    expected = ", ".join(near or cls.since)
    raise TypeError(f"{cls.__name__}: {cls.struct} has no field {', '.join(unknown)}; expected {expected}")


def _is_numpy_bool(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _require_kind(struct: str, field: Field[Any], value: Any) -> None:
    """Raise TypeError unless the value has the type of the field's annotation, such as `int | None`."""
    kind = str(field.type).partition(" ")[0]
    text = "..." if field.name in _SECRET else shown(value)
    fits = value is None or isinstance(value, _FITTING.get(kind, object))
    if not fits and not (kind == "int" and _is_numpy_bool(value)):
        raise TypeError(f"{struct}.{field.name} is {text}; expected {_KINDS[kind]}, or None")
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{struct}.{field.name} is {text}; expected a str without a NUL character")


def _size(struct: str, last: str) -> int:
    """Return the struct's size in the version where `last` was the last field."""
    ctype = ffi.typeof(struct)
    end = ffi.offsetof(ctype, last) + ffi.sizeof(dict(ctype.fields)[last].type)
    align = ffi.alignof(ctype)
    return int(-(-end // align) * align)


def _converted(ctype: Any, value: Any, undefined: int) -> Any:
    if ctype.kind == "array":
        return list(value or ())
    if ctype.kind == "pointer":
        if isinstance(value, str):
            raw = value.encode()
            return _strings.setdefault(raw, ffi.new("char[]", raw))
        return ffi.cast(ctype, value or 0)
    if value is None:
        return undefined if ctype.cname == "int" else 0
    return value
