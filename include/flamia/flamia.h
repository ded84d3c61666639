/* SPDX-License-Identifier: Apache-2.0
 * The C API: the calls of attention.hpp for C and for languages that bind to C.
 *
 * Descriptors start with struct_size. Fill them with the FLAMIA_*_INIT macros: a program built against an older header keeps
 * working with a newer library (fields that it does not know get their defaults), and one built against a newer header works with
 * an older library as long as it leaves the fields that the library does not know at zero.
 *
 * Every call that can fail returns a status. flamia_status_message() then says which argument is wrong, what it is, what is allowed
 * and what to do; it belongs to the calling thread. On error nothing is written but that message. All calls are thread-safe; plans
 * and recipes never change after they are made and may be shared by threads. The caller owns all memory that tensors live in. */
#ifndef FLAMIA_FLAMIA_H
#define FLAMIA_FLAMIA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FLAMIA_API __attribute__((visibility("default")))
#else
#define FLAMIA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t flamia_status; /* one of: */
enum {
  FLAMIA_OK = 0,
  FLAMIA_INVALID_ARGUMENT = 1, /* an argument is wrong */
  FLAMIA_UNSUPPORTED = 2,      /* valid, but this recipe, device or build does not do it */
  FLAMIA_OUT_OF_MEMORY = 3,
  FLAMIA_IO_ERROR = 4,
  FLAMIA_DEVICE_ERROR = 5 /* a CUDA call or the system failed */
};

typedef int32_t flamia_dtype; /* one of: */
enum { FLAMIA_F32 = 0, FLAMIA_F16 = 1, FLAMIA_BF16 = 2 };

typedef int32_t flamia_device; /* one of: */
enum { FLAMIA_CPU = 0, FLAMIA_CUDA_DEVICE = 1 };

typedef int32_t flamia_pass; /* one of: */
enum { FLAMIA_FORWARD = 0, FLAMIA_BACKWARD = 1 };

/* What went wrong in this thread's last call that failed; "" if none has. Valid until the thread's next failing call. */
FLAMIA_API const char* flamia_status_message(void);
/* "0.1.0" */
FLAMIA_API const char* flamia_version(void);

/* ---- recipes: which numbers attention computes with ("mxfp8", "mxfp8-exact ds=row32"; `flamia recipes` lists them) ---- */

typedef struct flamia_recipe flamia_recipe;

/* A text that cannot be read, and a recipe that no machine could compute (a broken rule): FLAMIA_INVALID_ARGUMENT with every reason.
 * What one device or mask does not do is refused by flamia_plan_create. */
FLAMIA_API flamia_status flamia_recipe_parse(const char* text, flamia_recipe** recipe);
FLAMIA_API flamia_status flamia_recipe_from_json(const char* json, flamia_recipe** recipe);
FLAMIA_API void flamia_recipe_destroy(flamia_recipe* recipe);        /* null is fine */
FLAMIA_API uint64_t flamia_recipe_hash(const flamia_recipe* recipe); /* 0 for null */

/* Texts: *length (may be null) receives the length without the final 0. With capacity 0 nothing else happens; a capacity of less than
 * length + 1 is an error. */
FLAMIA_API flamia_status flamia_recipe_name(const flamia_recipe* recipe, char* text, size_t capacity, size_t* length);
FLAMIA_API flamia_status flamia_recipe_json(const flamia_recipe* recipe, char* text, size_t capacity, size_t* length);

/* ---- plans: one per shape and recipe ---- */

typedef struct flamia_problem {
  size_t struct_size;
  int64_t tokens;      /* rows of q, k, v; tokens after the last document are allowed */
  int64_t documents;   /* cu_seqlens has documents + 1 entries */
  int32_t query_heads; /* heads of q and o */
  int32_t key_heads;   /* heads of k and v; divides query_heads */
  int32_t head_dim;    /* CPU: multiple of 16, at most 256; Hopper: 64 or 128 */
  int32_t causal;      /* 1: a query sees no later key; 0: it may */
  int64_t window_left; /* a query at i sees keys i - left ... i + right of its document; -1 = unlimited */
  int64_t window_right;
  float scale;      /* softmax scale; 0 = 1 / sqrt(head_dim) */
  int32_t reserved; /* 0 */
} flamia_problem;
#define FLAMIA_PROBLEM_INIT \
  { sizeof(flamia_problem), 0, 1, 0, 0, 0, 1, -1, -1, 0.0f, 0 }

typedef struct flamia_plan_options {
  size_t struct_size;
  flamia_device device;
  int32_t threads;       /* CPU: 0 = all cores; results do not depend on it */
  int32_t deterministic; /* GPU: 1 = dQ bit-repeatable */
  int32_t training;      /* 0: forward saves nothing and there is no backward */
} flamia_plan_options;
#define FLAMIA_PLAN_OPTIONS_INIT \
  { sizeof(flamia_plan_options), FLAMIA_CPU, 0, 0, 1 }

typedef struct flamia_plan flamia_plan;

