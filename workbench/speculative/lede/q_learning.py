"""Deep Q-learning from a fixed buffer (Mnih et al. 2015, double targets of van Hasselt et al. 2016).

y = r + Q'(s', argmax_a Q(s', a)), nothing behind the end of a round; rounds are short, so nothing is
discounted. The network is small: its cost is part of every decision it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.speculative.lede.replay import Replay
from workbench.speculative.lede.rounds import Policy
from workbench.speculative.lede.state import FEATURES, GO_ON, STOP, Limits, State

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Learning:
    """How the network is fitted; its target follows every ``sync`` steps."""

    steps: int = 2000
    batch: int = 64
    lr: float = 3e-3
    sync: int = 50
    hidden: int = 32
    seed: int = 0


class QNetwork(nn.Module):
    """Worth [N, 2] of stopping and of going on, from states [N, F]."""

    def __init__(self, hidden: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(FEATURES, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, 2),
            )

    def forward(self, states: Tensor) -> Tensor:
        """``states`` float32 [N, F]."""
        out: Tensor = self.layers(states)
        return out

    def values(self) -> Values:
        """What it has learnt, as it stands."""
        linear = [m for m in self.layers if isinstance(m, nn.Linear)]
        return Values([(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in linear])


class Values:
    """A fitted network as plain arrays (weight [out, in], bias [out]): deciding takes microseconds."""

    def __init__(self, layers: Sequence[tuple[Floats, Floats]]) -> None:
        self.layers = tuple(layers)

    def __call__(self, vector: Sequence[float]) -> tuple[float, float]:
        """Worth of stopping and of going on."""
        x: Floats = np.asarray(vector, np.float32)
        for weight, bias in self.layers[:-1]:
            x = np.maximum(weight @ x + bias, 0)
        weight, bias = self.layers[-1]
        stop, go_on = (weight @ x + bias).tolist()
        return stop, go_on

    @property
    def operations(self) -> int:
        """Multiplications of one decision, to be counted against what it saves."""
        return sum(weight.size for weight, _ in self.layers)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(weight.nbytes + bias.nbytes for weight, bias in self.layers)


def targets(online: Callable[[Tensor], Tensor], frozen: Callable[[Tensor], Tensor], batch: Replay) -> Tensor:
    """What Q(s, a) should be [N]: the reward, and what the best action behind it is worth to ``frozen``."""
    with torch.no_grad():
        seen = online(batch.after)
        seen[~batch.open, GO_ON] = -torch.inf
        behind = frozen(batch.after).gather(1, seen.argmax(1, keepdim=True))[:, 0]
        return batch.rewards + torch.where(batch.going, behind, 0.0)


def learn(
    replay: Replay, learning: Learning = Learning(), on_loss: Callable[[int, float], None] = lambda i, x: None
) -> QNetwork:
    """A network fitted to the buffer; the same for the same buffer and seed."""
    online, frozen = (QNetwork(learning.hidden, learning.seed) for _ in range(2))
    optimizer = torch.optim.Adam(online.parameters(), lr=learning.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learning.steps)
    batches = replay.batches(learning.batch, learning.seed)
    for step, batch in zip(range(learning.steps), batches, strict=False):
        if step % learning.sync == 0:
            frozen.load_state_dict(online.state_dict())
        wanted = targets(online, frozen, batch)
        # Squares, not Huber's loss: outcomes are chance, and it would fit something nearer to their median.
        loss = F.mse_loss(online(batch.states).gather(1, batch.actions[:, None])[:, 0], wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        on_loss(step, float(loss.detach()))
    return online


def greedy(values: Values, limits: Limits) -> Policy:
    """The policy that does what is worth most."""

    def policy(state: State) -> int:
        stop, go_on = values(state.vector(limits))
        return GO_ON if state.may_go_on(limits) and go_on > stop else STOP

    return policy
