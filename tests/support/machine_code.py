"""Reads NVIDIA's machine code (SASS): which instructions a warp executes on the main path of a kernel.

Every kernel is a warp that takes some blocks from its first load to its last store. The main path is the shortest way
through the code that stores and that calls nothing: the slow ways of a quotient or a root, which are calls, are taken
for operands near the ends of fp32's range, and the longer side of a branch by a program that holds the end of a param.
A loop is gone through once.

nvdisasm takes half a second to begin, and next to nothing for a kernel: so it is handed many of them, one behind the
other, as bare instructions.
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# The unit that executes an instruction, by how its name begins; integer products go to the units of fp32.
_FP32 = ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HFMA2", "HMUL2")
_SPECIAL = ("MUFU", "F2I", "I2F", "F2F", "FRND", "POPC", "FLO", "REDUX")
_MEMORY = ("LD", "ST", "RED.", "ATOM", "SHFL")
_CONTROL = ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "WARPSYNC", "NOP", "DEPBAR", "BAR", "CS2R", "S2R", "S2UR")


class Instruction(NamedTuple):
    predicate: str  # "" if it is executed in any case
    name: str  # with its modifiers: LDG.E.128
    operands: str

    @property
    def unit(self) -> str:
        """``fp32``, ``integer``, ``special``, ``memory``, ``uniform`` (once a warp, not once a lane) or ``control``."""
        starts = {"special": _SPECIAL, "memory": _MEMORY, "control": _CONTROL, "fp32": _FP32}
        found = next((unit for unit, names in starts.items() if self.name.startswith(names)), "integer")
        return "uniform" if self.name[0] == "U" or self.name.startswith("R2UR") else found


class Code(NamedTuple):
    registers: int  # of a lane
    spilled: int  # bytes of a lane, as the driver would see them
    instructions: list[Instruction]
    first: int  # the address of the first instruction, as branches name it


_BYTES = 16  # of an instruction


def read(cubins: Sequence[bytes], capability: int) -> list[Code]:
    """Returns the code of kernels that were compiled for one GPU."""
    found, first = [], 0
    texts = [_instructions_of(each) for each in cubins]
    with _file(b"".join(texts)) as path:
        listing = _run("nvdisasm", "-b", f"SM{capability}", path)
    pattern = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([^\s;]+) *(.*?) *;"
    instructions = [Instruction(*each) for each in re.findall(pattern, listing, re.MULTILINE)]
    assert len(instructions) * _BYTES == sum(map(len, texts))
    for cubin, text in zip(cubins, texts, strict=True):
        with _file(cubin) as path:
            usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", _run("cuobjdump", "-res-usage", path)))
        own = instructions[first // _BYTES : (first + len(text)) // _BYTES]
        found.append(Code(int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), own, first))
        first += len(text)
    return found


def _instructions_of(cubin: bytes) -> bytes:
    """The section of an ELF file that holds the kernel, and what it calls."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + index * size) for index in range(count)]
    names = headers[of_names][4]
    (text,) = (
        cubin[start : start + length]
        for name, _, _, _, start, length in headers
        if cubin.startswith(b".text.", names + name)
    )
    return text


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        yield file.name


def main_path(code: Code) -> list[Instruction]:
    """Returns what a warp executes from its first instruction to its EXIT."""
    # What is left from an instruction to the end, as (-stores, instructions, next one).
    left: dict[int, tuple[int, int, int]] = {}
    for index in _last_first(code):
        ways = [
            (left[after][0] - _stores(code.instructions[index]), left[after][1] + 1, after)
            for after in _followers(code, index)
            if after in left
        ]
        if _ends(code.instructions[index]):
            ways.append((0, 1, -1))
        if ways:
            left[index] = min(ways)
    path, index = [], 0
    while index >= 0:
        path.append(code.instructions[index])
        index = left[index][2]
    return path


def units(path: list[Instruction]) -> dict[str, int]:
    """Returns how many instructions each unit executes."""
    return dict(sorted(Counter(each.unit for each in path).items()))


def _last_first(code: Code) -> list[int]:
    """Every instruction that can be reached, behind all that may follow it; a loop is gone through once."""
    found: list[int] = []
    seen, stack = {0}, [(0, iter(_followers(code, 0)))]
    while stack:
        index, followers = stack[-1]
        after = next((each for each in followers if each not in seen), None)
        if after is None:
            found.append(index)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(_followers(code, after))))
    return found


def _stores(instruction: Instruction) -> int:
    return instruction.name.startswith(("STG", "RED.", "ATOM"))


def _ends(instruction: Instruction) -> bool:
    return instruction.name == "EXIT" and not instruction.predicate


def _followers(code: Code, index: int) -> list[int]:
    """The instructions that may come next; none behind a call, which only the slow ways make."""
    instruction = code.instructions[index]
    name = instruction.name.split(".")[0]
    if name in ("CALL", "RET") or _ends(instruction):
        return []
    if name != "BRA":
        return [index + 1]
    target = re.search(r"\b0x([0-9a-f]+)$", instruction.operands)
    assert target, instruction
    jump = (int(target[1], 16) - code.first) // _BYTES
    assert 0 <= jump < len(code.instructions), instruction
    return [jump, index + 1] if instruction.predicate else [jump]


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([BIN / tool, *arguments], check=True, capture_output=True, text=True).stdout
