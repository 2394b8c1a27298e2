# Compiler-side tools: cache, linker, sanitizers. Each is used where it is found, and said once.

find_program(PHALANX_CCACHE ccache)
if(PHALANX_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # By default ccache steps aside where a source has precompiled headers, and knows nothing of what was compiled in
  # another checkout.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
                                  CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=true ${PHALANX_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${PHALANX_CCACHE})
endif()

# mold links these programs about five times faster than bfd; gcc before 12.1 does not know its name.
find_program(PHALANX_MOLD mold)
if(PHALANX_MOLD)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LINK_OPTIONS -fuse-ld=mold)
  check_cxx_source_compiles("int main() { return 0; }" PHALANX_HAVE_MOLD)
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
  if(PHALANX_HAVE_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

if(PHALANX_SANITIZE)
  add_compile_options(-fsanitize=${PHALANX_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${PHALANX_SANITIZE})
  if(PHALANX_SANITIZE MATCHES "undefined")  # by default a finding is printed, and the program goes on and passes
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()

add_library(phalanx_warnings INTERFACE)
target_compile_options(phalanx_warnings INTERFACE -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
                                                  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # False alarms of gcc 12: -Wrestrict on std::string concatenation; -Wsubobject-linkage in unity builds, where a source
  # file is an included one.
  target_compile_options(phalanx_warnings INTERFACE -Wno-restrict -Wno-subobject-linkage)
  if(PHALANX_SANITIZE)  # sees std::regex through the sanitizer's checks
    target_compile_options(phalanx_warnings INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
if(PHALANX_WERROR)
  target_compile_options(phalanx_warnings INTERFACE -Werror)
endif()

message(STATUS "Phalanx: ccache ${PHALANX_CCACHE}, mold ${PHALANX_MOLD}, sanitizer '${PHALANX_SANITIZE}'")
