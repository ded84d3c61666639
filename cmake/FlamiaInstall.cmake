# SPDX-License-Identifier: Apache-2.0
# find_package(flamia [COMPONENTS static|shared]) after `cmake --install`. Both kinds of library are made from one compilation:
# `flamia` is what BUILD_SHARED_LIBS says, the other kind links the same objects.
include(CMakePackageConfigHelpers)

get_target_property(flamia_type flamia TYPE)
if(flamia_type STREQUAL "STATIC_LIBRARY")
  set(flamia_kind static)
  set(flamia_other shared)
else()
  set(flamia_kind shared)
  set(flamia_other static)
endif()
string(TOUPPER ${flamia_other} flamia_other_type)
get_target_property(flamia_links flamia LINK_LIBRARIES)
add_library(flamia_${flamia_other} ${flamia_other_type} $<TARGET_OBJECTS:flamia>)
target_include_directories(flamia_${flamia_other} PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(flamia_${flamia_other} PRIVATE ${flamia_links})
target_compile_features(flamia_${flamia_other} PUBLIC cxx_std_20)
set_target_properties(flamia_${flamia_other} PROPERTIES
  OUTPUT_NAME flamia EXPORT_NAME flamia VERSION ${PROJECT_VERSION} SOVERSION 0 LINKER_LANGUAGE CXX)

set(flamia_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flamia)
install(TARGETS flamia EXPORT flamia-${flamia_kind})
install(TARGETS flamia_${flamia_other} EXPORT flamia-${flamia_other})
foreach(kind static shared)
  install(EXPORT flamia-${kind} NAMESPACE flamia:: FILE flamia-${kind}-targets.cmake DESTINATION ${flamia_package_dir})
endforeach()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/flamia-config.cmake.in ${PROJECT_BINARY_DIR}/flamia-config.cmake
  INSTALL_DESTINATION ${flamia_package_dir} NO_SET_AND_CHECK_MACRO)
# before 1.0 a minor version may change the interface
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flamia-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flamia-config.cmake ${PROJECT_BINARY_DIR}/flamia-config-version.cmake DESTINATION ${flamia_package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flamia DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(FLAMIA_BUILD_CLI)
  if(flamia_kind STREQUAL "shared")  # the installed program finds the library beside it
    file(RELATIVE_PATH flamia_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_target_properties(flamia_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${flamia_from_bin}")
  endif()
  install(TARGETS flamia_cli)
  if(EXISTS ${PROJECT_SOURCE_DIR}/data)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/data DESTINATION ${CMAKE_INSTALL_DATADIR}/flamia FILES_MATCHING PATTERN "*.safetensors" PATTERN "README*")
  endif()
endif()
