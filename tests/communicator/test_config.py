"""Structs with a version inside are laid out for the library that is loaded; ids are values."""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable

import pytest

import pynccl
from conftest import Run
from null_library import HEADERS, source
from pynccl._library.generated import structs

UNDEFINED = -(2**31)
CLASSES = [cls for cls in vars(structs).values() if getattr(cls, "struct", None)]

# sizeof of the structs, from compiling each release's own nccl.h.
SIZES = {
    21403: {"Config": 24},
    21701: {"Config": 40},
    21801: {"Config": 48},
    21903: {"Config": 48},
    22203: {"Config": 48, "SimInfo": 24},
    22602: {"Config": 48},
    22703: {"Config": 72},
    22809: {"Config": 80},
    23003: {"Config": 96},
    23203: {"Config": 120, "CollConfig": 72, "SimInfo": 24, "EncryptionConfig": 32, "CommProperties": 152},
    23300: {"Config": 120},
}


@pytest.fixture(scope="module")
def null_of(compile_library: Callable[..., str]) -> Callable[[int], str]:
    return functools.cache(lambda version: compile_library(source(version), f"libnull{version}.so"))


def packed(run_python: Run, library: str, *expressions: str) -> list[bytes]:
    code = f"""
from pynccl._native import ffi
from pynccl._library.generated.structs import *
for struct in ({", ".join(expressions)},):
    cell = struct.pack()
    print(bytes(ffi.buffer(cell, cell.size)).hex())
"""
    return [bytes.fromhex(line) for line in run_python(code, PYNCCL_LIBRARY=library).stdout.splitlines()]


@pytest.mark.parametrize("version", SIZES)
def test_size_follows_the_loaded_version(
    run_python: Run, null_of: Callable[[int], str], version: int
) -> None:
    sizes = SIZES[version]
    found = packed(run_python, null_of(version), *(f"{name}()" for name in sizes))
    for (name, size), data in zip(sizes.items(), found, strict=True):
        assert len(data) == size, name
        magic = 0x74685283 if name == "SimInfo" else 0xCAFEBEEF
        assert struct.unpack_from("NII", data) == (size, magic, min(version, 23203))


def test_fields_land_where_they_belong(run_python: Run, null_of: Callable[[int], str]) -> None:
    config = "Config(blocking=0, minCTAs=2, maxCTAs=4, splitShare=True)"
    (data,) = packed(run_python, null_of(21903), config)
    assert struct.unpack("NIIiiiiPi4x", data) == (48, 0xCAFEBEEF, 21903, 0, UNDEFINED, 2, 4, 0, 1)
    (data,) = packed(run_python, null_of(23203), "CollConfig(ext=0x7f0000000010, userProfilerTag=2**63)")
    values = struct.unpack("NIIPiiiiPiiQP", data)
    assert values[3:] == (0x7F0000000010, *[UNDEFINED] * 4, 0, 1, UNDEFINED, 2**63, 0)


def test_a_string_with_a_nul() -> None:
    with pytest.raises(
        ValueError, match=r"^ncclConfig_t.commName is 'a\\x00b'; expected a str without a NUL"
    ):
        pynccl.Config(commName="a\0b")


def test_strings_stay_alive(run_python: Run, null_of: Callable[[int], str]) -> None:
    run_python(
        """
import gc
from pynccl._native import ffi
from pynccl import Config
cell = Config(commName="größe", netName="Socket").pack()
copy = int(ffi.cast("uintptr_t", cell.commName)), int(ffi.cast("uintptr_t", cell.netName))
del cell; gc.collect(); [bytearray(64) for _ in range(10000)]
assert [ffi.string(ffi.cast("char*", p)).decode() for p in copy] == ["größe", "Socket"]
""",
        PYNCCL_LIBRARY=null_of(23203),
    )


def test_a_field_that_the_library_does_not_know(run_python: Run, null_of: Callable[[int], str]) -> None:
    run_python(
        """
import pytest, pynccl
from pynccl import capi
with pytest.raises(pynccl.NotSupportedError) as caught:
    capi.ncclCommInitRankConfig(1, bytes(128), 0, {"commName": "x"})
assert str(caught.value) == (
    "ncclConfig_t.commName needs NCCL >= 2.27.3; loaded 2.19.3, which would ignore it"
)
assert capi.ncclCommInitRankConfig(1, bytes(128), 0, {"splitShare": 1, "commName": None})
""",
        PYNCCL_LIBRARY=null_of(21903),
    )


def test_configurations_reach_the_library(run_python: Run, null_of: Callable[[int], str]) -> None:
    run_python(
        """
import ctypes, struct, pynccl
from pynccl import capi
library = ctypes.CDLL(pynccl.load().path)
library.null_log.restype = ctypes.c_char_p
def sent(name, *args):
    getattr(capi, name)(*args)
    return bytes.fromhex(library.null_log().decode().split("|config=")[1].split("|")[0])
config = pynccl.Config(blocking=0, cgaClusterSize=3)
for name, args in {
    "ncclCommInitRankConfig": (2, bytes(128), 0), "ncclCommInitRankScalable": (2, 0, 1, [bytes(128)]),
    "ncclCommSplit": (1, 0, 0), "ncclCommGrow": (1, 4, None, -1),
}.items():
    assert struct.unpack_from("NIIii", sent(name, *args, config))[3:] == (0, 3), name
assert struct.unpack_from("NIIii", sent("ncclCommShrink", 1, [0], 1, config))[3:] == (0, 3)
for name in capi.FUNCTIONS:
    if name.endswith("Config") and name != "ncclCommInitRankConfig":
        count = len(__import__("inspect").signature(getattr(capi, name)).parameters) - 1
        assert struct.unpack_from("NIIPii", sent(name, *range(count), {"minCTAs": 9}))[4] == 9, name
sent("ncclSetEncryption", {"mode": 1, "psk": "secret"})
assert capi.ncclGroupSimulateEnd({"estimatedTime": 2.5}) == pynccl.SimInfo(estimatedTime=2.5)
""",
        PYNCCL_LIBRARY=null_of(23203),
    )


