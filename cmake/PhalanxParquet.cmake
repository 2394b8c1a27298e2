# Parquet and Arrow files, by Arrow C++. Sets PHALANX_PARQUET (whether it is there), PHALANX_PARQUET_LIBRARIES and
# PHALANX_PARQUET_INCLUDE.
#
# Looked for: where PHALANX_PYARROW says (the folder of the pyarrow wheel, which carries headers and libraries), then
# where CMake finds the package Parquet (libarrow-dev and libparquet-dev).

set(PHALANX_PYARROW "" CACHE PATH "folder of an installed pyarrow wheel, whose Arrow C++ reads Parquet and Arrow files")
set(PHALANX_PARQUET OFF)
set(PHALANX_PARQUET_INCLUDE)
set(PHALANX_PARQUET_LIBRARIES)

if(PHALANX_PYARROW)
  foreach(_library parquet arrow)
    file(GLOB _found ${PHALANX_PYARROW}/lib${_library}.so ${PHALANX_PYARROW}/lib${_library}.so.*)
    if(NOT _found OR NOT EXISTS ${PHALANX_PYARROW}/include/parquet/arrow/reader.h)
      message(FATAL_ERROR
        "PHALANX_PYARROW is ${PHALANX_PYARROW}: expected the folder of an installed pyarrow wheel, with "
        "include/parquet/arrow/reader.h and lib${_library}.so*. Its place: "
        "python3 -c 'import pyarrow; print(pyarrow.__path__[0])'")
    endif()
    list(GET _found 0 _found)
    list(APPEND PHALANX_PARQUET_LIBRARIES ${_found})
  endforeach()
  set(PHALANX_PARQUET_INCLUDE ${PHALANX_PYARROW}/include)
  set(PHALANX_PARQUET ON)
else()
  find_package(Parquet QUIET)  # finds Arrow C++ too
  if(Parquet_FOUND)
    set(PHALANX_PARQUET_LIBRARIES $<BUILD_INTERFACE:Parquet::parquet_shared> $<INSTALL_INTERFACE:parquet>
                                  $<INSTALL_INTERFACE:arrow>)
    set(PHALANX_PARQUET ON)
  endif()
endif()
