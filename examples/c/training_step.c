/* SPDX-License-Identifier: Apache-2.0
 * One training step's attention from C: two packed documents, 8-bit operands. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flamia/flamia.h"

enum { TOKENS = 200, HEADS = 2, DIM = 64, ELEMENTS = TOKENS * HEADS * DIM };

static void check(flamia_status status) {
  if (status != FLAMIA_OK) {
    fprintf(stderr, "flamia: %s\n", flamia_status_message());
    exit(1);
  }
}

/* aligned_alloc is C11; 256 bytes are what flamia asks for. */
static void* aligned(char** block, size_t bytes) {
  *block = malloc(bytes + 256);
  if (*block == NULL) exit(1);
  return *block + (256 - (size_t)((uintptr_t)*block % 256));
}

static float* random_tensor(uint32_t seed) {
  float* values = malloc(sizeof(float) * ELEMENTS);
  if (values == NULL) exit(1);
  for (int i = 0; i < ELEMENTS; ++i) {
    float sum = 0; /* of twelve uniform numbers: nearly normal */
    for (int n = 0; n < 12; ++n) {
      seed = seed * 1664525u + 1013904223u;
      sum += (float)(seed >> 8) / 16777216.0f;
    }
    values[i] = sum - 6.0f;
  }
  return values;
}

static flamia_const_tensor input(const float* data) {
  flamia_const_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = FLAMIA_F32;
  return tensor;
}

static flamia_tensor output(float* data) {
  flamia_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = FLAMIA_F32;
  return tensor;
}

int main(void) {
  static const int32_t offsets[] = {0, 61, TOKENS};
  static float o[ELEMENTS], d_q[ELEMENTS], d_k[ELEMENTS], d_v[ELEMENTS], lse[HEADS * TOKENS];
  float *q = random_tensor(1), *k = random_tensor(2), *v = random_tensor(3), *d_o = random_tensor(4);

  flamia_recipe* recipe = NULL;
  check(flamia_recipe_parse("mxfp8-exact", &recipe));

  flamia_problem problem = FLAMIA_PROBLEM_INIT;
  problem.tokens = TOKENS;
  problem.documents = 2;
  problem.query_heads = HEADS;
  problem.key_heads = HEADS;
  problem.head_dim = DIM;
  flamia_plan* plan = NULL;
  check(flamia_plan_create(&problem, recipe, NULL, &plan));

  size_t saved_bytes = flamia_plan_saved_bytes(plan);
  size_t forward_bytes = flamia_plan_workspace_bytes(plan, FLAMIA_FORWARD);
  size_t backward_bytes = flamia_plan_workspace_bytes(plan, FLAMIA_BACKWARD);
  size_t workspace_bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
  char *saved_block, *workspace_block;
  void* saved = aligned(&saved_block, saved_bytes);
  void* workspace = aligned(&workspace_block, workspace_bytes);

  flamia_forward_args forward = FLAMIA_FORWARD_ARGS_INIT;
  forward.q = input(q);
  forward.k = input(k);
  forward.v = input(v);
  forward.cu_seqlens = offsets;
  forward.o = output(o);
  forward.lse = lse;
  forward.saved = saved;
  forward.saved_bytes = saved_bytes;
  forward.workspace = workspace;
  forward.workspace_bytes = workspace_bytes;
  check(flamia_attention_forward(plan, &forward));

  flamia_backward_args backward = FLAMIA_BACKWARD_ARGS_INIT;
  backward.o = input(o);
  backward.d_o = input(d_o);
  backward.cu_seqlens = offsets;
  backward.d_q = output(d_q);
  backward.d_k = output(d_k);
  backward.d_v = output(d_v);
  backward.saved = saved;
  backward.saved_bytes = saved_bytes;
  backward.workspace = workspace;
  backward.workspace_bytes = workspace_bytes;
  check(flamia_attention_backward(plan, &backward));

  /* The first row of a document sees one key, so its output is that key's value (rounded to 8 bits) and its score has no gradient. */
  double error = 0, size = 0, gradient = 0, all = 0;
  for (int c = 0; c < HEADS * DIM; ++c) {
    int i = 61 * HEADS * DIM + c;
    error += (o[i] - v[i]) * (o[i] - v[i]);
    size += v[i] * v[i];
    gradient += d_q[i] * d_q[i];
  }
  for (int i = 0; i < ELEMENTS; ++i) all += d_q[i] * d_q[i];
  printf("flamia %s: first row differs from its value by %.4f, its dQ has norm %.1e of %.2f\n", flamia_version(),
         sqrt(error / size), sqrt(gradient), sqrt(all));

  /* Errors say what is wrong and what to do. */
  backward.d_k.data = NULL;
  int good = error < 0.05 * 0.05 * size && error > 0 && gradient < 1e-8 * all && all > 0 &&
             flamia_attention_backward(plan, &backward) == FLAMIA_INVALID_ARGUMENT &&
             strstr(flamia_status_message(), "d_k") != NULL;

  flamia_plan_destroy(plan);
  flamia_recipe_destroy(recipe);
  free(saved_block);
  free(workspace_block);
  free(q);
  free(k);
  free(v);
  free(d_o);
  if (!good) fprintf(stderr, "not what attention should give\n");
  return good ? 0 : 1;
}
