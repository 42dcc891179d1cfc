"""Pickles that run a command when Python's unpickler reads them: every instruction that imports, calls or builds.

The command makes an empty file, the proof that it ran. Tests and benchmarks/reliability/torch_dist.py share them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

EXTENSION = 0x5A
"""The number under which whoever runs these registers os.system with copyreg."""
DOTTED = (
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "pickle.loads.__self__.Unpickler"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "torch.os.system"),
    ("torch.distributed._shard.api", "torch.os.system"),
    ("torch.distributed.tensor.api", "__builtins__.eval"),
    ("torch.distributed.checkpoint.metadata", "torch.ctypes.util.subprocess.Popen"),
    ("torch.distributed._shard.api", "torch.ctypes.util.subprocess.Popen"),
    ("torch.distributed.tensor._api", "torch.ctypes.util.subprocess.Popen"),
    ("torch", "os.system"),
    ("torch.serialization", "os.system"),
    ("pathlib", "os.system"),
    ("pathlib", "Path.touch"),
    ("collections", "_sys.modules"),
    ("megatron.core", "os.system"),
    ("megatron", "__loader__.get_data"),
)
NAMES = (
    ("os", "system"), ("posix", "system"), ("subprocess", "Popen"), ("subprocess", "check_output"),
    ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "__import__"),
    ("builtins", "open"),
    ("importlib", "import_module"), ("operator", "attrgetter"), ("functools", "partial"), ("types", "FunctionType"),
    ("pickle", "loads"), ("_pickle", "loads"), ("torch.storage", "_load_from_bytes"), ("torch.hub", "load"),
    ("torch", "load"), ("torch.jit", "load"), ("torch._dynamo.guards", "GuardManagerWrapper"), ("webbrowser", "open"),
    ("shutil", "rmtree"), ("codecs", "decode"), ("ctypes", "CDLL"), ("multiprocessing.util", "spawnv_passfds"),
    ("pdb", "run"), ("runpy", "run_path"), ("timeit", "timeit"), ("logging.config", "dictConfig"),
    ("numpy.testing._private.utils", "runstring"), ("copyreg", "_reconstructor"), ("copyreg", "__newobj__"),
    ("slimectl.plugins.callables", "load"), ("transformers.dynamic_module_utils", "get_class_from_dynamic_module"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"), ("torch.distributed.checkpoint", "os"),
    ("torch.distributed.checkpoint.metadata", "Enum"), ("torch.distributed.checkpoint.staging", "Popen"),
)  # fmt: skip


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL: protocol 4 resolves dotted names."""
    return text(module) + text(attribute) + b"\x93"


def payloads(proof: Path) -> dict[str, bytes]:
    """By what they try; each is a whole pickle."""
    command = f"touch {proof}"
    line = command.encode()
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    system = b"cos\nsystem\n"
    bound = b"(" + text("__setstate__") + system + b"d"
    found = {
        "GLOBAL": system + b"(S'" + line + b"'\ntR.",
        "GLOBAL, REDUCE of protocol 2": b"\x80\x02" + system + text(command) + b"\x85R.",
        "INST": b"(S'" + line + b"'\nios\nsystem\n.",
        "OBJ": b"(" + system + b"S'" + line + b"'\no.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n)\x81.",
        "NEWOBJ_EX": b"\x80\x04" + name("subprocess", "Popen") + b")" + b"}\x92.",
        "EXT1": b"\x80\x02\x82" + bytes([EXTENSION]) + text(command) + b"\x85R.",
        "EXT2": b"\x80\x02\x83" + struct.pack("<H", EXTENSION) + text(command) + b"\x85R.",
        "EXT4": b"\x80\x02\x84" + struct.pack("<i", EXTENSION) + text(command) + b"\x85R.",
        "BUILD of an object with a state of its own": b"\x80\x02" + index + b")\x81" + bound + b"b" + text(command)
        + b"b.",
        "BUILD of a class": b"\x80\x02" + index + b"N" + bound + b"\x86b)\x81" + text(command) + b"b.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02" + system + text(command) + b"\x85RQ.",
        "names from the memo": b"\x80\x04" + text("os") + b"\x94" + text("system") + b"\x94" + b"00h\x00h\x01\x93"
        + text(command) + b"\x85R.",
        "a name that is no text": b"\x80\x04" + b"K\x01K\x02\x93.",
        "a name made by a call": b"\x80\x04" + name("builtins", "str") + text("os") + b"\x85R" + text("system")
        + b"\x93" + text(command) + b"\x85R.",
        "a call hidden before the end": system + b"(S'" + line + b"'\ntR0N.",
        "a call in a key": b"\x80\x02}" + system + text(command) + b"\x85RNs.",
        "a call in a frame": b"\x80\x04\x95" + struct.pack("<Q", 4) + system + text(command) + b"\x85R.",
        "a default that is called": b"\x80\x02ccollections\ndefaultdict\n" + system + b"\x85R" + text(command) + b"Ns.",
        "buffers beside the file": b"\x80\x05\x97\x98.",
        "a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".",
        "a text of 2**60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
        "a number of 2**30 bytes": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"1.",
        "a number of 10**6 digits": b"I" + b"9" * 10**6 + b"\n.",
        "200 000 marks": b"(" * 200_000 + b".",
        "a tuple 200 000 deep": b"\x80\x02N" + b"\x85" * 200_000 + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "lists of lists, 2**40 in all": b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(40)) + b".",
        "the largest place in the memo": b"\x80\x02Nr\xff\xff\xff\xff.",
        "two stops": b"\x80\x02N.." + system + text(command) + b"\x85R.",
        "nothing": b"",
        "no end": b"\x80\x02}",
        "no pickle": bytes(range(256)),
        "an empty stack": b"\x80\x020.",
    }  # fmt: skip
    shell = b"(" + text("touch") + text(str(proof)) + b"l\x85R."
    for module, attribute in (*DOTTED, *NAMES):
        call = name(module, attribute) + (shell if attribute.endswith("Popen") else text(command) + b"\x85R.")
        found[f"STACK_GLOBAL {module} {attribute}"] = b"\x80\x04" + call
    return found


def archive(pickle: bytes, *, edit: Callable[[zipfile.ZipFile], None] | None = None, packed: bool = False) -> bytes:
    """A file as torch.save makes it, around any pickle; `edit` adds entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as entries:
        entries.writestr("archive/data.pkl", pickle)
        entries.writestr("archive/byteorder", "little")
        entries.writestr("archive/data/0", bytes(1024))
        entries.writestr("archive/version", "3\n")
        if edit:
            edit(entries)
    return file.getvalue()


def tensor_pickle(
    *, count: int = 256, size: tuple[int, ...] = (256,), stride: tuple[int, ...] = (1,), kind: str = "FloatStorage",
    offset: int = 0, key: str = "0",
) -> bytes:  # fmt: skip
    """The pickle of a tensor that lies in entry `key` of its archive, or claims to."""

    def number(value: int) -> bytes:
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (
        b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + number(count) + b"tQ"
    )
    rest = number(offset) + numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR."