/* options may be null for the defaults. */
FLAMIA_API flamia_status flamia_plan_create(const flamia_problem* problem, const flamia_recipe* recipe,
                                            const flamia_plan_options* options, flamia_plan** plan);
FLAMIA_API void flamia_plan_destroy(flamia_plan* plan); /* null is fine */
/* Bytes of `saved`, which forward writes and backward reads; 0 for null. */
FLAMIA_API size_t flamia_plan_saved_bytes(const flamia_plan* plan);
/* Bytes of `workspace` for one pass; 0 for null. */
FLAMIA_API size_t flamia_plan_workspace_bytes(const flamia_plan* plan, flamia_pass pass);
/* Operands, copies, layouts, guarantee, for people to read. Text as above. */
FLAMIA_API flamia_status flamia_plan_explain(const flamia_plan* plan, char* text, size_t capacity, size_t* length);

/* ---- calls ---- */

/* [tokens, heads, head_dim]; channels are contiguous. Strides in elements; 0 = dense. This struct never grows. */
typedef struct flamia_const_tensor {
  const void* data;
  flamia_dtype dtype;
  int32_t reserved; /* 0 */
  int64_t token_stride;
  int64_t head_stride;
} flamia_const_tensor;

typedef struct flamia_tensor {
  void* data;
  flamia_dtype dtype; /* FLAMIA_F32 or FLAMIA_BF16 */
  int32_t reserved;   /* 0 */
  int64_t token_stride;
  int64_t head_stride;
} flamia_tensor;

typedef struct flamia_forward_args {
  size_t struct_size;
  flamia_const_tensor q;     /* [tokens, query_heads, head_dim] */
  flamia_const_tensor k;     /* [tokens, key_heads, head_dim]; q, k, v have one dtype */
  flamia_const_tensor v;     /* as k */
  const int32_t* cu_seqlens; /* [documents + 1], starts at 0, never decreases, ends at <= tokens */
  flamia_tensor o;           /* [tokens, query_heads, head_dim] */
  float* lse;                /* [query_heads, tokens], natural logarithm; +inf for a row that sees no key */
  void* saved;               /* flamia_plan_saved_bytes, aligned to 256 bytes */
  size_t saved_bytes;        /* what saved really has */
  void* workspace;           /* flamia_plan_workspace_bytes, aligned to 256 bytes */
  size_t workspace_bytes;
  void* stream; /* cudaStream_t; ignored on the CPU */
} flamia_forward_args;
#define FLAMIA_FORWARD_ARGS_INIT \
  { sizeof(flamia_forward_args), {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, 0, {0, 0, 0, 0, 0}, 0, 0, 0, 0, 0, 0 }

typedef struct flamia_backward_args {
  size_t struct_size;
  flamia_const_tensor o;     /* the forward pass's output */
  flamia_const_tensor d_o;   /* its gradient */
  const int32_t* cu_seqlens; /* as in the forward pass */
  flamia_tensor d_q;         /* shapes of q, k, v */
  flamia_tensor d_k;
  flamia_tensor d_v;
  const void* saved; /* as the forward pass left it */
  size_t saved_bytes;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
} flamia_backward_args;
#define FLAMIA_BACKWARD_ARGS_INIT                                                                                                  \
  {                                                                                                                                \
    sizeof(flamia_backward_args), {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, 0, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, 0, 0, 0, \
        0, 0                                                                                                                       \
  }

FLAMIA_API flamia_status flamia_attention_forward(const flamia_plan* plan, const flamia_forward_args* args);
FLAMIA_API flamia_status flamia_attention_backward(const flamia_plan* plan, const flamia_backward_args* args);

/* ---- health: what quantisation did to the operands, to log while a model trains (health.hpp says what each figure is) ---- */

typedef struct flamia_operand_health { /* never grows */
  int64_t elements;
  int64_t flagged;
  int64_t zeros;
  int64_t saturated;
  int32_t least_exponent;
  int32_t greatest_exponent;
} flamia_operand_health;

typedef struct flamia_health {
  size_t struct_size;
  flamia_operand_health q, k, v, d_out;
  int64_t pairs, p_zero, p_saturated;
  int64_t ds_pairs, ds_zero_q, ds_zero_k, ds_saturated_q, ds_saturated_k;
  double ds_mass, ds_lost_q, ds_lost_k;
} flamia_health;

/* Attends on the CPU with memory of its own: hand it a sample of a large call. Tensors are on the host. d_out may be null (no gradient;
 * inference recipes have none). threads: 0 = all cores. health->struct_size must be set; fields that this library does not know stay as
 * they are. */
FLAMIA_API flamia_status flamia_attention_health(const flamia_problem* problem, const flamia_recipe* recipe,
                                                 const flamia_const_tensor* q, const flamia_const_tensor* k,
                                                 const flamia_const_tensor* v, const int32_t* cu_seqlens,
                                                 const flamia_const_tensor* d_out, int32_t threads, flamia_health* health);

#ifdef __cplusplus
}
#endif
#endif
