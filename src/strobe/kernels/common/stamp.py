"""Stamps: the SM's clock, written to global memory where a kernel passes the events that its timeline is drawn from.

A kernel takes a pointer `trace`, int64 [blocks, CTAs, ROLES, len(EVENTS)] and zeroed, or None: then its stamps compile to
nothing. The roles of a CTA share the clock of their SM; the clocks of different SMs have nothing to do with each other.
"""

from strobe.kernels.gluon import gl, gluon

ROLES = gl.constexpr(8)

EVENTS = ("begin", "k_issued", "v_issued", "k_ready", "s_ready", "p_ready", "o_ready", "epilogue", "end")
"""Events of a role. For each key block: the role turns to it; the copies of K and V are issued; K is there; S = Q K^T,
P = softmax(S) and O += P V are done. For each tile (index 0): its epilogue begins; the role is done."""

COUNT = gl.constexpr(len(EVENTS))
NUMBERS = {event: number for number, event in enumerate(EVENTS)}


@gluon.constexpr_function
def number(event):
    return NUMBERS[event]


@gluon.jit
def clock():
    """The SM's cycle counter, int64."""
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def stamp(trace, ROLE: gl.constexpr, EVENT: gl.constexpr, index):
    """Note, by one thread of the role, that it passes EVENT of block `index` now."""
    if trace is not None:
        EVENT_NUMBER: gl.constexpr = number(EVENT)
        place = ((index * gl.num_programs(0) + gl.program_id(0)) * ROLES + ROLE) * COUNT + EVENT_NUMBER
        gl.store(trace + place, clock())
