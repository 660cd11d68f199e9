"""The loss of Medusa heads against its definition, written head by head with all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from workbench.training.heads.conversations import Conversation
from workbench.training.heads.losses import loss_of
from workbench.training.heads.medusa import WEIGHT, MedusaHeads, MedusaLoss, Shape, normed
from workbench.training.heads.rows import Rows, targets


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("name, share", [("kl", 0.0), ("ce", 0.0), ("hybrid", 0.9)])
def test_a_head_answers_for_the_law_of_the_row_it_looks_at(name, share, own_rows, lab):
    engine = lab.make_engine("paged")
    decoder, source = engine.executor.decoder, lab.random_source()
    matrix = source.tensor("model.embed_tokens.weight")
    gen = torch.Generator().manual_seed(7)
    rows = []
    for n in (9, 4, 14):  # the second is shorter than some heads look ahead
        ids = torch.randint(lab.VOCAB, (n,), generator=gen)
        conversation = Conversation(tuple(ids.tolist()), 2, True)
        rows.append(Rows.of(conversation, torch.randn(n, 64, generator=gen).bfloat16()))
    ids = torch.randperm(lab.VOCAB, generator=gen)
    shape = Shape(heads=3, rank=8, vocab=40, loss=name, own_rows=own_rows)
    model = MedusaHeads(shape, 64, rows=matrix[ids[:40]] if own_rows else None)
    with torch.no_grad():
        for parameter in (model.up, *([model.rows] if own_rows else [])):
            parameter += torch.randn(parameter.shape, generator=gen) * 0.5
    loss = MedusaLoss(model, shape, decoder, matrix, ids, rows)
    value, tokens = loss([0, 1, 2], share)
    value.backward()
    found = [p.grad.clone() for p in model.parameters()]

    kept = matrix[ids[:40]].double()
    place = {int(t): i for i, t in enumerate(ids[:40])}
    z = normed(decoder, torch.cat([r.stream for r in rows]))
    wanted, states = targets(rows, 3), model(z)
    law = (z.double() @ kept.T).softmax(-1)
    said = [model.rows[k].double() if own_rows else kept for k in range(3)]
    total, weights, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for k in range(3):
        each = [
            loss_of(
                name,
                F.linear(states[i, k].double(), said[k])[None],
                torch.tensor([place[int(wanted[i, k])]]),
                law[None, i + k + 1],
                share,
            )
            for i in range(len(z))
            if int(wanted[i, k]) in place
        ]
        total = total + WEIGHT ** (k + 1) * torch.cat(each).mean()
        weights, count = weights + WEIGHT ** (k + 1), count + len(each)
    assert tokens == count
    torch.testing.assert_close(value.double(), total / weights, rtol=1e-5, atol=1e-6)
    model.zero_grad()
    (total / weights).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
