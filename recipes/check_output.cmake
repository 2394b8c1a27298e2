# Runs a command and compares what it prints, line by line, with what it must:
#   cmake "-DCOMMAND=program|argument" -DEXPECTED=file -P check_output.cmake
string(REPLACE "|" ";" COMMAND "${COMMAND}")
execute_process(COMMAND ${COMMAND} OUTPUT_VARIABLE found ERROR_VARIABLE errors RESULT_VARIABLE status)
file(READ ${EXPECTED} expected)
if(NOT status EQUAL 0 OR NOT found STREQUAL expected)
  message(FATAL_ERROR "status ${status}\n${errors}\nfound:\n${found}\nexpected (${EXPECTED}):\n${expected}")
endif()
