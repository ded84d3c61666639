# SPDX-License-Identifier: Apache-2.0
# Flags that every target of the project shares (link to flamia_options).
add_library(flamia_options INTERFACE)
target_compile_features(flamia_options INTERFACE cxx_std_20)
# a*b+c must round the same with every instruction set: contraction is written out where it is wanted (numerics/platform.hpp)
target_compile_options(flamia_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -ffp-contract=off -fno-math-errno -fno-trapping-math>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 warns of std::string's own operator+ (its bug 105651)
  target_compile_options(flamia_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(FLAMIA_SANITIZE)
  target_compile_options(flamia_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FLAMIA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(flamia_options INTERFACE -fsanitize=${FLAMIA_SANITIZE})
  if(FLAMIA_SANITIZE MATCHES "address" AND FLAMIA_SANITIZE MATCHES "undefined")
    # what AddressSanitizer sees by itself, for a sixth of the compiler's time
    target_compile_options(flamia_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,object-size>)
  endif()
endif()
