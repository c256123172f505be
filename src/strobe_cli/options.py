"""Turns the command line's options into values. A wrong option ends the command with one sentence and exit status 2."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    import torch

    from strobe.device import Arch
    from strobe.masks import Mask
    from strobe.problem import AttentionProblem


def at_least(least: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < least:
            raise typer.BadParameter(f"{name.replace('_', '-')} must be {least} or more, got {value}")


def heads_and_dims(heads: int, heads_kv: int | None, head_dim: int, head_dim_v: int | None) -> None:
    if heads % (heads_kv or heads):
        raise typer.BadParameter(f"heads must be a multiple of heads-kv, got {heads} and {heads_kv}")
    for name, dim in (("head-dim", head_dim), ("head-dim-v", head_dim_v)):
        if dim is not None and (dim % 8 or not 8 <= dim <= 256):
            raise typer.BadParameter(f"{name} must be a multiple of 8 from 8 to 256, got {dim}")


def positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{name} must be more than 0, got {value}")
    return value


def one_of(name: str, value: str, allowed) -> str:
    if value not in allowed:
        raise typer.BadParameter(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def names_of(name: str, text: str | None, allowed) -> tuple[str, ...] | None:
    return None if text is None else tuple(one_of(name, part.strip(), allowed) for part in text.split(","))


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave, by name."""
    return {name: value for name, value in options.items() if value is not None}


def alone(context: typer.Context, option: str, *others: str) -> None:
    """Refuses options that have no effect beside `option`: all that the user gave, except `others`."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    idle = [name.replace("_", "-") for name in given if name not in (option, *others)]
    if idle:
        raise typer.BadParameter(f"{option} must be given without {', '.join(idle)}, which would change nothing")


def pairs_of_dims(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """Pairs of head dims (of q and k, of v) from text: "64,192/128" is ((64, 64), (192, 128))."""
    if text is None:
        return None
    pairs = []
    for part in text.split(","):
        dims = numbers_of("head-dims", part.replace("/", ",")) or ()
        if len(dims) > 2 or any(dim % 8 or dim > 256 for dim in dims):
            raise typer.BadParameter(f"head-dims must be multiples of 8 from 8 to 256, or two joined by /, got {part}")
        pairs.append((dims[0], dims[-1]))
    return tuple(pairs)


def pair_of_heads(text: str) -> tuple[int, int]:
    """Query heads and key heads from text: "64/8" is (64, 8), and "32" is (32, 32)."""
    heads = numbers_of("heads", text.replace("/", ",")) or ()
    if len(heads) > 2:
        raise typer.BadParameter(f"heads must be query heads/key heads, such as 64/8, got {text}")
    heads_and_dims(heads[0], heads[-1], 8, None)
    return heads[0], heads[-1]


def numbers_of(name: str, text: str | None, least: int = 1) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{name} must be comma-separated integers, got {text!r}") from None
    at_least(least, **{name: min(numbers)})
    return numbers


def shape_of(name: str, text: str) -> tuple[int, int]:
    """Rows and columns from text: "64x128" is (64, 128)."""
    try:
        rows, columns = (int(part) for part in text.split("x"))
    except ValueError:
        raise typer.BadParameter(f"{name} must be ROWSxCOLUMNS, such as 64x128, got {text!r}") from None
    at_least(1, **{name: min(rows, columns)})
    return rows, columns


def writable(text: str | None) -> str | None:
    """Checks the path of a file to write, so that a bad one is refused at once and not after the work."""
    from os import W_OK, access
    from pathlib import Path

    if text is None:
        return None
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not access(path if path.exists() else path.parent, W_OK):
        raise typer.BadParameter(f"a file to write must be in a folder that is there and takes it, got {text}")
    return text


def picture_path(text: str | None, name: str = "out") -> Path | None:
    """The path of a picture to draw, a PNG or an SVG by its suffix. name: the option's name, for the message."""
    from pathlib import Path

    if text is None:
        return None
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"{name} must end in .png or .svg, got {text}")
    return path


def changed_config(config: Any, text: str, keep: Container[str]) -> Any:
    """A kernel's config with some values changed. text: NAME=VALUE,NAME=VALUE; names in `keep` cannot be changed. A config that
    cannot be is an error of the user."""
    from dataclasses import fields, replace

    if isinstance(config, str):  # on a CPU
        raise typer.BadParameter(f"what runs this has no config to change: {config}")
    known = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in keep}
    changes = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in known or not value:
            raise typer.BadParameter(f"config must be NAME=VALUE with a NAME of {', '.join(known)}, got {part!r}")
        kind = type(known[name])
        try:
            changes[name] = boolean(value) if kind is bool else kind(value)
        except ValueError:
            raise typer.BadParameter(f"config's {name} must be of type {kind.__name__}, got {value!r}") from None
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise typer.BadParameter(f"config: {error}") from None


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


DTYPES_OF_ATTENTION = "bf16", "fp16", "fp32"
DTYPES_OF_FORWARDS = *DTYPES_OF_ATTENTION, "fp8"


