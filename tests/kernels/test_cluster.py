"""The PTX by which the CTAs of a cluster give each other their shares, run thread by thread by a small interpreter."""

import itertools
import operator
import re

import pytest
import torch

from strobe.kernels.common.cluster import begin_ptx, exchange_ptx

COLUMNS, WARPS = 128, 4
OPERATIONS = {
    "mov": lambda x: x, "mul": operator.mul, "div": operator.floordiv, "rem": operator.mod, "shr": operator.rshift,
    "and": operator.and_, "mad": lambda a, b, c: a * b + c, "mapa": lambda at, cta: (cta, at),
    "add": operator.add, "setp": operator.eq,
}  # fmt: skip


class Cta:
    """Its shared memory: a number at each address that was written. names: where what is declared lies."""

    def __init__(self, begin: str):
        sizes = {name: int(size) for name, size in re.findall(r"\.b8 (\w+)\[(\d+)\]", begin)}
        self.names = dict(zip((*sizes, "all_written"), itertools.accumulate(sizes.values(), initial=0), strict=True))
        self.written: dict[int, float] = {}


class Thread:
    """A thread of one CTA: its registers, and the operands of the assembly by their numbers."""

    def __init__(self, ctas: list[Cta], rank: int, number: int, operands: list[float]):
        """operands: what is given."""
        self.ctas, self.own = ctas, ctas[rank]
        self.registers = {"%cluster_ctarank": rank, "%tid.x": number, **self.own.names}
        self.registers |= {f"${len(operands) + i}": x for i, x in enumerate(operands)}

    def value(self, text: str):
        return int(text) if re.fullmatch(r"\d+", text) else self.registers[text]

    def run(self, line: str) -> None:
        guard, line = re.fullmatch(r"(?:@(\S+) )?(.*);", line).groups()
        if guard is None or self.registers[guard]:
            name, text = line.split(" ", 1)
            if name.startswith("st"):
                self.store(*re.fullmatch(r"\[there\], \{(.*?)\}(, \[barrier\])?", text).groups())
            elif name.startswith("ld"):
                to, at, beyond = re.fullmatch(r"(.*), \[(\w+) \+ (\d+)\]", text).groups()
                for i, register in enumerate(re.findall(r"\$\d+", to)):
                    self.registers[register] = self.own.written[self.registers[at] + int(beyond) + 4 * i]
            else:
                to, *others = text.split(", ")
                self.registers[to] = OPERATIONS[name.split(".")[0]](*map(self.value, others))

    def store(self, operands: str, barrier: str | None) -> None:
        cta, at = self.registers["there"]
        assert barrier is None or self.registers["barrier"] == (cta, self.own.names["all_written"])
        for i, operand in enumerate(operands.split(", ")):
            assert at + 4 * i not in self.ctas[cta].written, "written twice"
            assert at + 4 * i < self.own.names["all_written"], "beyond what is declared"
            self.ctas[cta].written[at + 4 * i] = self.registers[operand]


def place(i: int, number: int) -> tuple[int, int]:
    """Row and column of the i-th number of a thread."""
    return i // 4 * WARPS + number // 32, number % 32 * 4 + i % 4


def by_ctas(x: torch.Tensor, ctas: int) -> torch.Tensor:
    """As `cluster.by_ctas`."""
    of_place = min(each := x.numel() // (32 * WARPS), ctas)
    x = x.reshape(each // of_place, of_place // 4, WARPS, ctas // of_place, 32 * of_place // ctas, 4)
    return x.permute(3, 1, 5, 0, 2, 4).reshape(ctas, -1)


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize(("ctas", "rows"), [(8, 8), (16, 8), (8, 16), (8, 64), (16, 32)])
def test_each_has_its_share_of_all(ctas, rows, posts):
    g, each = torch.Generator().manual_seed(ctas), rows * COLUMNS // (32 * WARPS)
    x, of_rows = torch.randn(ctas, rows, COLUMNS, generator=g), torch.randn(2, ctas, rows, generator=g)
    given = [x, *of_rows[..., None].expand(2, *x.shape)]
    begin = begin_ptx(ctas, rows, COLUMNS, posts)
    memory = [Cta(begin) for _ in range(ctas)]
    threads = [
        [
            Thread(memory, rank, n, [float(of[(rank, *place(i, n))]) for of in given for i in range(each)])
            for n in range(32 * WARPS)
        ]
        for rank in range(ctas)
    ]
    lines = [
        line for line in exchange_ptx(rows, COLUMNS, ctas, WARPS, posts).splitlines() if not line.startswith((".reg", "{", "}"))
    ]
    waits = max(n for n, line in enumerate(lines) if line.startswith(("barrier.cluster.wait", "@!over")))
    waiting = ("barrier.", "mbarrier.", "again", "@!over")
    for part in (lines[:waits], lines[waits:]):
        for thread in itertools.chain(*threads):
            for line in part:
                if not line.startswith(waiting):
                    thread.run(line)
    for cta in memory:
        assert not posts or f"_, [at], {4 * len(cta.written)};" in begin, "the barrier counts all bytes"
    for rank in range(ctas):
        for n, whole in enumerate(given):
            found = torch.empty(rows, COLUMNS)
            for number, thread in enumerate(threads[rank]):
                for i in range(each):
                    found[place(i, number)] = thread.registers[f"${n * each + i}"]
            assert torch.equal(by_ctas(found, ctas), whole.reshape(ctas, ctas, -1)[:, rank])
