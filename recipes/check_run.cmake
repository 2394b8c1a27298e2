# Runs a recipe and checks how it ends, what it prints and what it writes:
#
#   cmake ["-DPASS=regular expression"] [-DSTATUS=0] ["-DFILES=path|path=regular expression"] -P check_run.cmake --
#         program argument...
#
# ctest by itself ignores the status of a test that has a regular expression: a recipe that crashed at its end, or in
# one rank, would pass. Status 77 ("skipped") gets a line of its own, for ctest's SKIP_REGULAR_EXPRESSION.
cmake_minimum_required(VERSION 3.22)

set(command "")
set(is_command FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(index RANGE ${last})
  if(is_command)
    string(REPLACE ";" "\\;" word "${CMAKE_ARGV${index}}")
    list(APPEND command "${word}")
  elseif("${CMAKE_ARGV${index}}" STREQUAL "--")
    set(is_command TRUE)
  endif()
endforeach()
if(NOT DEFINED STATUS)
  set(STATUS 0)
endif()
string(REPLACE "|" ";" files "${FILES}")
foreach(file IN LISTS files)
  string(REGEX REPLACE "=.*" "" path "${file}")
  file(REMOVE "${path}")  # an earlier run's
endforeach()

execute_process(COMMAND ${command} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE found
                ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
if("${found}" STREQUAL 77)
  message("The recipe ended with status 77.")
  return()
endif()
if(NOT "${found}" STREQUAL "${STATUS}")
  message(FATAL_ERROR "the recipe ended with '${found}'; expected status ${STATUS}")
endif()
if(NOT "${PASS}" STREQUAL "" AND NOT "${output}" MATCHES "${PASS}")
  message(FATAL_ERROR "nothing in the output matches '${PASS}'")
endif()
foreach(file IN LISTS files)
  string(REGEX REPLACE "=.*" "" path "${file}")
  set(expected ".")
  if("${file}" MATCHES "=(.+)$")
    set(expected "${CMAKE_MATCH_1}")
  endif()
  if(NOT EXISTS "${path}")
    message(FATAL_ERROR "the recipe has not written ${path}")
  endif()
  file(READ "${path}" text)
  if(NOT "${text}" MATCHES "${expected}")
    message(FATAL_ERROR "${path} is empty, or nothing in it matches '${expected}'")
  endif()
endforeach()
