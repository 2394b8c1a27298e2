# Installs the build into a fresh prefix, then configures, builds and runs the project beside this file against it.
cmake_policy(VERSION 3.22)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGV}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component library)

set(flags)
if(SANITIZE)
  set(flags -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_PREFIX_PATH=${WORK}/prefix\;${PREFIX_PATH} ${flags})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/outside)
if(NOT output MATCHES "1 \\+ 2 = 3 over 2 ranks")
  message(FATAL_ERROR "the outside project printed: ${output}")
endif()

# Nothing in the package may lead back into the build or the source tree, and tests stay at home.
file(GLOB_RECURSE strays ${WORK}/prefix/*.h ${WORK}/prefix/*.cc)
list(FILTER strays INCLUDE REGEX "_test\\.|/testing/|/testdata/|test_support|fake_|_suite\\.")
if(strays)
  message(FATAL_ERROR "installed by mistake: ${strays}")
endif()
file(GLOB_RECURSE targets ${WORK}/prefix/*/PhalanxTargets.cmake)
file(STRINGS ${targets} leaks REGEX "${BUILD}/|${SOURCE}/")
if(leaks)
  message(FATAL_ERROR "the package refers to the build tree: ${leaks}")
endif()
message(STATUS "${output}")
