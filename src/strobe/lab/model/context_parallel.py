"""From which length on each method of `strobe.parallel` hides its communication: by formulas, checked by a simulation.

Hidden means that a rank waits for less than HIDDEN of the time that it computes. The machine's rates and shares, and what of
them is assumed, are those of `strobe.parallel.choice`, by which `method="auto"` decides too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table

from strobe.device import KNOWN
from strobe.lab.bench.plot import PEERS, STROBE, plt, save
from strobe.lab.model import schedule
from strobe.masks import Mask
from strobe.parallel.choice import (
    INFINIBAND,
    KERNEL_SHARE,
    LINK_SHARE,
    NVLINK,
    Link,
    Machine,
    Workload,
    head_groups,
    methods,
    name_of,
    predict,
    seen_share,
)
from strobe.parallel.schedules import Method, divides

RANKS = (2, 4, 8, 16, 64, 256, 1024, 4096)
TOKENS = tuple(2**power for power in range(8, 21))
"""Tokens of a GPU that are tried."""
HIDDEN = 0.05
WAYS = ("ring", "allgather", "ulysses", "usp")
SIMULATED = 8
"""Ranks of the calls that are simulated, and whose timelines are drawn."""


def machine(arch: str, link: Link) -> Machine:
    """GPUs of a kind of which all are joined by one kind of link."""
    return Machine(KNOWN[arch], 1 << 30, link, link)


def workload(setting: schedule.Setting, training: bool) -> Workload:
    """What the model sees of a setting."""
    whole = setting.tokens * setting.ranks
    share, far = seen_share(setting.mask, whole, whole, setting.layout == "contiguous")
    return Workload(
        setting.ranks, setting.tokens, setting.tokens, setting.heads_q, setting.heads_kv, setting.head_dim, setting.head_dim,
        setting.dtype.itemsize, share * whole * setting.tokens, far if setting.layout == "contiguous" else 1.0, training,
    )  # fmt: skip


def way(name: str, setting: schedule.Setting, where: Machine, training: bool) -> Method | None:
    """The method that a name means for a setting: of "usp" the fastest that is neither a ring nor one team. None: there is
    none."""
    heads = setting.heads_q, setting.heads_kv
    if name == "allgather":
        return Method("allgather", head_groups(setting.heads_kv))
    if name == "ring":
        return Method("usp", 1)
    if name == "ulysses":
        return Method("usp", setting.ranks) if divides(*heads, setting.ranks) else None
    between = [one for one in methods("usp", setting.ranks, *heads) if 1 < one.size < setting.ranks]
    work = workload(setting, training)
    return min(between, key=lambda one: predict(work, one, where).seconds, default=None)


def hidden_from(name: str, setting: schedule.Setting, where: Machine, training: bool) -> int | None:
    """The least tokens of a GPU from which on a method hides its communication; None if it cannot be used, or never does."""
    for tokens in TOKENS:
        one = setting._replace(tokens=tokens)
        method = way(name, one, where, training)
        if method is None:
            return None
        found = predict(workload(one, training), method, where)
        if found.exposed <= HIDDEN * found.compute:
            return tokens
    return None


def facts(setting: schedule.Setting, arch: str) -> dict:
    """What the model says for 2 to 4096 GPUs, and what the simulation says beside it for few."""
    links = {link.name: link for link in (NVLINK, INFINIBAND)}
    rows = []
    for ranks in RANKS:
        for link in links.values():
            for training in (False, True):
                one, where = setting._replace(ranks=ranks), machine(arch, link)
                found = {name: hidden_from(name, one, where, training) for name in WAYS}
                rows.append({"ranks": ranks, "link": link.name, "training": training, "tokens": found})
    return {
        "what": "context parallelism on paper",
        "arch": arch,
        "setting": {**setting._asdict(), "mask": str(setting.mask), "dtype": str(setting.dtype).removeprefix("torch.")},
        "assumed": {"kernel share": KERNEL_SHARE, "link share": LINK_SHARE, "hidden": HIDDEN},
        "links": [link._asdict() for link in links.values()],
        "rows": rows,
        "simulated": _simulated(setting, arch),
    }


def _simulated(setting: schedule.Setting, arch: str) -> list[dict]:
    """Seconds by the formulas and by the simulation of the schedule itself."""
    found, one = [], setting._replace(ranks=SIMULATED)
    for link in (NVLINK, INFINIBAND):
        where = machine(arch, link)
        for name in WAYS:
            method = way(name, one, where, True)
            if method is None:
                continue
            for back in (False, True):
                formula = _formula(one, method, where, back)
                run = schedule.simulate(one, method, where, back)
                found.append({
                    "link": link.name, "method": name_of(method, one.ranks), "phase": "backward" if back else "forward",
                    "formula": formula, "simulated": run.seconds, "exposed": run.exposed,
                })  # fmt: skip
    return found


def _formula(setting: schedule.Setting, method: Method, where: Machine, back: bool) -> float:
    work = workload(setting, True)
    both, forward = predict(work, method, where).seconds, predict(replace(work, training=False), method, where).seconds
    return both - forward if back else forward


def short(tokens: int | None) -> str:
    """Tokens in a table: 8k for 8192."""
    if tokens is None:
        return "-"
    return f"{tokens}" if tokens < 1024 else f"{tokens // 1024}k" if tokens < 2**20 else f"{tokens // 2**20}M"


def cells(found: dict) -> list[list[str]]:
    """The table's rows, head first: of each number of GPUs and link, tokens for the forward / with the backward."""
    rows = [["GPUs", "link", *WAYS]]
    for forward, both in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        pairs = (f"{short(forward['tokens'][name])} / {short(both['tokens'][name])}" for name in WAYS)
        rows.append([str(forward["ranks"]), forward["link"], *("-" if pair == "- / -" else pair for pair in pairs)])
    return rows


