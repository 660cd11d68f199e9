"""The decoder against transformers' own models, every family and rope scaling.

The oracle is transformers' model run in float64, with the places where it drops to float32 (norms,
rotary tables, Gemma's embedding scale) replaced by their float64 formulas.
"""

import copy
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from workbench.kernels.cpu import compiler
from workbench.models import compiled
from workbench.models.config import FULL, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.plain import plain_pack
from workbench.models.rope import frequencies
from workbench.models.source import DictSource
from workbench.models.weightset import build_weight_set
from workbench.spec.errors import Cancelled, MissingTensor, PromptTooLong, WrongShape

T, V, D = 44, 96, 16
SIZES = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": D,  # 4 * 16 is not the hidden size
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


def llama(**changes):
    return LlamaConfig(**{**SIZES, **changes}), LlamaForCausalLM


def gemma(**changes):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    settings = {
        "layer_types": kinds,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 5.0,
    }
    return Gemma3TextConfig(**{**SIZES, **settings, **changes}), Gemma3ForCausalLM


FAMILIES = {
    "llama": lambda: llama(),
    "llama-mqa-tied": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biased": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-narrow-heads": lambda: llama(head_dim=6),
    "mistral": lambda: (MistralConfig(**{**SIZES, "sliding_window": 7}), MistralForCausalLM),
    "qwen2": lambda: (Qwen2Config(**SIZES), Qwen2ForCausalLM),
    "qwen2-window": lambda: (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        Qwen2ForCausalLM,
    ),
    "qwen3": lambda: (Qwen3Config(**{**SIZES, "attention_bias": True}), Qwen3ForCausalLM),
    "gemma3": lambda: gemma(),
    "gemma3-scaled": lambda: gemma(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "rope-linear": lambda: llama(**rope("linear", factor=4.0)),
    "rope-dynamic": lambda: llama(**rope("dynamic", factor=2.0)),
    "rope-yarn": lambda: llama(**rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "rope-llama3": lambda: llama(
        **rope(
            "llama3",
            factor=4.0,
            original_max_position_embeddings=16,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
    ),
    "rope-longrope": lambda: llama(
        **rope(
            "longrope",
            short_factor=[1.0] * (D // 2),
            long_factor=[1.0 + i for i in range(D // 2)],
            original_max_position_embeddings=16,
        )
    ),
}


class DenseAttention:
    """Causal attention over everything seen so far, written without regard to speed."""

    def __init__(self, config):
        self.config = config
        self.cache = {}

    def __call__(self, layer, q, k, v):
        before_k, before_v = self.cache.get(layer, (k[:0], v[:0]))
        k, v = self.cache[layer] = torch.cat((before_k, k)), torch.cat((before_v, v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1))
        own = torch.arange(len(k) - len(q), len(k))[:, None]
        age = own - torch.arange(len(k))
        window = self.config.window(layer) or len(k)
        scores = scores.masked_fill((age < 0) | (age >= window), -math.inf)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))
        return out.reshape(len(q), -1)


def randomised(make):
    """A transformers model whose every parameter matters, and its config."""
    torch.manual_seed(0)
    config, architecture = make()
    config._attn_implementation = "sdpa"
    model = architecture(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    return model, ModelConfig.from_hf(config.to_dict())


def in_float64(model, config):
    """A float64 copy of ``model`` without its detours through float32."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            module.forward = lambda x, m=module, eps=eps: F.rms_norm(
                x, x.shape[-1:], m.weight + config.norm_offset, eps
            )
        if name == "Gemma3TextScaledWordEmbedding":
            module.embed_scale.fill_(module.scalar_embed_scale)

    def rotary(x, position_ids, layer_type=FULL):
        spec = config.rope_of(layer_type if layer_type in dict(config.rope) else config.rope[0][0])
        angles = position_ids[..., None].double() * frequencies(spec, config.head_dim, config.max_position)
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor

    exact.model.rotary_emb.forward = rotary
    return exact


def decoder(model, config, dtype, numerics="fast"):
    source = DictSource(config, model.state_dict())
    return Decoder(config, build_weight_set(source, plain_pack(dtype, numerics), dtype, numerics))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """(name, float32 model, config, ids, float64 logits) of one family."""
    model, config = randomised(FAMILIES[request.param])
    ids = torch.randint(0, V, (T,))
    with torch.inference_mode():
        expected = in_float64(model, config)(ids[None]).logits[0]
    return request.param, model, config, ids, expected


@pytest.mark.parametrize("numerics", ["fast", "pinned"])
def test_float64_logits_equal_transformers(family, numerics):
    _, model, config, ids, expected = family
    run = decoder(model, config, torch.float64, numerics)
    with torch.inference_mode():
        got = run.forward(ids, torch.arange(T), DenseAttention(config)).logits
    assert expected.std() > 0.1  # the comparison is of something
    assert (got - expected).abs().max() < 1e-10


@pytest.mark.parametrize("numerics", ["fast", "pinned"])
def test_float32_error_is_within_twice_transformers_own(family, numerics):
    _, model, config, ids, expected = family
    run = decoder(model, config, torch.float32, numerics)
    with torch.inference_mode():
        theirs = (model(ids[None]).logits[0] - expected).abs().max()
        got = run.forward(ids, torch.arange(T), DenseAttention(config)).logits
    assert (got - expected).abs().max() <= 2 * theirs + 1e-6


def test_a_prefix_and_the_rest_equal_the_whole(family):
    _, model, config, ids, expected = family
    run, attention = decoder(model, config, torch.float64), DenseAttention(config)
    with torch.inference_mode():
        first = run.forward(ids[:19], torch.arange(19), attention)
        rows = torch.tensor([T - 20, T - 19 - 1])
        rest = run.forward(ids[19:], torch.arange(19, T), attention, logits_rows=rows)
    assert (first.logits - expected[:19]).abs().max() < 1e-10
    assert rest.hidden.shape == (2, config.hidden_size)
    assert (rest.logits - expected[19:][rows]).abs().max() < 1e-10


def test_sixteen_bit_logits_stay_near(family):
    """bfloat16 keeps 8 bits: each of ~20 roundings moves a logit by a few parts in 2^8 of its spread."""
    _, model, config, ids, expected = family
    run = decoder(model, config, torch.bfloat16)
    with torch.inference_mode():
        got = run.forward(ids, torch.arange(T), DenseAttention(config)).logits
    assert got.dtype is torch.float32
    error = (got - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 20**0.5 * 2**-6


@pytest.fixture(scope="module")
def kernels():
    """The compiled CPU kernels."""
    if not compiler.supported() or compiler.find() is None:
        pytest.skip("needs 64-bit Linux and a C++ compiler")
    return compiled.kernels()


def test_compiled_layers_err_no_more_than_the_torch_ones(family, kernels):
    """All rows at once, row by row, and with few rows left behind the last layer; same stored weights."""
    _, model, config, ids, expected = family
    usual = decoder(model, config, torch.bfloat16)
    pack = compiled.compiled_pack(kernels, config.activation)
    weights = build_weight_set(DictSource(config, model.state_dict()), pack, torch.bfloat16)
    assert compiled.is_compiled(weights, config)
    run = Decoder(config, weights)

    def error(logits, rows=slice(None)):
        return (logits - expected[rows]).square().mean().sqrt() / expected.std()

    with torch.inference_mode():
        allowed = 2 * error(usual.forward(ids, torch.arange(T), DenseAttention(config)).logits) + 1e-3
        whole = run.forward(ids, torch.arange(T), DenseAttention(config), capture={0, 1, config.num_layers})
        assert error(whole.logits) <= allowed
        assert torch.equal(whole.captured[0], run.embed(ids))  # nothing is written over
        attention = DenseAttention(config)
        alone = [run.forward(ids[i : i + 1], torch.tensor([i]), attention).logits for i in range(T)]
        assert error(torch.cat(alone)) <= allowed
        rows = torch.tensor([T - 1, 3, 17])
        few = run.forward(ids, torch.arange(T), DenseAttention(config), logits_rows=rows)
        assert few.hidden.shape == (3, config.hidden_size)
        assert error(few.logits, rows) <= allowed
        again = run.forward(ids, torch.arange(T), DenseAttention(config))
        assert torch.equal(again.logits, whole.logits)


def test_captured_residuals_are_transformers_hidden_states():
    model, config = randomised(FAMILIES["qwen3"])
    ids = torch.randint(0, V, (T,))
    with torch.inference_mode():
        states = in_float64(model, config)(ids[None], output_hidden_states=True).hidden_states
        run = decoder(model, config, torch.float64)
        out = run.forward(ids, torch.arange(T), DenseAttention(config), capture={0, 2, 3})
    assert set(out.captured) == {0, 2, 3}
    for layer in (0, 2):
        assert (out.captured[layer] - states[layer][0]).abs().max() < 1e-10
    assert (out.hidden - states[-1][0]).abs().max() < 1e-10  # transformers norms its last state


def test_gemma_rounds_the_embedding_scale_to_the_model_dtype():
    model, config = randomised(FAMILIES["gemma3"])
    run = decoder(model, config, torch.bfloat16)
    weights = model.model.embed_tokens.weight.bfloat16()
    scale = torch.tensor(48**0.5).bfloat16()
    assert scale.item() != 48**0.5
    assert torch.equal(run.embed(torch.arange(V)), weights.float() * scale.float())


def test_positions_beyond_the_context_are_refused():
    model, config = randomised(FAMILIES["llama"])
    run = decoder(model, config, torch.float32)
    with pytest.raises(PromptTooLong, match="64"):
        run.forward(torch.tensor([1]), torch.tensor([64]), DenseAttention(config))


def test_ldr_01_a_tied_head_shares_storage_and_a_missing_one_is_never_invented():
    model, config = randomised(FAMILIES["llama-mqa-tied"])
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    weights = build_weight_set(DictSource(config, state), plain_pack(torch.float32), torch.float32)
    assert weights.head.held[0].data_ptr() == weights.embed.data_ptr()
    model, config = randomised(FAMILIES["llama"])
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    with pytest.raises(MissingTensor, match="lm_head"):
        build_weight_set(DictSource(config, state), plain_pack(torch.float32), torch.float32)


def test_bytes_are_those_of_the_storages_held():
    model, config = randomised(FAMILIES["llama-mqa-tied"])
    source = DictSource(config, model.state_dict())
    weights = build_weight_set(source, plain_pack(torch.float64), torch.float64)
    parameters = sum(p.numel() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    assert weights.nbytes() == 8 * parameters
    assert sum(weights.kernels().values()) == 4 * config.num_layers + 1


def test_wrong_shapes_and_missing_tensors_are_named():
    model, config = randomised(FAMILIES["llama"])
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong = {**model.state_dict(), name: torch.zeros(3, 3)}
    with pytest.raises(WrongShape, match=name):
        build_weight_set(DictSource(config, wrong), plain_pack(torch.float32), torch.float32)
    missing = {k: v for k, v in model.state_dict().items() if k != name}
    with pytest.raises(MissingTensor, match=name):
        build_weight_set(DictSource(config, missing), plain_pack(torch.float32), torch.float32)


def test_building_reports_each_layer_and_stops_when_cancelled():
    model, config = randomised(FAMILIES["llama"])
    source, seen = DictSource(config, model.state_dict()), []
    pack = plain_pack(torch.float32)
    build_weight_set(source, pack, torch.float32, progress=lambda fraction, what: seen.append(fraction))
    assert seen == [0.25, 0.5, 0.75, 1.0]
    calls = iter([False, True])
    with pytest.raises(Cancelled):
        build_weight_set(source, pack, torch.float32, cancel=lambda: next(calls))


def test_fingerprints_follow_contents():
    model, config = randomised(FAMILIES["llama"])
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = DictSource(config, state).fingerprint
    assert before == DictSource(config, dict(reversed(state.items()))).fingerprint
    state["model.norm.weight"][0] += 1
    assert before != DictSource(config, state).fingerprint
