"""The schema of ``meta.json``: keys and file names, what is written, what is believed.

The file is tensordict's, whose loader skips whatever at the top level is no JSON object. So
ours is one list under one name beside its entries, and where that list is, only it counts.
"""

import hashlib
import json
import os
from typing import Any, NamedTuple, TypeGuard

from mmtensor.dtypes import DTYPES, numpy_dtype
from mmtensor.errors import ManifestError, ShapeError
from mmtensor.geometry import byte_count

__all__ = [
    "DENSE",
    "ITEMSIZES",
    "JAGGED",
    "META",
    "NESTED",
    "STRING",
    "STRINGS",
    "SUFFIX",
    "Entry",
    "Manifest",
    "dump",
    "dump_string",
    "dump_strings",
    "files_of",
    "name_of",
    "owned",
    "parse",
    "parse_text",
]

META = "meta.json"
_SEPARATORS = frozenset("/\\\0")
SUFFIX = ".memmap"
# The kinds of leaves. A string or a list of strings is a directory with a meta.json of its
# own, as tensordict writes non-tensor data.
DENSE, JAGGED, NESTED, STRING, STRINGS = "dense", "jagged", "nested", "string", "strings"
_DIRECTORIES = (NESTED, STRING, STRINGS)
_KINDS = (DENSE, JAGGED, *_DIRECTORIES)
# Bytes per element, by name of the dtype.
ITEMSIZES = {name: numpy_dtype(name).itemsize for name in DTYPES}
_VERSION = 1
_quoted = json.encoder.encode_basestring_ascii
_OURS = "_mmtensor"
# Names that tensordict's flat object takes for itself: a leaf of this name is in our list
# only, as it would be lost there anyway.
_RESERVED = frozenset(
    ("shape", "device", "_type", "_class", "_format_version", "_names", "_metadata", _OURS)
)
_TYPES = {NESTED: "TensorDict", STRING: "NonTensorData", STRINGS: "NonTensorStack"}
# What tensordict puts into the directory of non-tensor data.
_TEXT_FILES = (META, "other.pickle", "pickle.pkl", "json_types.json")

# tensordict's encoding of keys: what a file system or a shell might take amiss, in percent.
_UNSAFE = {*'/<>:"|?*\\ %', *map(chr, range(32)), chr(127)}
_ENCODE = str.maketrans({c: f"%{ord(c):02X}" for c in _UNSAFE})
_NAME_MAX = 255  # NAME_MAX of Linux, bytes
_LONGEST = len(".offsets" + SUFFIX)


class Entry(NamedTuple):
    """One leaf of a directory.

    Parameters
    ----------
    key
        Its name in the container.
    kind
        ``"dense"``, ``"jagged"``, ``"nested"``, ``"string"`` or ``"strings"``.
    dtype
        Canonical name; empty for what has none.
    shape
        Of a dense leaf; of a jagged one that of its table of shapes: elements, dimensions.
    file
        Name of the file with the values, or of the directory.
    legacy
        Another name to look under, for directories of older programs.
    nbytes
        Of a dense leaf.
    """

    key: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    legacy: str = ""
    nbytes: int = 0


class Manifest(NamedTuple):
    """What a ``meta.json`` says.

    Parameters
    ----------
    batch_size
        Of the container.
    entries
        Its leaves, in its order.
    ours
        Whether our list was there. Otherwise tensordict wrote the directory.
    """

    batch_size: tuple[int, ...]
    entries: list[Entry]
    ours: bool


def _encoded(key: str) -> str:
    """Encode a key as tensordict does; no two keys have the same code."""
    if key.isidentifier():
        return key
    if not key:
        return "%"
    if key in (".", ".."):
        return "%2E" * len(key)
    return key.translate(_ENCODE)