def test_wrong_values_name_the_field(run_python: Run, null_of: Callable[[int], str]) -> None:
    run_python(
        """
import copy, pickle, pytest
from pynccl import Config, capi
with pytest.raises(TypeError, match="ncclConfig_t.blocking is "):
    Config(blocking="no").pack()
with pytest.raises(ValueError, match="ncclConfig_t.minCTAs: "):
    Config(minCTAs=2**40).pack()
with pytest.raises(TypeError, match="Config: ncclConfig_t has no field blokking; expected blocking$"):
    capi.ncclCommSplit(1, 0, 0, {"blokking": 1})
with pytest.raises(TypeError, match="Config: ncclConfig_t has no field minCTA, other; expected minCTAs$"):
    Config(minCTA=4, other=5)
with pytest.raises(TypeError, match="Config: ncclConfig_t has no field min_ctas; expected minCTAs$"):
    Config(min_ctas=4)
with pytest.raises(TypeError, match="Config: ncclConfig_t has no field x; expected blocking, cgaClus"):
    Config(x=4)
assert copy.deepcopy(Config(minCTAs=4)) == pickle.loads(pickle.dumps(Config(minCTAs=4))) == Config(minCTAs=4)
with pytest.raises(TypeError, match="config is of type int; expected a Config or a dict of its fields"):
    capi.ncclCommSplit(1, 0, 0, 5)
""",
        PYNCCL_LIBRARY=null_of(23203),
    )


def test_properties_of_an_older_library(run_python: Run, null_of: Callable[[int], str]) -> None:
    run_python(
        """
from pynccl import capi
properties = capi.ncclCommQueryProperties(1)
assert properties.rank == 0 and properties.ginType == 0
assert properties.commHash is properties.ginSupport is properties.nLsaTeams is None
""",
        PYNCCL_LIBRARY=null_of(22903),
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_there(cls: type[structs.Struct]) -> None:
    declared = {f.name: f.since for f in HEADERS[0].structs[cls.struct]}
    assert {**cls.since, **dict.fromkeys(("size", "magic", "version"), cls.oldest)} == declared
    assert pickle.loads(pickle.dumps(cls())) == cls()


# --- unique ids -------------------------------------------------------------------------------------------


def test_unique_ids_are_values() -> None:
    data = bytes(range(128))
    uid = pynccl.UniqueId(data)
    assert bytes(uid) == data
    assert (
        uid == pynccl.UniqueId(bytearray(data)) == pynccl.UniqueId(memoryview(data)) == pynccl.UniqueId(uid)
    )
    assert uid != pynccl.UniqueId(bytes(128))
    assert uid != data
    assert len({uid, pynccl.UniqueId(data)}) == 1
    assert pickle.loads(pickle.dumps(uid)) == uid
    with pytest.raises(AttributeError):
        uid.anything = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        uid._data = b""


def test_a_unique_id_keeps_its_secret() -> None:
    uid = pynccl.UniqueId(b"secret!!" * 16)
    assert "secret" not in repr(uid)
    assert b"secret!!".hex() not in repr(uid)
    assert repr(uid) == repr(pynccl.UniqueId(bytes(uid))) != repr(pynccl.UniqueId(bytes(128)))


@pytest.mark.parametrize("data", [b"", bytes(127), bytes(129)])
def test_a_unique_id_has_128_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"data has {len(data)} bytes; expected the 128"):
        pynccl.UniqueId(data)


@pytest.mark.parametrize("data", [128, "x" * 128, [0] * 128, None])
def test_a_unique_id_is_made_from_bytes(data: object) -> None:
    with pytest.raises(TypeError, match="data is of type .*; expected a UniqueId or its 128 bytes"):
        pynccl.UniqueId(data)  # type: ignore[arg-type]


def test_get_unique_id(run_python: Run) -> None:
    run_python("import pynccl; assert pynccl.get_unique_id() != pynccl.get_unique_id()", PYNCCL_LIBRARY="cpu")


def test_enums_are_nccls() -> None:
    constants = HEADERS[0].constants
    for enum, last in ((pynccl.DataType, constants["ncclNumTypes"]), (pynccl.RedOp, constants["ncclNumOps"])):
        assert [member.value for member in enum] == list(range(last))
        assert {f"nccl{member.name}".lower() for member in enum} <= {name.lower() for name in constants}


def test_structs_compare_and_show_what_is_set() -> None:
    config = pynccl.Config(minCTAs=4, netName="Socket")
    assert repr(config) == "Config(minCTAs=4, netName='Socket')"
    assert config == pynccl.Config(netName="Socket", minCTAs=4)
    assert config != pynccl.Config(minCTAs=4) and config != {"minCTAs": 4, "netName": "Socket"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(config)


@pytest.mark.parametrize("psk", ["my-secret", b"my-secret", "my\0secret"])
def test_no_text_shows_a_pre_shared_key(psk: str | bytes) -> None:
    try:
        text = repr(structs.EncryptionConfig(mode=1, psk=psk))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        text = str(error)
    assert "psk" in text and "secret" not in text
