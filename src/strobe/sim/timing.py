from types import SimpleNamespace


def costs_of(arch):
    return SimpleNamespace(
        arrive=20,
        wait=20,
        named_barrier=20,
        tma_issue=20,
        tma_bytes=64,
        tma_latency=600,
        cp_async_latency=500,
        mma_issue=20,
        mma_latency=100,
        commit_latency=50,
        register_latency=6,
        rate=lambda p: {
            "fma": 128,
            "fma2": 256,
            "alu": 64,
            "mufu": 16,
            "shuffle": 32,
            "mma": 1024 * 2048 // 2,
            "shared": 128,
            "global": 32,
            "tmem_load": 128,
            "tmem_store": 128,
            "cp_async": 128,
        }[p],
        unit=lambda p: {"fma2": "fma"}.get(p, p),
        per_instruction=lambda p: 2 if p == "fma2" else 1,
        mma_cycles=lambda m, n, k, size, regs: m * n * k * 2 / (4096 if arch < 100 else 8192),
    )
