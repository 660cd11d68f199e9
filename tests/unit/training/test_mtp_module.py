"""The trained module: a decoder layer of transformers behind a projection; its unrolled passes are the
recursion that a server runs, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workbench.training.mtp.model import MTPModel, joint_loss, next_token_loss, recursive_loss
from workbench.training.mtp.module import MTPLayer, shifted

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    tie_word_embeddings=True,
    initializer_range=0.3,
    attn_implementation="eager",
)
ROWS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def layer() -> MTPLayer:
    """A module with gains that are not one."""
    torch.manual_seed(1)
    made = MTPLayer(CONFIG).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def rotation(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to length - 1, in float64."""
    cos, sin = LlamaRotaryEmbedding(CONFIG)(torch.zeros(1).double(), torch.arange(length)[None])
    return cos, sin


def one_pass(layer: MTPLayer, embeds: Tensor, given: Tensor) -> Tensor:
    """The module on one text, ``given`` [T, H] the state that each row is given: plain, from transformers."""
    hidden = layer.eh_proj(torch.cat((layer.enorm(embeds), layer.hnorm(given)), -1))[None]
    mask = torch.full((hidden.shape[1],) * 2, -torch.inf).double().triu(1)[None, None]
    out = super(MTPLayer, layer).forward(
        hidden, attention_mask=mask, position_embeddings=rotation(hidden.shape[1])
    )
    return out[0]


def test_its_first_pass_is_a_decoder_layer_on_the_state_of_the_row_before(layer: MTPLayer) -> None:
    torch.manual_seed(2)
    embeds, state = torch.randn(1, 9, 16).double(), torch.randn(1, 9, 16).double()
    (found,) = layer.unroll(embeds, state, rotation(9))
    given = torch.cat((torch.zeros(1, 16).double(), state[0, :-1]))
    torch.testing.assert_close(found[0], one_pass(layer, embeds[0], given), rtol=0, atol=1e-12)


def test_pass_d_is_the_step_d_of_a_draft_that_is_fed_with_itself(layer: MTPLayer) -> None:
    torch.manual_seed(3)
    embeds, state = torch.randn(1, 9, 16).double(), torch.randn(1, 9, 16).double()
    passes = layer.unroll(embeds, state, rotation(9), depth=4)
    for root in range(9):  # the newest token: rows up to it are given true states
        given = torch.cat((torch.zeros(1, 16).double(), state[0, :root]))
        for d in range(min(4, 9 - root)):
            out = one_pass(layer, embeds[0, : root + d + 1], given)
            torch.testing.assert_close(passes[d][0, root + d], out[-1], rtol=0, atol=1e-12)
            given = torch.cat((given, out[-1:]))


def test_the_chain_of_modules_is_causal_and_feeds_each_with_the_one_before() -> None:
    model = MTPModel(CONFIG, 3, 0).double()
    with torch.no_grad():
        before = model.chain(ROWS)
        other = ROWS.clone()
        other[:, 5] = (other[:, 5] + 1) % 40
        after = model.chain(other)
        for logits, changed in zip(before.drafts, after.drafts, strict=True):
            assert torch.equal(logits[:, :5], changed[:, :5])
            assert not torch.allclose(logits[:, 5], changed[:, 5])
        first = model.mtp[0]
        kept = first.eh_proj.weight.clone()
        first.eh_proj.weight.mul_(-2)
        changed = model.chain(ROWS)
        assert torch.equal(before.main, changed.main)
        assert not any(torch.allclose(a, b) for a, b in zip(before.drafts, changed.drafts, strict=True))
        first.eh_proj.weight.copy_(kept)
        model.mtp[2].eh_proj.weight.mul_(-2)
        last = model.chain(ROWS)
        assert torch.equal(before.drafts[1], last.drafts[1]) and not torch.equal(
            before.drafts[2], last.drafts[2]
        )


def test_the_twin_starts_from_the_same_weights_and_its_logits_are_the_main_models() -> None:
    model, twin = MTPModel(CONFIG, 1, 7), MTPModel(CONFIG, 0, 7)
    for name, value in twin.main.state_dict().items():
        assert torch.equal(value, model.main.state_dict()[name])
    with torch.no_grad():
        assert torch.equal(model.chain(ROWS).main, twin.main(ROWS).logits)
    assert isinstance(twin.main, LlamaForCausalLM) and not twin.chain(ROWS).drafts


def test_joint_loss_is_the_main_loss_and_a_share_of_each_modules() -> None:
    passes = MTPModel(CONFIG, 2, 0).chain(ROWS)
    one, two = (next_token_loss(p, ROWS, k) for k, p in enumerate(passes.drafts))
    expected = next_token_loss(passes.main, ROWS) + 0.3 / 2 * (one + two)
    torch.testing.assert_close(joint_loss(passes, ROWS, 0.3), expected)
    loss = torch.nn.functional.cross_entropy(passes.drafts[1][:, 1:-1].flatten(0, 1), ROWS[:, 2:].flatten())
    torch.testing.assert_close(two, loss)


@pytest.mark.parametrize("name", ["ce", "kl", "hybrid"])
def test_recursive_training_moves_the_module_alone(name) -> None:
    model = MTPModel(CONFIG, 1, 0)
    recursive_loss(model.recursion(ROWS, 3), ROWS, (0.5, 0.3, 0.2), name, 0.9).backward()
    assert all(p.grad is None for p in model.main.parameters())
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in model.mtp.parameters())


def test_rows_are_moved_back_with_zeros_in_front() -> None:
    rows = torch.arange(6.0).view(1, 3, 2)
    assert shifted(rows).tolist() == [[[0, 0], [0, 1], [2, 3]]]
    assert shifted(rows, 5, dim=1).abs().sum() == 0
    assert shifted(rows, 1, dim=2).tolist() == [[[0, 0], [0, 2], [0, 4]]]
