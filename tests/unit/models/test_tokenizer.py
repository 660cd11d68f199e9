"""Tokenizers: ids, ends of text, chat prompts, the plain fallback, and batches without guessing masks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoModelForCausalLM

from workbench.models.chat import ChatFallback, plain_chat
from workbench.models.convert import convert_gguf
from workbench.models.gguf_tokenizer import build_tokenizer, merges_from_order
from workbench.models.padding import left_padded
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelNotFound, RequestError, TokenizerError, UnsafeFile

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(toy, hf_folder):
    return hf_folder(toy.config(), toy.weights(toy.config()))


def edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_encode_and_decode_are_the_backends(folder, byte_level):
    tokenizer = load_tokenizer(folder)
    text = "The quick naïve 안녕 👋 x  y , z ."
    assert tokenizer.encode(text) == byte_level.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a", ""]) == [tokenizer.encode(text), tokenizer.encode("a"), []]
    assert tokenizer.token(1) == "<|im_start|>"
    with pytest.raises(TokenizerError, match="99999"):
        tokenizer.token(99999)


def test_special_tokens_are_left_out_unless_asked_for(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_clean_up_of_spaces_in_the_file_does_not_change_text(folder):
    edit(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a , b .")) == "a , b ."


def test_eos_ids_come_from_every_place_that_names_one(folder):
    edit(folder / "config.json", eos_token_id=0)
    edit(folder / "generation_config.json", eos_token_id=[0, 7])
    assert load_tokenizer(folder).eos_ids == (0, 7, 2)


def test_padding_and_truncation_in_the_file_are_switched_off(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("0")) == 1


def test_ids_beyond_the_embedding_are_refused(folder):
    edit(folder / "tokenizer_config.json", extra_special_tokens=["<image>"])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello")
    with pytest.raises(TokenizerError, match="<image>"):
        tokenizer.encode("see <image>")


def test_chat_follows_the_template_and_adds_nothing(folder):
    prompt = load_tokenizer(folder).chat(USER)
    assert prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.fallback is None
    assert prompt.ids[0] == 1
    assert list(prompt.ids) == load_tokenizer(folder).encode(prompt.text, add_special=False)


def test_ldr_08_without_a_template_a_plain_fallback_says_so(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    prompt = tokenizer.chat([{"role": "system", "content": "Be brief."}, *USER])
    assert prompt.text == "Be brief.\n\nUser: hello\nAssistant:"
    assert prompt.fallback == ChatFallback()
    assert "no chat template" in prompt.fallback.notice
    assert tokenizer.decode(prompt.ids) == prompt.text
    assert tokenizer.chat(USER).text == "User: hello\nAssistant:"


def test_plain_chat_keeps_the_order_of_turns():
    turns = [*USER, {"role": "assistant", "content": "hi "}, {"role": "user", "content": "bye"}]
    assert plain_chat(turns) == "User: hello\nAssistant: hi\nUser: bye\nAssistant:"


@pytest.mark.parametrize(
    "messages", [[], [{"role": "robot", "content": "x"}], [{"role": "user", "content": 3}]]
)
def test_malformed_conversations_are_refused(folder, messages):
    with pytest.raises(TokenizerError):
        load_tokenizer(folder).chat(messages)


def test_a_template_that_refuses_is_a_typed_error(folder):
    edit(folder / "tokenizer_config.json", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        load_tokenizer(folder).chat(USER)


def test_a_template_cannot_reach_python(folder):
    edit(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TokenizerError):
        load_tokenizer(folder).chat(USER)


def test_refusals(folder, tmp_path):
    with pytest.raises(ModelNotFound):
        load_tokenizer("no-such-model")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": "x.Y"})
    with pytest.raises(UnsafeFile, match="auto_map"):
        load_tokenizer(folder)
    edit(folder / "tokenizer_config.json", auto_map=None)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no tokenizer"):
        load_tokenizer(folder)


def test_transformers_is_imported_late():
    code = (
        "import sys, workbench.models.tokenizer, workbench.models.fetch; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ldr_07_left_padded_batches_equal_solo_runs_and_a_real_eos_is_attended(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_batch(["abc", "01234"])[0] != []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = [[5, 2, 9], [7, 8, 2, 30, 31]]  # 2 is EOS, here in the middle of both prompts
    for pad in (0, 2):  # also when the padding id is EOS
        ids, mask, positions = left_padded(rows, pad)
        assert mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
        assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
        with torch.no_grad():
            batch = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            solo = torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])
        assert torch.allclose(batch, solo, atol=1e-10)
        without_eos = model(torch.tensor([[5, 9]])).logits[0, -1]
        assert not torch.allclose(batch[0], without_eos, atol=1e-3)


def test_left_padding_refuses_empty_input():
    for rows in ([], [[1], []]):
        with pytest.raises(RequestError):
            left_padded(rows, 0)


def test_gguf_tokenizer_equals_the_original_and_splits_digits(toy, write_gguf, tmp_path, byte_level):
    tensors = {n: t.numpy() for n, t in _gguf_weights(toy).items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", toy.gguf_meta, tensors)
    converted = load_tokenizer(convert_gguf(path, tmp_path / "out"))
    direct = load_tokenizer(path)
    text = "In 2024, 1234567 items: naïve 안녕 👋 <|im_start|>user\nhi<|im_end|>\n"
    for tokenizer in (converted, direct):
        assert tokenizer.encode(text) == byte_level.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
        assert [tokenizer.token(i) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
        assert tokenizer.eos_ids == (2,)
        assert tokenizer.chat(USER).text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def _gguf_weights(toy):
    weights = toy.weights(toy.config())
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    layer = "model.layers.0."
    out |= {f"blk.0.{g}.weight": weights[f"{layer}self_attn.{h}_proj.weight"] for h, g in names.items()}
    out |= {f"blk.0.ffn_{m}.weight": weights[f"{layer}mlp.{m}_proj.weight"] for m in ("gate", "up", "down")}
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    return out | {f"blk.0.{g}.weight": weights[f"{layer}{h}.weight"] for g, h in norms.items()}


def _metadata(backend, **changes):
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    meta = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
    }
    return meta | changes


def test_gguf_bos_is_added_when_the_file_says_so(byte_level):
    tokenizer, _ = build_tokenizer(_metadata(byte_level, **{"tokenizer.ggml.add_bos_token": True}))
    assert tokenizer.encode("a").ids == [1, *byte_level.encode("a").ids]
    tokenizer, _ = build_tokenizer(_metadata(byte_level))
    assert tokenizer.encode("a").ids == byte_level.encode("a").ids


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.pre": "some-new-rule"},
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.tokens": []},
    ],
)
def test_gguf_tokenizers_that_cannot_be_restored_exactly_are_refused(byte_level, changes):
    with pytest.raises(TokenizerError):
        build_tokenizer(_metadata(byte_level, **changes))


def test_gemma_merges_follow_the_order_of_the_vocabulary():
    tokens = ["<unk>", "\u2581", "a", "b", "c", "  ", "ab", "\u2581a", "abc", "<think>"]
    vocab = {t.replace(" ", "\u2581"): i for i, t in enumerate(tokens)}
    merges = merges_from_order(vocab)
    assert merges == [("\u2581", "\u2581"), ("a", "b"), ("\u2581", "a"), ("ab", "c")]
    meta = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 4, 1, 1, 1, 4],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer, _ = build_tokenizer(meta)
    assert tokenizer.get_vocab_size() == len(tokens)
    for text, pieces in (("abc a", ["abc", "\u2581a"]), ("a  b", ["a", "\u2581\u2581", "b"])):
        assert tokenizer.encode(text).tokens == pieces
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<think>").tokens == ["<think>"]


def test_a_bos_post_processor_is_not_doubled_by_chat(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a")[0] == 1
    assert list(tokenizer.chat(USER).ids).count(1) == 2  # one per turn marker, none in front


def test_slow_tokenizers_are_refused():
    from workbench.models.tokenizer import Tokenizer

    class Slow:
        eos_token_id = None

    with pytest.raises(TokenizerError, match="Slow"):
        Tokenizer(Slow())
