# SPDX-License-Identifier: Apache-2.0
"""The C API (include/flamia/flamia.h) through ctypes: descriptors, prototypes, errors.

ctypes and not an extension module: the wheel then depends neither on a Python version nor on a torch version, and building it needs
no torch. ctypes itself costs some ten microseconds a call, far less than torch's dispatch of an op that is written in Python; a CUDA
graph has neither. Calls through ctypes release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

# Same numbers as in flamia.h.
F32, F16, BF16 = 0, 1, 2
CPU, CUDA = 0, 1
FORWARD, BACKWARD = 0, 1
BUFFER_ALIGNMENT = 256  # bytes, of `saved` and `workspace`


class Problem(Structure):
    _fields_ = [("struct_size", c_size_t), ("tokens", c_int64), ("documents", c_int64), ("query_heads", c_int32),
                ("key_heads", c_int32), ("head_dim", c_int32), ("causal", c_int32), ("window_left", c_int64),
                ("window_right", c_int64), ("scale", c_float), ("reserved", c_int32)]


class PlanOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("device", c_int32), ("threads", c_int32), ("deterministic", c_int32),
                ("training", c_int32)]


class Tensor(Structure):
    """flamia_tensor and flamia_const_tensor."""
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("reserved", c_int32), ("token_stride", c_int64),
                ("head_stride", c_int64)]


_BUFFERS: list[tuple[str, type[c_void_p] | type[c_size_t]]] = [
    ("saved", c_void_p), ("saved_bytes", c_size_t), ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("stream", c_void_p)]


class ForwardArgs(Structure):
    _fields_ = [("struct_size", c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("cu_seqlens", c_void_p), ("o", Tensor),
                ("lse", c_void_p), *_BUFFERS]


class BackwardArgs(Structure):
    _fields_ = [("struct_size", c_size_t), ("o", Tensor), ("d_o", Tensor), ("cu_seqlens", c_void_p), ("d_q", Tensor),
                ("d_k", Tensor), ("d_v", Tensor), *_BUFFERS]


class OperandHealth(Structure):
    _fields_ = [("elements", c_int64), ("flagged", c_int64), ("zeros", c_int64), ("saturated", c_int64), ("least_exponent", c_int32),
                ("greatest_exponent", c_int32)]


class Health(Structure):
    _fields_ = [("struct_size", c_size_t), ("q", OperandHealth), ("k", OperandHealth), ("v", OperandHealth), ("d_out", OperandHealth),
                *((name, c_int64) for name in ("pairs", "p_zero", "p_saturated", "ds_pairs", "ds_zero_q", "ds_zero_k", "ds_saturated_q",
                                               "ds_saturated_k")),
                *((name, c_double) for name in ("ds_mass", "ds_lost_q", "ds_lost_k"))]


_RECIPE, _PLAN = c_void_p, c_void_p
_TEXT = [c_void_p, c_size_t, POINTER(c_size_t)]  # buffer, capacity, length
_PROTOTYPES = {
    "flamia_status_message": (c_char_p, []),
    "flamia_version": (c_char_p, []),
    "flamia_recipe_parse": (c_int32, [c_char_p, POINTER(_RECIPE)]),
    "flamia_recipe_from_json": (c_int32, [c_char_p, POINTER(_RECIPE)]),
    "flamia_recipe_destroy": (None, [_RECIPE]),
    "flamia_recipe_hash": (c_uint64, [_RECIPE]),
    "flamia_recipe_name": (c_int32, [_RECIPE, *_TEXT]),
    "flamia_recipe_json": (c_int32, [_RECIPE, *_TEXT]),
    "flamia_plan_create": (c_int32, [POINTER(Problem), _RECIPE, POINTER(PlanOptions), POINTER(_PLAN)]),
    "flamia_plan_destroy": (None, [_PLAN]),
    "flamia_plan_saved_bytes": (c_size_t, [_PLAN]),
    "flamia_plan_workspace_bytes": (c_size_t, [_PLAN, c_int32]),
    "flamia_plan_explain": (c_int32, [_PLAN, *_TEXT]),
    "flamia_attention_forward": (c_int32, [_PLAN, POINTER(ForwardArgs)]),
    "flamia_attention_backward": (c_int32, [_PLAN, POINTER(BackwardArgs)]),
    "flamia_attention_health": (c_int32, [POINTER(Problem), _RECIPE, POINTER(Tensor), POINTER(Tensor), POINTER(Tensor), c_void_p,
                                          POINTER(Tensor), c_int32, POINTER(Health)]),
}


def _load() -> ctypes.CDLL:
    """The library inside the package, or the one that FLAMIA_LIBRARY names (for work on flamia itself)."""
    path = os.environ.get("FLAMIA_LIBRARY") or str(Path(__file__).parent / "libflamia.so")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"flamia cannot load its library {path}: {error}. Install the package (`pip install .` in the checkout), "
                          "or let FLAMIA_LIBRARY name a libflamia.so that you built.") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ImportError(f"{path} has no function {name}: it is older than this Python package; build both from one "
                              "checkout") from error
        function.restype, function.argtypes = result, arguments
    return library


lib = _load()

# By flamia_status. Unsupported: valid, but this recipe, device or build does not do it.
_EXCEPTIONS: dict[int, type[Exception]] = {1: ValueError, 2: NotImplementedError, 3: MemoryError, 4: OSError, 5: RuntimeError}


def check(status: int) -> None:
    """Raises what a failed call reported: ValueError, NotImplementedError, MemoryError, OSError or RuntimeError (CUDA)."""
    if status != 0:
        raise _EXCEPTIONS.get(status, RuntimeError)(lib.flamia_status_message().decode())


def text(function: Callable[..., int], handle: c_void_p) -> str:
    """The text that flamia_recipe_name, flamia_recipe_json or flamia_plan_explain writes about `handle`."""
    length = c_size_t()
    check(function(handle, None, 0, byref(length)))
    buffer = ctypes.create_string_buffer(length.value + 1)
    check(function(handle, buffer, len(buffer), None))
    return buffer.value.decode()


def version() -> str:
    """Version of the library, for example "0.1.0"."""
    return str(lib.flamia_version().decode())
