"""Reads XLA's dump of what the GPU runtime runs: launches, and what one launch holds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LINE = re.compile(r"( *)\d+: (k\w+)\s*\[[^\]]*\]\s*(.*)")
PART = re.compile(r"( *)(condition|body|branch_\d+):\s*$")
GRAPH = "kCommandBuffer"
SPLIT = ("kWhile", "kConditional")


@dataclass
class Thunk:
    """One entry: its kind (`kCommandBuffer`, `kCustomKernel`, …), what it says of itself (first
    a kernel's name), and the entries below it. A loop's are under its parts, `condition` and
    `body`.
    """

    kind: str
    text: str
    children: list["Thunk"] = field(default_factory=list)

    def walk(self) -> Iterator["Thunk"]:
        """This one and everything below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def part(self, name: str) -> "Thunk":
        """A loop's `body` or `condition`."""
        return next(child for child in self.children if child.kind == name)

    def has(self, name: str) -> bool:
        """Whether a part is known already."""
        return any(child.kind == name for child in self.children)

    @property
    def launches(self) -> list["Thunk"]:
        """What the host starts one by one: a graph counts once, waiting does not count."""
        return [child for child in self.children if child.kind != "kAsyncDone"]


def parse_thunks(text: str) -> Thunk:
    """The root of a `thunk_sequence_after_thunk_passes.txt`."""
    root = Thunk("root", "")
    above: list[tuple[int, Thunk]] = [(-1, root)]
    for line in text.splitlines():
        entry, part = LINE.match(line), PART.match(line)
        found = entry or part
        if found is None:
            if line.strip():
                raise ValueError(f"not a line of a thunk sequence: {line!r}")
            continue
        indent, thunk = len(found[1]), Thunk(found[2], entry[3].strip() if entry else "")
        if part:  # its indentation says nothing: it belongs to the last loop that lacks it
            while above[-1][1].kind not in SPLIT or above[-1][1].has(thunk.kind):
                above.pop()
            indent = above[-1][0] + 2
        while above[-1][0] >= indent:
            above.pop()
        above[-1][1].children.append(thunk)
        above.append((indent, thunk))
    return root