def dtype_of(name: str, allowed: Container[str] = DTYPES_OF_ATTENTION) -> torch.dtype:
    from strobe.lab.bench.plan import DTYPES

    return DTYPES[one_of("dtype", name, allowed)]


def fp8_forward(dtypes: Container[str], backward: bool) -> None:
    """Refuses fp8 together with a backward, which has none."""
    if backward and "fp8" in dtypes:
        raise typer.BadParameter("fp8 is a forward's, as attention_fp8 has no gradient, got it with a backward")


def mask_of(causal: bool, window: str | None) -> Mask:
    from strobe.masks import Causal, Full, Window

    mask = Causal() if causal else Full()
    if window is None:
        return mask
    try:
        left, right = (int(part) for part in window.split(","))
    except ValueError:
        raise typer.BadParameter(f"window must be LEFT,RIGHT, such as 1024,0, got {window!r}") from None
    at_least(-1, window=min(left, right))
    return mask & Window(None if left == -1 else left, None if right == -1 else right)


def problem_of(
    *, seqlen_q: int, seqlen_kv: int | None, heads: int, heads_kv: int | None, head_dim: int, head_dim_v: int | None,
    dtype: str, causal: bool, window: str | None, batch: int = 1, softcap: float = 0.0, backward: bool = False,
    dtypes: Container[str] = DTYPES_OF_ATTENTION,
) -> AttentionProblem:  # fmt: skip
    """The dense problem that the options of these names describe. None: as many keys or key heads as queries or query heads;
    v's head dim is that of k. dtypes: which ones are allowed."""
    from strobe.problem import AttentionProblem, Dense
    from strobe.scores import Score

    at_least(0, batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    at_least(1, heads=heads, heads_kv=heads_kv)
    heads_and_dims(heads, heads_kv, head_dim, head_dim_v)
    if not softcap >= 0:
        raise typer.BadParameter(f"softcap must be 0 (none) or positive, got {softcap}")
    return AttentionProblem(
        lengths=Dense(batch, seqlen_q, seqlen_q if seqlen_kv is None else seqlen_kv),
        heads_q=heads,
        heads_kv=heads_kv or heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        dtype=dtype_of(dtype, dtypes),
        scale=head_dim**-0.5,
        mask=mask_of(causal, window),
        score=Score(softcap).facts(),
        phase="backward" if backward else "forward",
    )


def arch_named(name: str | None) -> Arch:
    from strobe.device import CPU, KNOWN, arch_of

    if name is None:
        return arch_of(device_of(None))
    known = {key.lower(): arch for key, arch in KNOWN.items()} | {"cpu": CPU}
    if name.lower() not in known:
        raise typer.BadParameter(f"arch must be one of {', '.join([*KNOWN, 'CPU'])}, got {name!r}")
    return known[name.lower()]


def gpu_named(name: str | None) -> Arch:
    """The arch of that name, or this machine's if None. It must be a GPU."""
    from strobe.device import KNOWN

    arch = arch_named(name)
    if not arch.is_gpu:
        raise typer.BadParameter(f"arch must be a GPU, one of {', '.join(KNOWN)}, where this machine has none, got {arch}")
    return arch


def device_of(name: str | None) -> torch.device:
    import torch

    available = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    return torch.device(one_of("device", name or available[0], available))


def part_of(given: str | None) -> tuple[int, int] | None:
    """Which part, of how many, from text: "2/3" is (2, 3), the second of three parts."""
    if given is None:
        return None
    number, slash, count = given.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter(f"part must be I/N with 1 <= I <= N, got {given!r}")
    return int(number), int(count)


def command_given(arguments: list[str], program: str = "strobe") -> str:
    """The command that reproduces a result: the one that was given, without the files to write and --resume."""
    files = ("--json", "--out", "--perfetto", "--sass")
    kept, rest = [], iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option in files:
            if not equals:  # the file is the next argument
                next(rest, None)
        elif argument != "--resume":
            kept.append(argument)
    return " ".join([program, *map(shlex.quote, kept)])


# ---- options of several commands

DeviceName = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]
GpuName = Annotated[str | None, typer.Option(help="A GPU by name (H200, A100, ...); default: this machine's.")]
HeadDim = Annotated[int, typer.Option(help="Head dim of q and k.")]
HeadDimV = Annotated[int | None, typer.Option(help="Head dim of v; default: that of k.")]
HeadDims = Annotated[str | None, typer.Option(help="Comma-separated, such as 64,192/128 (of q and k / of v).")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadsOf2048 = Annotated[int | None, typer.Option(help="Query heads; default: 2048 / head dim.")]
KeyHeads = Annotated[int | None, typer.Option(help="Key heads; default: as many as query heads.")]
Keys = Annotated[int | None, typer.Option(help="Keys of a sequence; default: as many as queries.")]
Peers = Annotated[str | None, typer.Option(help="Comma-separated, or all that are installed (the default).")]
WindowSides = Annotated[str | None, typer.Option(help="Sliding window LEFT,RIGHT; -1 leaves a side open.")]
JsonFile = Annotated[str | None, typer.Option(help="Write the numbers here, too.", callback=writable)]
