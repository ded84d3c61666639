# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import io
import json
import pickle

import pytest

torch = pytest.importorskip("torch", reason="flamia's Python tests need PyTorch 2.11 or later")

import flamia  # noqa: E402
from flamia import Recipe  # noqa: E402

TEXTS = ["bf16", "mxfp8", "mxfp8-exact", "mxfp8 ds=32x32"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(text: str) -> None:
    recipe = Recipe(text)
    assert recipe.name == text and str(recipe) == text and text in repr(recipe)
    buffer = io.BytesIO()
    torch.save({"recipe": recipe}, buffer)
    buffer.seek(0)
    for other in (Recipe(recipe.name), Recipe.from_json(recipe.to_json()), Recipe(recipe.to_json()), copy.copy(recipe),
                  copy.deepcopy({"r": recipe})["r"], pickle.loads(pickle.dumps(recipe)),
                  torch.load(buffer, weights_only=True)["recipe"]):
        assert other == recipe and hash(other) == hash(recipe) and other.name == text
        assert json.loads(other.to_json()) == json.loads(recipe.to_json())


def test_different_recipes_differ() -> None:
    recipes = {Recipe(text) for text in TEXTS} | {Recipe(text) for text in TEXTS}
    assert len(recipes) == len(TEXTS)
    assert Recipe("mxfp8") != Recipe("bf16") and Recipe("mxfp8") != "mxfp8"


def test_a_checkpoint_keeps_every_field() -> None:
    assert Recipe().__reduce__()[1][0].startswith("{")


def test_bad_recipes() -> None:
    with pytest.raises(ValueError, match="mxfp8"):
        Recipe("mxfp9")
    with pytest.raises(ValueError, match="dss"):
        Recipe("mxfp8 dss=32x32")
    with pytest.raises(ValueError):
        Recipe('{"q": 1}')
    with pytest.raises(ValueError, match="use smooth-q=on"):
        Recipe("mxfp8 tile=64x64")
    with pytest.raises(ValueError, match="JSON object"):
        Recipe.from_json("mxfp8")
    with pytest.raises(ValueError, match="zero character"):
        Recipe("mxfp8\0")
    with pytest.raises(TypeError, match="string"):
        Recipe(8)


def test_attention_takes_text_json_and_recipe() -> None:
    q, k, v = (torch.randn(40, 2, 32) for _ in range(3))
    recipe = Recipe("mxfp8 ds=32x32")
    by_name, by_recipe, by_json = (flamia.attention(q, k, v, recipe=r) for r in (recipe.name, recipe, recipe.to_json()))
    assert torch.equal(by_name, by_recipe) and torch.equal(by_name, by_json)
    assert not torch.equal(by_name, flamia.attention(q, k, v, recipe="bf16"))
    with pytest.raises(ValueError, match="mxfp9"):
        flamia.attention(q, k, v, recipe="mxfp9")
    with pytest.raises(TypeError, match="recipe is a int"):
        flamia.attention(q, k, v, recipe=8)


def test_inference_recipe_does_not_train() -> None:
    q, k, v = (torch.randn(40, 2, 32, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="sage3"):
        flamia.attention(q, k, v, causal=False, recipe="sage3")
