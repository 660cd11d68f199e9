"""Hadamard matrices: entries +1 and -1, rows orthogonal, H H^T = n I.

Orders 2^k (Sylvester), q + 1 for primes q = 3 mod 4 (Paley I: 12, 20, 24, 44, ...), 2 (q + 1) for primes
q = 1 mod 4 (Paley II: 28, 36, 60, ...), and powers of two times these, as Kronecker products with Sylvester
on the right: 576 = 36 x 16, 1536 = 12 x 128, 14336 = 28 x 512. Paley, "On orthogonal matrices" (1933). No
tables; other implementations may list other, equally good matrices of the same order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from workbench.spec.errors import OptionError


def factors(n: int) -> tuple[int, int]:
    """``(m, s)`` with n = m s: a Paley order (or 1) and a power of two, s as large as possible.

    Raises :class:`OptionError` for an order that no construction here reaches (9, 44 x 250, ...).
    """
    s = n & -n if n > 0 else 0
    while s >= 1:
        m = n // s
        if m == 1 or _paley(m):
            return m, s
        s //= 2
    raise OptionError(
        f"No Hadamard matrix of order {n} is constructed here.",
        hint="Use a block size that divides it: a power of two, or 12, 20, 28, 36, 60 times one.",
    )


@cache
def hadamard(n: int) -> Tensor:
    """The matrix of order ``n``, int8 [n, n]; :class:`OptionError` as in :func:`factors`."""
    m, s = factors(n)
    right = torch.ones(1, 1, dtype=torch.int8)
    two = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    while len(right) < s:
        right = torch.kron(right, two)
    if m == 1:
        return right
    kind, q = _paley(m) or (0, 0)
    return torch.kron(_paley_one(q) if kind == 1 else _paley_two(q), right)


def random_signs(n: int, seed: int) -> Tensor:
    """A vector of n random signs, float32, the same for the same seed on every machine."""
    bits = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed))
    return (2 * bits - 1).float()


def _paley(m: int) -> tuple[int, int] | None:
    """Construction (1 or 2) and prime of a Paley order, else None."""
    if _prime(m - 1) and (m - 1) % 4 == 3:
        return 1, m - 1
    if m % 2 == 0 and _prime(m // 2 - 1) and (m // 2 - 1) % 4 == 1:
        return 2, m // 2 - 1
    return None


def _prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))


def _jacobsthal(q: int) -> Tensor:
    """Q[i, j] = 1 where i - j is a square modulo q, -1 where it is none, 0 on the diagonal."""
    squares = {i * i % q for i in range(1, q)}
    legendre = torch.tensor([0] + [1 if d in squares else -1 for d in range(1, q)], dtype=torch.int8)
    i = torch.arange(q)
    return legendre[(i[:, None] - i[None, :]) % q]


def _bordered(q: int, corner: int) -> Tensor:
    """The Jacobsthal matrix with a first row of ones and a first column of ``corner``."""
    out = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    out[0, 1:], out[1:, 0], out[1:, 1:] = 1, corner, _jacobsthal(q)
    return out


def _paley_one(q: int) -> Tensor:
    """I + S with S skew (q = 3 mod 4)."""
    return torch.eye(q + 1, dtype=torch.int8) + _bordered(q, -1)


def _paley_two(q: int) -> Tensor:
    """C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]] with C symmetric (q = 1 mod 4)."""
    a, b = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[1, -1], [-1, -1]])
    return torch.kron(_bordered(q, 1), a.to(torch.int8)) + torch.kron(
        torch.eye(q + 1, dtype=torch.int8), b.to(torch.int8)
    )
