"""Small cases of every GPU kernel, for NVIDIA's checker:

compute-sanitizer --tool memcheck python benchmarks/sanitize.py     (likewise racecheck, initcheck, synccheck)
"""

import torch

import strobe


def problem(head_dim: int, n_q: int, n_kv: int, dtype=torch.bfloat16):
    shapes = ((2, n_q, 4, head_dim), (2, n_kv, 2, head_dim), (2, n_kv, 2, head_dim))
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


def main() -> None:
    torch.manual_seed(0)
    masks = (strobe.Full(), strobe.Causal(), strobe.Window(100, 20))
    for head_dim in (64, 128, 256):
        for mask in masks:
            q, k, v = problem(head_dim, 200, 300)
            with torch.no_grad():
                strobe.attention(q, k, v, mask=mask, backend="sm90")
                poisoned = v.clone()
                poisoned[:, 150] = float("nan")  # makes the masked problems redo tiles
                strobe.attention(q, k, poisoned, mask=mask, backend="sm90")
    for mask in (*masks, strobe.Prefix(30) & strobe.Document(torch.randint(0, 3, (2, 130), device="cuda"))):
        q, k, v = problem(40, 130, 130)
        strobe.attention(q, k, v, mask=mask, score=strobe.Score(softcap=5.0), backend="portable").sum().backward()
    q, k, v = (x[0] for x in problem(64, 90, 90))
    cu_seqlens = torch.tensor([0, 17, 17, 80], dtype=torch.int32, device="cuda")
    strobe.attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, mask=strobe.Causal()).sum().backward()
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