def name_of(key: str, kind: str) -> str:
    """Return the file or directory name of a leaf.

    No two leaves of a container have a name in common, side files included: names of files
    end in ``.memmap`` and those of directories do not; only side files of jagged leaves end
    in ``.shape.memmap`` and ``.offsets.memmap``. A key that would break this has one dot
    written as ``%2E``, which no other key is. It is tensordict's name in all other cases.

    Parameters
    ----------
    key
        Any string.
    kind
        As in `Entry`.
    """
    if len(key) < 200 and key.isidentifier() and key.isascii():  # the usual case
        return key if kind in _DIRECTORIES else key + SUFFIX
    name = _encoded(key)
    try:
        length = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        length = _NAME_MAX
    if length + _LONGEST > _NAME_MAX:
        # "%~" is in no code.
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        start = name.encode("ascii", "ignore").decode()[:60]
        name = f"{start}%~{digest}"
    if kind in _DIRECTORIES:
        if name.endswith(SUFFIX) or name == META:
            name = "%2E".join(name.rsplit(".", 1))
        return name
    if name.endswith((".shape", ".offsets")):
        name = "%2E".join(name.rsplit(".", 1))
    return name + SUFFIX


def files_of(entry: Entry) -> tuple[str, ...]:
    """Return every name in the directory that belongs to a leaf."""
    if entry.kind != JAGGED:
        return (entry.file,)
    root = entry.file.removesuffix(SUFFIX)
    return entry.file, f"{root}.offsets{SUFFIX}", f"{root}.shape{SUFFIX}"


def dump(batch_size: tuple[int, ...], entries: list[Entry]) -> bytes:
    """Write the ``meta.json`` of a directory.

    Parameters
    ----------
    batch_size, entries
        As in `Manifest`.
    """
    # Written piece by piece: json.dumps takes twice as long, half the time of planning a save.
    size = list(batch_size)
    top: list[str] = []
    ours = [f'{{"version": {_VERSION}, "batch_size": {size}}}']
    for entry in entries:
        key, kind, dtype, shape, file, *_ = entry
        name, place = _quoted(key), _quoted(file)
        common = _common(entry)
        if kind in _DIRECTORIES:
            if common:
                top.append(f'{name}: {{"type": "{_TYPES[kind]}"}}')
            ours.append(f'{{"key": {name}, "kind": "{kind}", "file": {place}}}')
            continue
        sizes = list(shape)
        if common:
            nested = "true" if kind == JAGGED else "false"
            top.append(
                f'{name}: {{"device": "cpu", "shape": {sizes}, "dtype": "torch.{dtype}", '
                f'"is_nested": {nested}}}'
            )
        ours.append(
            f'{{"key": {name}, "kind": "{kind}", "dtype": "{dtype}", "shape": {sizes}, '
            f'"file": {place}}}'
        )
    top.append(
        f'"shape": {size}, "device": "cpu", "_type": "<class \'tensordict._td.TensorDict\'>", '
        f'"_format_version": 1, "_class": "tensordict:TensorDict", "{_OURS}": [{", ".join(ours)}]'
    )
    return f"{{{', '.join(top)}}}".encode()


def _common(entry: Entry) -> bool:
    """Whether tensordict can read a leaf: it computes the file name from the key."""
    if entry.key in _RESERVED:
        return False
    code = _encoded(entry.key)
    if entry.kind in _DIRECTORIES:
        return entry.file == code
    if entry.dtype.startswith("float8"):  # one of them, and it loads nothing at all
        return False
    # Its nested tensors cannot be without rows.
    return entry.file == code + SUFFIX and not (entry.kind == JAGGED and entry.shape[0] == 0)


def dump_string(text: str) -> bytes:
    """Write the ``meta.json`` of a string."""
    kind = "<class 'tensordict.tensorclass.NonTensorData'>"
    return json.dumps(
        {"_type": kind, "data": text, "_metadata": None, "_is_non_tensor": True}
    ).encode()


def dump_strings(texts: list[str]) -> bytes:
    """Write the ``meta.json`` of a list of strings."""
    return json.dumps(
        {
            "_type": "<class 'tensordict.tensorclass.NonTensorStack'>",
            "_format_version": 1,
            "_class": "tensordict:NonTensorStack",
            "stack_dim": 0,
            "device": None,
            "data": texts,
        }
    ).encode()


