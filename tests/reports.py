"""A small report of `strobe bench`, for the tests of what is made of one."""

from strobe.lab.bench import bench


def report() -> dict:
    """A report of two points: the peer has no number at the second, and another one was never installed."""
    shape = {"batch": 16, "length": 1024, "heads": 16, "heads_kv": 16, "head_dim": 128, "head_dim_v": 128}
    point = shape | {"dtype": "bf16", "backward": False, "finished": True, "telemetry": {"sm_clock_mhz": 1500.0}}
    missing = {"FA4": {"refused": "ModuleNotFoundError: No module named 'flash_attn'"}}
    full = {"strobe": bench.summary(6e14, [1.0, 1.2, 0.8]), "cuDNN": bench.summary(5e14, [1.0])} | missing
    causal = {"strobe": bench.summary(3e14, [1.0]), "cuDNN": {"refused": "wrong"}} | missing
    packages = {"torch": "2.11.0", "triton": "3.6.0"}
    device = {"kind": "cuda", "name": "NVIDIA H200", "driver": "570", "cudnn": 91900, "commit": "abc", "sms": 132}
    device |= {"packages": packages}
    return {
        "schema": 2,
        "not installed": ["FA3"],
        "what": "forward",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "strobe bench",
        "stopped": None,
        "device": device,
        "protocol": {"rounds": 3},
        "contenders": ["strobe", "cuDNN", "FA4"],
        "host_us": {"strobe": {"us": 30.0}, "FA4": {"refused": "missing"}},
        "ceiling": {"before": 800.0, "after": 790.0, "matmul": "8192 x 8192 x 8192, bf16"},
        "points": [point | {"mask": "full", "results": full}, point | {"mask": "causal", "results": causal}],
    }
