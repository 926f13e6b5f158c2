"""Reads the text of a compiled HLO module: instructions, loops, collectives, what is written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
HOST = ("send", "recv", "send-done", "recv-done", "infeed", "outfeed")
FREE = (
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota", "after-all", "while",
    "call", "conditional", "opt-barrier", "partition-id", "replica-id",
)  # fmt: skip
"""Opcodes that write no array of their own; what loops and calls hold is read in their bodies."""

TYPE = re.compile(r"(pred|bf16|[sufc]\d+\w*|token|opaque)\[([\d,]*)\]")
NAME = re.compile(r"[%\w.\-]+")
CALLED = re.compile(
    r"(calls|body|condition|to_apply|called_computations|branch_computations|true_computation"
    r"|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\d*\}")
BRACKETS = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Array:
    """An array's type, without its layout."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return (int(bits[0]) + 7) // 8 * prod(self.shape) if bits else prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line. `arrays` are those of its result, tuples flattened."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """Names of computations, by the attribute that names them."""
        found: dict[str, list[str]] = {}
        for kind, names in CALLED.findall(self.attributes):
            found.setdefault(kind, []).extend(re.findall(r"%([\w.\-]+)", names))
        return found

    @property
    def target(self) -> str | None:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found and found[1]

    @property
    def aliased(self) -> frozenset[int]:
        """Which arrays of the result are written into an operand."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        return frozenset(int(out or 0) for out, _ in ALIASED.findall(found[1])) if found else NONE

    @property
    def origin(self) -> str:
        """The path of JAX's names that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(map(str, self.arrays))} %{self.name} ({self.origin})"


NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.root)


@dataclass(frozen=True)
class Module:
    """A compiled program of one device."""

    header: str
    entry: str
    computations: dict[str, Computation]

    @cached_property
    def num_aliased(self) -> int:
        """How many results of the program are written into its arguments."""
        _, found, rest = self.header.partition("input_output_alias=")
        return len(ALIASED.findall(rest[: closing(rest, 0)])) if found else 0

    def walk(self, start: str | None = None) -> Iterator[Instruction]:
        """What runs as kernels, copies and calls from a computation on (the entry), loops' bodies
        included and each once; what is inside a fusion or reduces is not.
        """
        waiting, seen = [self.entry if start is None else start], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for one in self.computations[name].instructions.values():
                yield one
                if one.opcode != "fusion":
                    waiting += [
                        called
                        for kind, names in one.called.items()
                        if kind != "to_apply" or one.opcode == "call"
                        for called in names
                    ]

    def loops(self) -> list[Instruction]:
        """Every while loop, in any computation."""
        return [
            one
            for computation in self.computations.values()
            for one in computation.instructions.values()
            if one.opcode == "while"
        ]

    def body(self, loop: Instruction) -> str:
        """The computation that a loop repeats."""
        return loop.called["body"][0]

    def collectives(self, start: str | None = None) -> list["Collective"]:
        """Those that `walk` meets. Of an asynchronous pair the second half is taken: it has the
        result alone.
        """
        found = []
        for one in self.walk(start):
            kind = one.opcode.removesuffix("-done")
            if kind in COLLECTIVES:
                found.append(Collective(kind, one.arrays, one))
        return found

    def written(self, start: str | None = None) -> list[tuple[Array, Instruction]]:
        """Arrays in memory that `walk`'s instructions fill anew. Those updated in place (aliased
        by a custom call, or a dynamic-update-slice of an argument of its fusion) are left out.
        """
        return [
            (array, one)
            for one in self.walk(start)
            if one.opcode not in FREE and not one.opcode.endswith("-start")
            for number, array in enumerate(one.arrays)
            if number not in one.aliased and number not in self._updated(one)
        ]

    def _updated(self, one: Instruction) -> frozenset[int]:
        """Which results of a fusion (or the update itself) are slices put into an operand."""
        if one.opcode == "dynamic-update-slice":
            return frozenset({0})
        if one.opcode != "fusion":
            return NONE
        inside = self.computations[one.called["calls"][0]]
        root = inside.root
        roots = root.operands if root.opcode == "tuple" else (root.name,)
        return frozenset(n for n, name in enumerate(roots) if self._in_place(inside, name))

    def _in_place(self, inside: Computation, name: str) -> bool:
        one = inside.instructions[name]
        while one.opcode in ("bitcast", "copy", "reshape"):
            one = inside.instructions[one.operands[0]]
        if one.opcode not in ("dynamic-update-slice", "scatter"):
            return False
        target = inside.instructions[one.operands[0]]
        while target.opcode == "bitcast":
            target = inside.instructions[target.operands[0]]
        return target.opcode == "parameter"

    def host_transfers(self, start: str | None = None) -> list[Instruction]:
        """Instructions that exchange data with the host, callbacks included."""
        return [
            one
            for one in self.walk(start)
            if one.opcode in HOST
            or (one.target is not None and "callback" in one.target)
            or (one.opcode.startswith("copy") and "S(5)" in one.attributes)
        ]


@dataclass(frozen=True)
class Collective:
    """Kind and result of one collective."""

    kind: str
    arrays: tuple[Array, ...]
    instruction: Instruction

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    def __str__(self) -> str:
        result = ", ".join(map(str, self.arrays))
        return f"{self.kind} {result} ({self.instruction.origin})"


def parse(text: str) -> Module:
    """The module that `Compiled.as_text()` (or a file of `--xla_dump_to`) describes."""
    computations: dict[str, Computation] = {}
    entry, current = None, None
    lines = text.splitlines()
    for line in lines:
        started = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if started:
            current = Computation(started[2], {})
            computations[current.name] = current
            entry = current.name if started[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            one = parse_instruction(line)
            current.instructions[one.name] = one
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not that of an HLO module")
    return Module(lines[0], entry, computations)


def parse_instruction(line: str) -> Instruction:
    """`[ROOT] %name = type opcode(operands), attributes`."""
    left, right = re.sub(r"/\*.*?\*/", "", line).split(" = ", 1)
    end = closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    result, rest = right[:end], right[end:].lstrip()
    start = rest.index("(")
    stop = closing(rest, start)
    memory = ", S(5)" if "S(5)" in result else ""
    return Instruction(
        name=left.split("%")[-1].strip(),
        opcode=rest[:start],
        arrays=tuple(
            Array(dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in TYPE.findall(result)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", rest[start:stop])),
        attributes=rest[stop + 1 :] + memory,
        root=left.lstrip().startswith("ROOT "),
    )


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes; brackets within quotes do not count."""
    depth, quoted, last = 0, False, ""
    for place in range(start, len(text)):
        char = text[place]
        if char == '"' and last != "\\":
            quoted = not quoted
        elif not quoted and char in BRACKETS:
            depth += 1
        elif not quoted and char in BRACKETS.values():
            depth -= 1
            if depth == 0:
                return place
        last = char
    raise ValueError(f"a bracket does not close in {text[start : start + 80]!r}")