def parse(data: bytes, where: str) -> Manifest:
    """Read a ``meta.json`` and believe nothing of it.

    Parameters
    ----------
    data
        The bytes of the file.
    where
        Path of the directory, for messages.

    Raises
    ------
    ManifestError
        It names the leaf and what is wrong with it.
    """
    top = _load(data, where)
    listed = top.get(_OURS)
    if isinstance(listed, list):
        batch_size, entries = _read_ours(listed, where)
    else:
        batch_size, entries = _read_theirs(top, where)
    dims = len(batch_size)
    seen: dict[str, str] = {META: META}
    for entry in entries:
        key, kind, _, shape, file, *_ = entry
        for name in (file,) if kind != JAGGED else files_of(entry):
            if name in seen:
                raise _wrong(key, where, f"its file {name!r} is that of {seen[name]!r} too")
            seen[name] = key
        # The batch size of a nested container is looked at when it is read.
        if kind == DENSE:
            fits = shape[:dims] == batch_size
        else:
            fits = kind != JAGGED or shape[:1] == batch_size
        if not fits:
            what = f"its shape {shape} does not start with the batch size {batch_size}"
            raise _wrong(key, where, what)
    return Manifest(batch_size, entries, isinstance(listed, list))


def parse_text(data: bytes, where: str, key: str) -> Any:
    """Read the ``meta.json`` of a string or a list of strings; return the one or the other.

    Raises
    ------
    ManifestError
        If it holds anything else. Pickles are not loaded: they can execute anything.
    """
    top = _load(data, where)
    value = top.get("data")
    # Of a stack that tensordict has pickled this is the name of the pickle.
    stacked = "stack_dim" in top or "NonTensorStack" in str(top.get("_type"))
    if (isinstance(value, str) and not stacked) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    ):
        return value
    raise _wrong(
        key,
        where,
        "its data must be a string or a list of strings. Other non-tensor data, and what was "
        "pickled, is not loaded. Leave it out with tensordict first: "
        f"TensorDict.load_memmap(path).exclude({key!r}).memmap(other)",
    )


def owned(data: bytes) -> tuple[set[str], set[str]]:
    """Return the names of files and of directories that a ``meta.json`` speaks of.

    Parameters
    ----------
    data
        The bytes of a ``meta.json`` of a container, or of non-tensor data. What cannot be
        read speaks of nothing but itself.
    """
    try:
        top = _load(data, "")
    except ManifestError:
        return {META}, set()
    listed = top.get(_OURS)
    if isinstance(listed, list):
        entries = [
            Entry("", str(item.get("kind")), file=item["file"])
            for item in listed[1:]
            if isinstance(item, dict) and _is_plain(item.get("file"))
        ]
        return _names(entries)
    if "data" in top or "stack_dim" in top or "_is_non_tensor" in top:
        return set(_TEXT_FILES), set()
    try:
        _, entries = _read_theirs(top, "")
    except ManifestError:
        return {META}, set()
    return _names(entries)


def _names(entries: list[Entry]) -> tuple[set[str], set[str]]:
    files = {META}
    directories: set[str] = set()
    for entry in entries:
        if entry.kind in _DIRECTORIES:
            directories.update((entry.file, entry.legacy))
        else:
            # Offsets are left where tensordict has saved over a jagged leaf of ours.
            files.update(files_of(entry))
            if entry.legacy:
                files.update(files_of(entry._replace(file=entry.legacy)))
    return files, directories - {""}


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        top = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{where}/{META} must be JSON, but it cannot be read: {error}"
        ) from None
    if not isinstance(top, dict):
        raise ManifestError(f"{where}/{META} must be a JSON object, got {type(top).__name__}.")
    return top


def _wrong(key: object, where: str, what: str) -> ManifestError:
    return ManifestError(f"leaf {key!r} of {where} cannot be loaded: {what}.")


def _sizes(value: object, key: object, where: str, what: str = "shape") -> tuple[int, ...]:
    if isinstance(value, list):
        for n in value:
            if type(n) is not int or n < 0:
                break
        else:
            return tuple(value)
    raise _wrong(key, where, f"its {what} must be a list of non-negative integers, got {value!r}")


