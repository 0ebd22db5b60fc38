"""Reads PTX: the one entry of a module becomes a list of instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .numbers import PtxError

_UNREAD = re.compile(r"//[^\n]*|^[ \t]*\.(?:loc|file|pragma)\b[^\n]*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAM = re.compile(r"\.param\s+\.(\w+)[^,]*?\s(\w+)\s*(?:,|$)")
_THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*1)*\s*$", re.MULTILINE)
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[")
# A brace where a statement could begin opens or closes a scope.
_TOKEN = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$]+):(?!:)|(?P<statement>[^;]+);)")
_INSTRUCTION = re.compile(
    r"(?:@(?P<negation>!?)(?P<guard>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,][^,]*")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+)\s*)?\]")
_BITS_OF_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")


@dataclass(frozen=True)
class Address:
    base: str
    offset: int


Operand = str | int | Address | tuple[str | int, ...]  # a name, the bits of a constant, a place, a vector


@dataclass(frozen=True)
class Instruction:
    opcode: str  # "add.rn.f32"
    operands: tuple[Operand, ...]
    guard: str | None  # the predicate that says which threads take part
    is_negated: bool  # those for which it is false
    line: int

    @property
    def is_jump(self) -> bool:
        return self.opcode.partition(".")[0] in ("bra", "ret", "exit")

    def __str__(self) -> str:
        return f"line {self.line}, {self.opcode}"


@dataclass
class Kernel:
    name: str
    params: list[tuple[str, str]]  # name, kind
    threads: int  # of a block
    shared: str | None  # the name of the shared memory
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of an instruction
    kinds: dict[str, str] = field(default_factory=dict)  # of registers

    @property
    def joins(self) -> set[int]:
        """Where threads can meet that took different ways."""
        return {self.labels[str(each.operands[0])] for each in self.code if each.opcode.startswith("bra")}


def parse(ptx: str) -> Kernel:
    text = _UNREAD.sub("", ptx)
    entry, shared = _ENTRY.search(text), _SHARED.search(text)
    if entry is None:
        raise PtxError("a module without an entry")
    threads = _THREADS.search(entry[3])
    if threads is None:
        raise PtxError(f"{entry[1]} does not say how many threads a block has: {entry[3].strip()}")
    params = [(name, kind) for kind, name in _PARAM.findall(entry[2])]
    kernel = Kernel(entry[1], params, int(threads[1]), shared and shared[1])
    for line, label, statement in _statements(text, entry.end()):
        if label:
            kernel.labels[label] = len(kernel.code)
        elif statement.startswith(".reg"):
            kernel.kinds.update(_registers(statement))
        elif statement.startswith("."):
            raise PtxError(f"line {line}: {statement}")
        else:
            kernel.code.append(_instruction(statement, line))
    return kernel


def _statements(text: str, at: int) -> Iterator[tuple[int, str, str]]:
    """Yields line, label, statement, one of the latter two empty, up to the brace that closes the entry."""
    depth, line, counted = 1, 1 + text.count("\n", 0, at), at
    while depth:
        found = _TOKEN.match(text, at)
        if found is None:
            raise PtxError(f"line {line}: {text[at : at + 80]!r}")
        at = found.end()
        if found["brace"]:
            depth += 1 if found["brace"] == "{" else -1
            continue
        begin = found.start("label" if found["label"] else "statement")
        line, counted = line + text.count("\n", counted, begin), begin
        yield line, found["label"] or "", (found["statement"] or "").strip()


def _registers(statement: str) -> Iterator[tuple[str, str]]:
    """Of ``.reg .b32 %r<64>, %x``: each name and its kind."""
    kind, names = statement.removeprefix(".reg").strip().lstrip(".").split(None, 1)
    for name in re.split(r"\s*,\s*", names):
        many = re.fullmatch(r"(%\w+)<(\d+)>", name)
        yield from ((f"{many[1]}{index}", kind) for index in range(int(many[2]))) if many else [(name, kind)]


def _instruction(statement: str, line: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise PtxError(f"line {line}: {statement}")
    operands = tuple(_operand(each.strip()) for each in _OPERAND.findall(found["operands"]))
    return Instruction(found["opcode"], operands, found["guard"], bool(found["negation"]), line)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_scalar(each.strip()) for each in text[1:-1].split(","))
    if text.startswith("["):
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise PtxError(f"the address {text}")
        return Address(found[1], int(found[2] or 0))
    return _scalar(text)


def _scalar(text: str) -> str | int:
    if found := _BITS_OF_FLOAT.fullmatch(text):
        return int(found[1] or found[2], 16)
    if _INTEGER.fullmatch(text):
        return int(text.rstrip("U"), 0)
    return text
