"""SPD-02: the probability in the accept ratio is the one the draft token was drawn from."""

import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.engine.sampling import PositionNoise
from workbench.speculative.verify import ExactVerify

ROUNDS = 40_000
P_LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5], dtype=torch.float64)
Q_LOGITS = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
P, Q = P_LOGITS.softmax(-1), Q_LOGITS.softmax(-1)
BEST = int(Q.argmax())


def cool(noise):
    return noise.draft((Q_LOGITS / 0.5).softmax(-1), 0)


DRAFTS = {
    "sampled": (lambda noise: noise.draft(Q, 0), Q),
    "cooler": (cool, (Q_LOGITS / 0.5).softmax(-1)),
    "argmax": (lambda noise: BEST, None),
}
WRONG = {"cooler, raw q": (cool, Q), "argmax, soft q": (lambda noise: BEST, Q)}


def total_variation(draw, q, rounds=ROUNDS):
    verify = ExactVerify()
    p = P.repeat(2, 1)
    counts = torch.zeros(4, dtype=torch.float64)
    accepted = 0
    for seed in range(rounds):
        noise = PositionNoise(seed, 0, 1)
        tree = DraftTree.chain([draw(noise)], "toy", None if q is None else q[None])
        verdict = verify.sampled(tree, p, noise.token, noise.coin)
        counts[tree.tokens[0] if verdict.path else verdict.token] += 1
        accepted += len(verdict.path)
    return float((counts / rounds - P).abs().sum()) / 2, accepted / rounds


@pytest.mark.parametrize("mode", DRAFTS)
def test_spd_02_output_law_does_not_depend_on_how_drafts_are_made(mode):
    torch.testing.assert_close(P, torch.tensor([0.4551, 0.2760, 0.1674, 0.1015]).double(), atol=5e-5, rtol=0)
    distance, accepted = total_variation(*DRAFTS[mode])
    assert distance <= 0.02
    if mode == "sampled":
        assert abs(accepted - 0.538) <= 0.02
        assert abs(float(torch.minimum(P, Q).sum()) - 0.538) < 5e-4


@pytest.mark.parametrize("mode", WRONG)
def test_spd_02_a_ratio_with_another_law_drifts(mode):
    distance, _ = total_variation(*WRONG[mode], rounds=5_000)
    assert distance > 0.05
