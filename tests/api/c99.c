/* SPDX-License-Identifier: Apache-2.0
 * flamia.h as a C99 compiler sees it (warnings are errors here). */
#include "flamia/flamia.h"

int flamia_c99_check(void);

int flamia_c99_check(void) {
  flamia_problem problem = FLAMIA_PROBLEM_INIT;
  flamia_plan_options options = FLAMIA_PLAN_OPTIONS_INIT;
  flamia_forward_args forward = FLAMIA_FORWARD_ARGS_INIT;
  flamia_backward_args backward = FLAMIA_BACKWARD_ARGS_INIT;
  flamia_recipe* recipe = NULL;
  if (problem.struct_size != sizeof problem || options.training != 1 || problem.causal != 1 || problem.window_left != -1) return 1;
  if (forward.struct_size != sizeof forward || backward.struct_size != sizeof backward || forward.stream != NULL) return 2;
  if (flamia_recipe_parse("bf16", &recipe) != FLAMIA_OK) return 3;
  flamia_recipe_destroy(recipe);
  return flamia_version()[0] == '\0';
}
