"""Reads NVIDIA's machine code (SASS): which instructions a warp executes on the main path of a kernel.

Every kernel is a warp that takes some blocks from its first load to its last store. The main path is the shortest way
through the code that stores and that calls nothing: the slow ways of a quotient or a root, which are calls, are taken
for operands near the ends of fp32's range, and the longer side of a branch by a program that holds the end of a param.
A loop is gone through once.
"""

import re
import subprocess
import tempfile
from collections import Counter
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
    instructions: list[Instruction]
    labels: dict[str, int]  # label -> index of the instruction that it stands before


def read(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name)
    found = re.search(r"\bREG:(\d+)", usage)
    assert found
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, predicate, name, operands in re.findall(
        r"^(?:([.$]\S+):|\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;)", text, re.MULTILINE
    ):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(Instruction(predicate, name, operands))
    return Code(int(found[1]), instructions, labels)


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
    target = re.search(r"`\((\S+)\)", instruction.operands)
    assert target, instruction
    jump = code.labels[target[1]]
    return [jump, index + 1] if instruction.predicate else [jump]


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([BIN / tool, *arguments], check=True, capture_output=True, text=True).stdout
