# SPDX-License-Identifier: Apache-2.0
"""Recipes: which numbers attention computes with."""

from __future__ import annotations

import weakref
from ctypes import byref, c_void_p
from typing import Any

from . import _library
from ._library import lib


class Recipe:
    """Operand formats, scales, softmax and accumulation of attention: a value that never changes.

    >>> Recipe("mxfp8-exact ds=row32").name
    'mxfp8-exact ds=row32'

    Equal recipes compare and hash alike, on every machine. A recipe can be pickled, copied and saved with `torch.save` (then it is
    stored as JSON, so that a checkpoint keeps its numbers); `torch.load(..., weights_only=True)` reads it back.
    """

    def __init__(self, text: str = "mxfp8") -> None:
        """text: a name with changed fields, as `name` prints it ("mxfp8", "mxfp8 ds=32x32"), or JSON, as `to_json` writes it.

        Raises TypeError if it is no string, ValueError for unknown names and fields (the message says which come close) and for fields
        that contradict each other (the message says why). What a device does not compute, attention raises.
        """
        if not isinstance(text, str):
            raise TypeError(f"recipe is a {type(text).__name__} but must be a string such as \"mxfp8\", or JSON")
        if "\0" in text:
            raise ValueError(f"recipe = {text!r} holds a zero character")
        handle = c_void_p()
        read = lib.flamia_recipe_from_json if text.lstrip().startswith("{") else lib.flamia_recipe_parse
        _library.check(read(text.encode(), byref(handle)))
        self._handle = handle
        weakref.finalize(self, lib.flamia_recipe_destroy, handle)
        self._hash = int(lib.flamia_recipe_hash(handle))
        self._name = _library.text(lib.flamia_recipe_name, handle)

    @property
    def name(self) -> str:
        """The nearest named recipe and the fields that differ from it; `Recipe(name)` reads it back."""
        return self._name

    def to_json(self) -> str:
        """Every field, as a JSON object."""
        return _library.text(lib.flamia_recipe_json, self._handle)

    @classmethod
    def from_json(cls, json: str) -> Recipe:
        """The recipe that `to_json` wrote. Raises ValueError if it is not one."""
        if not isinstance(json, str) or not json.lstrip().startswith("{"):
            raise ValueError(f"json = {repr(json)[:100]} but must be a JSON object, as to_json writes it; for a name call Recipe(name)")
        return cls(json)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        return self._hash == other._hash and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self._hash)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"flamia.Recipe({self._name!r})"

    def __reduce__(self) -> tuple[type[Recipe], tuple[str]]:
        return (type(self), (self.to_json(),))

    def __copy__(self) -> Recipe:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self
