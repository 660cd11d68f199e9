"""The pinned class: a row's bits do not depend on chunking, on its neighbours, or on spare threads."""

import pytest
import torch

from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.gated import ACTIVATIONS, pinned_gated
from workbench.models.norms import fast_norm, pinned_norm
from workbench.models.plain import plain_pack
from workbench.models.source import DictSource
from workbench.models.weightset import build_weight_set

T = 40
# Odd sizes leave vector tails; 40 rows of 2 * 1111 are split between threads.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 54,
    "intermediate_size": 1111,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "final_logit_softcapping": 3.0},
}


def source(family):
    """Random weights for one family."""
    torch.manual_seed(0)
    config = ModelConfig.from_hf({**SIZES, **FAMILIES[family]})
    h, f = config.hidden_size, config.intermediate_size
    shapes = {
        "model.embed_tokens": (config.vocab_size, h),
        "lm_head": (config.vocab_size, h),
        "model.norm": (h,),
    }
    for i in range(config.num_layers):
        at, mlp, norm = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp", f"model.layers.{i}"
        shapes |= {f"{at}.q_proj": (config.q_size, h), f"{at}.o_proj": (h, config.q_size)}
        shapes |= {f"{at}.k_proj": (config.kv_size, h), f"{at}.v_proj": (config.kv_size, h)}
        shapes |= {f"{mlp}.gate_proj": (f, h), f"{mlp}.up_proj": (f, h), f"{mlp}.down_proj": (h, f)}
        shapes |= {f"{at}.q_norm": (config.head_dim,), f"{at}.k_norm": (config.head_dim,)}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{norm}.{name}_layernorm"] = (h,)
    tensors = {f"{name}.weight": torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return DictSource(config, tensors)


class RowByRow:
    """Attention that treats every query alone, so that its own operations depend on the position only."""

    def __init__(self, config):
        self.config, self.seen = config, 0
        self.k = [torch.empty(0)] * config.num_layers
        self.v = [torch.empty(0)] * config.num_layers

    def __call__(self, layer, q, k, v):
        start = len(self.k[layer])
        self.k[layer] = torch.cat((self.k[layer], k)) if start else k.clone()
        self.v[layer] = torch.cat((self.v[layer], v)) if start else v.clone()
        rows = [self._row(layer, q[i], start + i) for i in range(len(q))]
        return torch.stack(rows).reshape(len(q), -1)

    def _row(self, layer, q, position):
        first = max(0, position + 1 - (self.config.window(layer) or position + 1))
        group = q.shape[0] // self.config.num_kv_heads
        k = self.k[layer][first : position + 1].repeat_interleave(group, 1).contiguous()
        v = self.v[layer][first : position + 1].repeat_interleave(group, 1).contiguous()
        weights = (q.clone() * k).sum(-1).softmax(0)
        return (weights[..., None] * v).sum(0)


def run(weights, config, ids, chunks):
    """Logits [T, V] of ``ids`` fed in ``chunks``."""
    decoder, attention, out, start = Decoder(config, weights), RowByRow(config), [], 0
    with torch.inference_mode():
        for size in chunks:
            positions = torch.arange(start, start + size)
            out.append(decoder.forward(ids[start : start + size], positions, attention).logits)
            start += size
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pinned_logits_do_not_depend_on_chunking(family, dtype):
    model = source(family)
    weights = build_weight_set(
        model, plain_pack(dtype, "pinned", activation=model.config.activation), dtype, "pinned"
    )
    ids = torch.randint(0, 61, (T,))
    whole = run(weights, model.config, ids, [T])
    assert whole.isfinite().all()
    for chunks in ([1] * T, [7, 1, 32], [8] * 5, [39, 1], [3, 13, 24]):
        assert torch.equal(run(weights, model.config, ids, chunks), whole), chunks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[], [4], [0, 7, 38]], ids=str)
def test_rows_without_logits_may_stop_before_the_last_mlp(family, dtype, rows):
    model = source(family)
    decoder = Decoder(
        model.config,
        build_weight_set(
            model, plain_pack(dtype, "pinned", activation=model.config.activation), dtype, "pinned"
        ),
    )
    ids, positions, want = torch.randint(0, 61, (T,)), torch.arange(T), torch.tensor(rows, dtype=torch.int64)
    whole = decoder.forward(ids, positions, RowByRow(model.config))
    last = model.config.num_layers
    for capture in ((), (last,)):
        out = decoder.forward(ids, positions, RowByRow(model.config), logits_rows=want, capture=capture)
        assert torch.equal(out.logits, whole.logits[want])
        assert torch.equal(out.hidden, whole.hidden[want])
        assert all(stream.shape[0] == T for stream in out.captured.values())


@pytest.mark.parametrize("rows", range(1, T + 1))
def test_elementwise_rows_have_the_same_bits_in_any_number(rows):
    torch.manual_seed(0)
    x, gain = torch.randn(T, 2222), torch.rand(2222)
    norm = pinned_norm(gain, 1e-6)
    for start in (0, T - rows):
        part = x[start : start + rows]
        assert torch.equal(norm(part), norm(x)[start : start + rows])
        for gated in map(pinned_gated, ACTIVATIONS):
            assert torch.equal(gated(part), gated(x)[start : start + rows])


def test_both_norms_compute_the_same_function():
    torch.manual_seed(0)
    x, gain = torch.randn(9, 577, dtype=torch.float64), torch.rand(577, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    for norm in (fast_norm(gain, 1e-3), pinned_norm(gain, 1e-3)):
        assert torch.allclose(norm(x), expected, rtol=1e-13, atol=0)
    assert fast_norm(gain, 1e-3)(torch.zeros(1, 577, dtype=torch.float64)).abs().max() == 0
