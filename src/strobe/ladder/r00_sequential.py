"""Rung 0: one core of the CPU, one number after the other, compiled.

q, k, v, out [heads, S, D], float32. For each query: its scores against all keys, their softmax, and the weighted sum of the
values. Everything above is measured against this.
"""

import math

import numba
import numpy as np


@numba.njit
def sequential(q, k, v, out, scale):
    heads, rows, D = q.shape
    S = k.shape[1]
    weights = np.empty(S, np.float32)
    for head in range(heads):
        for row in range(rows):
            largest = np.float32(-np.inf)
            for key in range(S):
                score = np.float32(0)
                for d in range(D):
                    score += q[head, row, d] * k[head, key, d]
                weights[key] = score * scale
                largest = max(largest, weights[key])
            total = np.float32(0)
            for key in range(S):
                weights[key] = math.exp(weights[key] - largest)
                total += weights[key]
            for d in range(D):
                out[head, row, d] = 0
            for key in range(S):
                for d in range(D):
                    out[head, row, d] += weights[key] * v[head, key, d]
            for d in range(D):
                out[head, row, d] /= total


def attention(q, k, v):
    out = q.new_empty(q.shape)
    sequential(q.numpy(), k.numpy(), v.numpy(), out.numpy(), np.float32(q.shape[-1] ** -0.5))
    return out
