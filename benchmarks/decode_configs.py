"""Configs of decode's kernels beside each other at one step: today's choice, another rule's, and what changes make of them.

For whoever wants to change a rule, or to see where the numbers beside it come from. On a GPU each config is compared with
float64, and timed as `strobe bench decode` times, beside FlashAttention-3 with its plan made ahead where that is installed.
With `--compile` each is compiled for a GPU that need not be there, for its registers, spills and shared memory.

    python benchmarks/decode_configs.py --batch 32 --length 2048 --heads 32/4 --queries 16 --head-dim 256 [--page 64] [--ragged]
        [--window 1024] [--cache e4m3] [--deterministic] --try start=9 --try tokens=32,box=32,stages=5 --try mma
        --try wgmma:heads_abreast=8 [--rounds 9] [--compile H200] [--json FILE]

--try: [RULE:]FIELD=VALUE,..., fields of `strobe.kernels.decode.config.Config`; RULE: chosen, mma, long_steps, one_group, wgmma,
wide, converted or shares, alone, too.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from strobe.call import launches
from strobe.call.torch_internals import raw_stream
from strobe.device import KNOWN, Arch, arch_of
from strobe.kernels.decode import choice, launch, shares, wide_heads
from strobe.kernels.decode.config import Config
from strobe.lab.bench.bench import CudaClock
from strobe.lab.bench.decode import line_of, measure
from strobe.lab.bench.decode_peers import Call, Contender, Inputs, Point, described, peers_for
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import provenance, save
from strobe.lab.binary import offline
from strobe.serving.arguments import checked
from strobe.serving.problem import DecodeOperands, DecodeProblem, describe

Rule = Callable[[DecodeProblem, Arch], Config]

RULES: dict[str, Rule] = {
    "chosen": choice.choose,
    "mma": choice.of_mma,
    "long_steps": choice.of_long_steps,
    "one_group": choice.of_one_group,
    "wgmma": choice.of_wgmma,
    "wide": wide_heads.of_wgmma,
    "converted": choice.of_converted,
    "shares": shares.of_shares,
}
FIELDS = {field.name for field in fields(Config)}
PEER = "FA3 planned"


def rule_of(text: str) -> Rule:
    """The rule of a `--try`. ValueError if it names a rule or a field that there is not, or a value that is none."""
    name, _, changes = (text if ":" in text else f"{text}:" if text in RULES else f"chosen:{text}").partition(":")
    if name not in RULES:
        raise ValueError(f"a rule must be one of {', '.join(RULES)}, got {name!r}")
    changed = {}
    for change in filter(None, changes.split(",")):
        field, _, value = change.partition("=")
        if field not in FIELDS:
            raise ValueError(f"a change must be FIELD=VALUE of Config's fields, got {change!r}")
        try:
            changed[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"a change must be FIELD=VALUE with a number, True or False, got {change!r}") from None

    def made(problem: DecodeProblem, arch: Arch) -> Config:
        config = replace(RULES[name](problem, arch), **changed)
        return replace(choice.dealt_out(config, problem, arch), **changed)

    return made


def prepare(rule: Rule, deterministic: bool, inputs: Inputs) -> Call:
    """A call of the kernel with a rule's config."""
    operands, options = checked(inputs.q, inputs.cache, inputs.point.mask, out=inputs.out, deterministic=deterministic)
    problem, arch = describe(operands, options), arch_of(inputs.q.device)
    config = rule(problem, arch)
    backend = SimpleNamespace(
        buffers=lambda problem, arch: launch.buffers(problem, arch, config),
        calls=lambda problem, tensors, arch: launch.calls(problem, tensors, arch, config),
    )
    own = DecodeOperands._make(None if x is None else x.detach() for x in operands)
    prepared = launches.prepared(backend, problem, own)  # type: ignore[arg-type]
    assert prepared is not None
    addresses = [x.data_ptr() for x in operands if x is not None]

    def call() -> torch.Tensor:
        prepared.decode(raw_stream(inputs.q.get_device()), addresses)
        return inputs.out

    return call


def compiled(point: Point, rules: dict[str, Rule], deterministic: bool, arch: Arch) -> None:
    """Print what a compiler makes of each config."""
    problem, operands = described(point, deterministic)
    for name, rule in rules.items():
        try:
            config = rule(problem, arch)
            found = offline.decode(problem, operands, arch, config)[0].audit()
        except Exception as reason:
            print(f"{name:<40} refused: {compact(reason)}", flush=True)
            continue
        print(f"{name:<40} {found.registers} registers, {found.spill_bytes} bytes spilled, {found.smem_bytes} of shared memory")


def timed(point: Point, rules: dict[str, Rule], deterministic: bool, rounds: int) -> dict:
    """Time each config beside the peer, and return what `strobe bench decode` notes of a point."""
    device = torch.device("cuda")
    clock, peer = CudaClock(device), peers_for(device)[PEER]
    contenders = [Contender(name, partial(prepare, rule, deterministic)) for name, rule in rules.items()]
    contenders += [peer] if peer.installed else []
    with torch.no_grad(), clock.running():
        return measure(point, contenders, clock, device, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", default="64/8", help="query heads/key heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--page", type=int, default=64, help="0: contiguous")
    parser.add_argument("--cache", default="bf16")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="[RULE:]FIELD=VALUE,...")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", choices=sorted(KNOWN), help="compile alone, for this GPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        rules = {"today's": RULES["chosen"]} | {text: rule_of(text) for text in arguments.tries}
    except ValueError as error:
        parser.error(str(error))
    heads, _, heads_kv = arguments.heads.partition("/")
    point = Point(
        arguments.batch, arguments.length, int(heads), int(heads_kv or heads), arguments.head_dim, arguments.queries,
        arguments.page, arguments.cache, arguments.ragged, arguments.window,
    )  # fmt: skip
    if arguments.compile:
        return compiled(point, rules, arguments.deterministic, KNOWN[arguments.compile])
    if not torch.cuda.is_available():
        parser.error("times need a GPU; --compile H200 shows registers and spills without one")
    facts = timed(point, rules, arguments.deterministic, arguments.rounds)
    print(line_of(facts))
    for name, result in facts["results"].items():
        if "refused" in result:
            print(f"{name}: {result['refused']}")
    if arguments.json:
        save(arguments.json, {"what": "decode configs", **provenance(torch.device("cuda")), "points": [facts]})


if __name__ == "__main__":
    main()