def _read_ours(listed: list[Any], where: str) -> tuple[tuple[int, ...], list[Entry]]:
    head = listed[0] if listed else None
    if not isinstance(head, dict) or type(head.get("version")) is not int:
        raise ManifestError(f"{where}/{META} must start its list with a version.")
    if head["version"] != _VERSION:
        raise ManifestError(
            f"{where} was saved in version {head['version']} of the format; this program reads "
            f"version {_VERSION}. Upgrade mmtensor."
        )
    batch_size = _batch_size(head.get("batch_size"), where)
    entries = []
    keys = set()
    for item in listed[1:]:
        if not isinstance(item, dict) or not isinstance(key := item.get("key"), str):
            raise ManifestError(f"{where}/{META} must give a key for every leaf, got {item!r}.")
        kind = item.get("kind")
        if kind not in _KINDS:
            raise _wrong(key, where, f"it is of an unknown kind, {kind!r}")
        if key in keys:
            raise _wrong(key, where, "its key is there twice")
        keys.add(key)
        file = _checked_name(item.get("file"), kind, key, where)
        if kind in _DIRECTORIES:
            entries.append(Entry(key, kind, file=file))
        else:
            dtype = _dtype(item.get("dtype"), key, where)
            entries.append(_sized(key, kind, dtype, item.get("shape"), file, where))
    return batch_size, entries


def _batch_size(value: object, where: str) -> tuple[int, ...]:
    sizes = _sizes(value, "", where, "batch size")
    try:
        byte_count(sizes, 1)
    except ShapeError as error:
        raise _wrong("", where, str(error).rstrip(".")) from None
    return sizes


def _is_plain(name: object) -> TypeGuard[str]:
    """Whether a name can only be that of an entry of the directory."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & _SEPARATORS:
        return False
    try:
        return len(os.fsencode(name)) <= _NAME_MAX
    except UnicodeEncodeError:
        return False


def _checked_name(name: object, kind: str, key: str, where: str) -> str:
    if not _is_plain(name) or (kind not in _DIRECTORIES and not name.endswith(SUFFIX)):
        raise _wrong(key, where, f"its file must be a plain name in the directory, got {name!r}")
    return name


def _dtype(name: object, key: str, where: str) -> str:
    if not isinstance(name, str) or name not in ITEMSIZES:
        raise _wrong(key, where, f"its dtype {name!r} is unknown")
    return name


def _sized(key: str, kind: str, dtype: str, shape: object, file: str, where: str) -> Entry:
    sizes = _sizes(shape, key, where)
    try:
        nbytes = byte_count(sizes, ITEMSIZES[dtype] if kind == DENSE else 8)
    except ShapeError as error:
        raise _wrong(key, where, str(error).rstrip(".")) from None
    if kind == JAGGED:
        if len(sizes) != 2:
            raise _wrong(key, where, f"a jagged leaf needs elements and dimensions, got {shape!r}")
        nbytes = 0
    return Entry(key, kind, dtype, sizes, file, "", nbytes)


def _read_theirs(top: dict[str, Any], where: str) -> tuple[tuple[int, ...], list[Entry]]:
    name = str(top.get("_type", "")).removesuffix("'>").rpartition(".")[2]
    if name not in ("TensorDict", "TensorDictParams"):
        raise ManifestError(
            f"{where} holds a {name or 'thing of no type'}, which cannot be loaded. Convert it "
            "with tensordict first: TensorDict.load_memmap(path).to_tensordict().memmap(other); "
            "where shapes differ, make a JaggedTensor of the tensors of each key."
        )
    batch_size = _batch_size(top.get("shape"), where)
    entries = []
    kinds = {type_: kind for kind, type_ in _TYPES.items()}
    for key, item in top.items():
        if not isinstance(item, dict):
            continue
        code = _encoded(key)
        if not _is_plain(code):
            raise _wrong(key, where, "no file can have this name")
        # Names of programs that did not encode keys, where they are plain names.
        raw = key if key != code and "/" not in key and "\\" not in key and "\0" not in key else ""
        if "type" in item and not isinstance(item["type"], dict):
            kind = kinds.get(str(item["type"]))
            if kind is None:
                raise _wrong(
                    key,
                    where,
                    f"it is a {item['type']}. Convert it with tensordict first, for example by "
                    "to_tensordict()",
                )
            legacy = "" if raw in ("", ".", "..") else raw
            entries.append(Entry(key, kind, file=code, legacy=legacy))
            continue
        dtype = item.get("dtype")
        dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
        kind = JAGGED if item.get("is_nested") is True else DENSE
        entry = _sized(
            key, kind, _dtype(dtype, key, where), item.get("shape"), code + SUFFIX, where
        )
        entries.append(entry._replace(legacy=raw + SUFFIX) if raw else entry)
    return batch_size, entries
