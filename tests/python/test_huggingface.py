# SPDX-License-Identifier: Apache-2.0
"""flamia inside Hugging Face models (built from configurations, nothing is downloaded)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="these tests need Hugging Face transformers: pip install transformers")

import flamia  # noqa: E402
import flamia.huggingface  # noqa: E402

VOCABULARY = 96
LENGTHS = (19, 1, 40, 4)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    flamia.huggingface.register("flamia", "bf16")  # close to exact, so that a wrong mask shows
    flamia.huggingface.register("flamia-exact", "mxfp8-exact")
    flamia.huggingface.register("flamia-decode", "bf16", decode="sdpa")


def build(attention: str, kind: str = "Llama", **changes: object) -> torch.nn.Module:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
                "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings | changes)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.no_grad()
def test_a_batch_is_that_of_sdpa() -> None:
    ids = tokens(3, 50)
    wanted = build("sdpa")(ids).logits
    assert far(build("flamia")(ids).logits, wanted) < 0.01
    assert 0.001 < far(build("flamia-exact")(ids).logits, wanted) < 0.1  # the recipe is the one asked for
    assert far(build("sdpa")(ids.flip(1)).logits, wanted) > 0.3  # what another context changes


NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                                 reason="needs a Hopper GPU"))


@pytest.mark.parametrize("recipe, device", [("sage3", "cpu"), ("sage3-exact", "cpu"), pytest.param("sage3", "cuda", marks=NEEDS_GPU)])
def test_sageattention3_in_the_place_of_sdpa(recipe: str, device: str) -> None:
    flamia.huggingface.register("flamia-sage", recipe)
    sizes = {"head_dim": 64, "hidden_size": 256}
    model, ids = build("flamia-sage", **sizes).to(device), tokens(2, 50).to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):  # a GPU takes no float32
        with torch.no_grad():
            wanted = build("sdpa", **sizes).to(device)(ids).logits
            got = model(ids).logits
        assert 0.05 < far(got, wanted) < 0.25  # 4 bits show
        assert far(got.flip(0), wanted) > 0.25  # control: of another text
        with pytest.raises(NotImplementedError, match="has no backward pass; for training use"):
            model(ids)


@torch.no_grad()
@pytest.mark.parametrize("way", ["position_ids", "cache on", "cu_seq_lens"])
def test_packed_documents_are_those_alone(way: str) -> None:
    model, ids = build("flamia-exact"), tokens(1, sum(LENGTHS))
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    arguments = {"position_ids": position_ids, "use_cache": way == "cache on"}
    if way == "cu_seq_lens":
        cu = torch.tensor([0, *LENGTHS]).cumsum(0)  # int64, as DataCollatorWithFlattening makes it
        arguments |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    packed = model(ids, **arguments).logits
    start = 0
    for n in LENGTHS:
        alone = model(ids[:, start:start + n]).logits
        torch.testing.assert_close(packed[:, start:start + n], alone, atol=2e-5, rtol=1e-4)
        start += n
    one = model(ids).logits  # as one document: the mistake that the comparison must catch
    assert far(one[:, LENGTHS[0]:], packed[:, LENGTHS[0]:]) > 0.01


def test_the_collator_of_transformers() -> None:
    rows = [{"input_ids": tokens(n).tolist(), "labels": tokens(n).tolist()} for n in LENGTHS]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    model = build("flamia-exact")
    loss = model(**batch).loss
    loss.backward()
    assert float(loss) > 3 and all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    padded = slice(0, 11) if side == "left" else slice(19, 30)
    mask[1, padded] = 0
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    model = build("flamia-exact")
    got = model(ids, attention_mask=mask, position_ids=position_ids).logits
    torch.testing.assert_close(got[0], model(ids[:1]).logits[0], atol=2e-5, rtol=1e-4)
    kept = ids[1:, mask[1].bool()]
    torch.testing.assert_close(got[1, mask[1].bool()], model(kept).logits[0], atol=2e-5, rtol=1e-4)
    if side == "left":
        ignored = model(ids, position_ids=position_ids, use_cache=True).logits[1, mask[1].bool()]
        assert far(ignored[-5:], got[1, -5:]) < 1e-3  # positions alone already separate the padding


@torch.no_grad()
def test_sliding_window() -> None:
    ids = tokens(2, 60)
    wanted = build("sdpa", "Mistral", sliding_window=8)(ids, use_cache=False).logits
    assert far(build("flamia", "Mistral", sliding_window=8)(ids, use_cache=False).logits, wanted) < 0.01
    assert far(build("flamia", "Mistral", sliding_window=9)(ids, use_cache=False).logits, wanted) > 0.02


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_training_lowers_the_loss(device: str) -> None:
    model, ids = build("flamia-exact", head_dim=64).to(device), tokens(2, 40).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(14):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1


@torch.no_grad()
def test_compiles_in_one_graph() -> None:
    model, ids = build("flamia-exact"), tokens(1, sum(LENGTHS))
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    torch.compiler.reset()
    compiled = torch.compile(lambda x, p: model(x, position_ids=p, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, position_ids), model(ids, position_ids=position_ids).logits, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_generation() -> None:
    ids = tokens(1, 20)
    wanted = build("sdpa").generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(build("flamia-decode").generate(ids, max_new_tokens=6, do_sample=False), wanted)
    assert torch.equal(build("flamia").generate(ids, max_new_tokens=6, do_sample=False, use_cache=False), wanted)
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        build("flamia").generate(ids, max_new_tokens=6, do_sample=False)


def test_what_is_not_computed_raises() -> None:
    ids = tokens(1, 16)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        build("flamia", attention_dropout=0.1).train()(ids)
    matrix = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match="padding mask"):
        build("flamia")(ids, attention_mask=matrix)
    with pytest.raises(NotImplementedError, match="neither causal nor bidirectional"):
        flamia.huggingface._starts(1, 8, lambda b, h, i, j: (j <= i) | ((i < 3) & (j < 3)), None, torch.device("cpu"))
    query = torch.randn(1, 2, 8, 16)
    for name, value in (("softcap", 30.0), ("s_aux", torch.ones(2)), ("output_attentions", True)):
        with pytest.raises(NotImplementedError, match=name):
            transformers.AttentionInterface()["flamia"](torch.nn.Module(), query, query, query, None, **{name: value})


def test_register() -> None:
    with pytest.raises(ValueError, match="of transformers itself"):
        flamia.huggingface.register("sdpa")
    with pytest.raises(ValueError, match="mxfp9"):
        flamia.huggingface.register("other", "mxfp9")
    with pytest.raises(ValueError, match="trains=off"):
        flamia.huggingface.register("other", "mxfp8 exp2=mitchell")  # now, not in the model's first step
    with pytest.raises(ValueError, match="decode"):
        flamia.huggingface.register("other", decode="flash")
    flamia.huggingface.register("flamia-again", flamia.Recipe("mxfp8"))
    flamia.huggingface.register("flamia-again", "mxfp8-exact")  # replacing one's own is fine


@torch.no_grad()
@pytest.mark.parametrize("how", ["config", "call"])
def test_bidirectional(how: str) -> None:
    ids, call = tokens(2, 30), {"is_causal": False} if how == "call" else {}
    models = [build(name) for name in ("sdpa", "flamia")]
    causal = models[1](ids, use_cache=False).logits
    for model in models:
        model.config.is_causal = how == "call"
    wanted, got = (model(ids, use_cache=False, **call).logits for model in models)
    assert far(got, wanted) < 0.01 and far(causal, wanted) > 0.1