def table(found: dict) -> Table:
    """The table for a terminal."""
    shown = Table(title="tokens a GPU from which on communication is hidden: forward / forward and backward")
    head, *rows = cells(found)
    for column in head:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(*row)
    return shown


def sentence(found: dict) -> str:
    """How far formulas and simulation are apart."""
    ratios = [one["simulated"] / one["formula"] for one in found["simulated"]]
    return (
        f"Simulated step by step on {SIMULATED} GPUs with {short(found['setting']['tokens'])} tokens each, schedules take "
        f"{min(ratios):.2f} to {max(ratios):.2f} times what the formulas say"
    )


def draw(setting: schedule.Setting, found: dict, path: Path) -> Path:
    """Draw from which length on methods are hidden, and the simulated timelines of a ring and an all-gather."""
    figure = plt.figure(figsize=(13, 8.5), layout="constrained")
    upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=(1, 1.4)))
    for panel, link in zip(upper.subplots(1, 2, sharey=True).flat, ("NVLink", "InfiniBand"), strict=True):
        rows = [row for row in found["rows"] if row["link"] == link and row["training"]]
        for name, color in zip(WAYS, (STROBE, *PEERS), strict=False):
            points = [(row["ranks"], row["tokens"][name]) for row in rows if row["tokens"][name]]
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", color=color, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xlabel("GPUs")
        panel.set_title(f"{link}: hidden from, with the backward", fontsize=10)
        panel.grid(color="#E5E5E5")
    upper.axes[0].set_ylabel("tokens a GPU")
    upper.axes[0].legend(frameon=False)
    where, one = machine(found["arch"], INFINIBAND), setting._replace(ranks=SIMULATED)
    names = {"ring": Method("usp", 1), "all-gather": Method("allgather", head_groups(setting.heads_kv))}
    for panel, (name, method) in zip(lower.subplots(2, 1).flat, names.items(), strict=True):
        title = f"{name}, forward, {SIMULATED} GPUs, {short(setting.tokens)} tokens each, InfiniBand: simulated"
        schedule.timeline(panel, title, schedule.simulate(one, method, where), most=2)
    return save(figure, path, dpi=110)


def setting_of(heads: int, heads_kv: int, head_dim: int, mask: Mask, dtype: torch.dtype, tokens: int) -> schedule.Setting:
    """A setting of 8 GPUs: causal masks in zig-zag."""
    layout = "zigzag" if mask.is_causal else "contiguous"
    return schedule.Setting(SIMULATED, tokens, heads, heads_kv, head_dim, mask, layout, dtype)
