# SPDX-License-Identifier: Apache-2.0
# Installs the built project into a prefix of its own, builds the examples against it and runs them.
#   -DBUILD=<build folder> -DEXAMPLES=<examples folder> -DKIND=static|shared -DVERSION=x.y.z -DGENERATOR=<generator> -DCLI=ON|OFF
set(work ${BUILD}/installed-${KIND})
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(code)
    message(FATAL_ERROR "${ARGV}\nfailed with ${code}:\n${output}")
  endif()
  message(STATUS "${output}")
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
set(shared OFF)
if(KIND STREQUAL "shared")
  set(shared ON)
endif()
run(${CMAKE_COMMAND} -S ${EXAMPLES} -B ${work}/build -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${work}/prefix -DBUILD_SHARED_LIBS=${shared}
  -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/flamia_example_cpp)
run(${work}/build/flamia_example_c)

# The right kind was linked.
execute_process(COMMAND ldd ${work}/build/flamia_example_cpp OUTPUT_VARIABLE libraries)
if(shared AND NOT libraries MATCHES "prefix/[^\n]*libflamia.so.0" OR NOT shared AND libraries MATCHES "libflamia")
  message(FATAL_ERROR "${KIND} flamia was asked for, but the example uses:\n${libraries}")
endif()

# A version that this one is not is refused.
file(WRITE ${work}/newer/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(newer LANGUAGES CXX)\nfind_package(flamia 99.0 REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${work}/newer -B ${work}/newer/build -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${work}/prefix
  RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(code EQUAL 0 OR NOT output MATCHES "${VERSION}")
  message(FATAL_ERROR "flamia ${VERSION} was accepted as 99.0, or the message does not name it:\n${output}")
endif()

if(CLI)
  run(${work}/prefix/bin/flamia recipes)
endif()
