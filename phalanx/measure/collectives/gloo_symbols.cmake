# cmake -DNM=nm -DOBJECTS=a.o;b.o -P gloo_symbols.cmake
#
# Debian's gloo headers may be older than the gloo that libtorch holds. c10d_gloo_group.cc may name gloo's types, but
# nothing compiled from those headers may be in its object file, and nothing of gloo may be called from it: no function,
# vtable or type information of namespace gloo, defined or referenced. (A shared_ptr that is passed on is std's code.)
set(object "")
foreach(file ${OBJECTS})
  if(file MATCHES "c10d_gloo_group")
    set(object ${file})
  endif()
endforeach()
if(NOT object)
  message(FATAL_ERROR "no object file of c10d_gloo_group.cc among: ${OBJECTS}")
endif()
execute_process(COMMAND ${NM} ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT symbols MATCHES "ProcessGroupGloo")
  message(FATAL_ERROR "nm ${object} says nothing of ProcessGroupGloo")
endif()
string(REGEX MATCHALL "_Z(T[VISTh])?(N|NK)?4gloo[^\n]*" found "${symbols}")
if(found)
  message(FATAL_ERROR "gloo's own code has got into ${object}: ${found}")
endif()
