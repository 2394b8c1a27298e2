# Precompiled headers for what includes torch: parsing them is most of the work of compiling such a source.
#
#   phalanx_precompile(<target>)    the target's sources find the headers of cmake/precompiled.h parsed already
#
# A source still names every header that it uses: PHALANX_PCH=OFF builds without.

option(PHALANX_PCH "Precompile torch's headers" ON)
if(PHALANX_PCH AND NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  set(PHALANX_PCH OFF)
endif()

if(PHALANX_PCH)
  find_package(fmt REQUIRED)
  find_package(spdlog REQUIRED)
  # Code for a library and for a program must not differ, or each would want a set of its own. ccache sees through
  # precompiled headers only with -fpch-preprocess (and see PhalanxTools.cmake).
  add_library(phalanx_precompile_options INTERFACE)
  target_compile_options(phalanx_precompile_options INTERFACE -fPIC $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  add_library(phalanx_precompiled OBJECT ${PROJECT_SOURCE_DIR}/cmake/precompiled.cc)
  target_link_libraries(phalanx_precompiled PRIVATE phalanx_torch fmt::fmt spdlog::spdlog phalanx_warnings
                                                    phalanx_precompile_options)
  target_precompile_headers(phalanx_precompiled PRIVATE ${PROJECT_SOURCE_DIR}/cmake/precompiled.h)
endif()

function(phalanx_precompile target)
  if(PHALANX_PCH)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:phalanx_precompile_options>)
    target_precompile_headers(${target} REUSE_FROM phalanx_precompiled)
  endif()
endfunction()
