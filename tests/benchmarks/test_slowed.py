"""benchmarks/slowed.py: a kernel in slow motion is the same kernel, with times to wait where warps meet."""

from pathlib import Path

from tritons import answer_of

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import slowed
from strobe.lab.bench.plan import Grid
from strobe.lab.binary import audit

if sys.argv[2:]:
    slowed.slow_down(1, sys.argv[2])
point = Grid(head_dims=((128, 128),), lengths=(4096,), masks=("causal",)).points(False)[0].problem()
[made] = audit.KERNELS["decode-16"].compile(point, audit.ARCHS["sm_90a"])
lines = made.kernel.asm["ptx"].splitlines()
meetings, waits = sum(bool(slowed.MET.match(line)) for line in lines), sum("begun, now," in line for line in lines)
print(json.dumps([len(lines), meetings, waits]))
"""


def made(*arguments: str) -> list[int]:
    """Lines of a kernel's PTX, those at which warps meet, and times to wait; in slow motion if it is told a folder."""
    return answer_of(PROGRAM, str(Path(__file__).parents[2] / "benchmarks"), *arguments)


def test_it_waits_wherever_warps_meet(tmp_path):
    lines, meetings, waits = made()
    slow_lines, slow_meetings, slow_waits = made(str(tmp_path))
    assert waits == 0 and slow_waits == meetings == slow_meetings > 50 and slow_lines > lines + 20 * slow_waits
