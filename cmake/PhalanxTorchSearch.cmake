# Where libtorch is. Sets PHALANX_TORCH_ROOT (the folder with include/ and lib/, or empty), PHALANX_TORCH_VERSION and
# PHALANX_TORCH_SEARCHED (what was looked at, and why it was passed over).
#
# Order: PHALANX_TORCH_DIR (cache variable or environment; nothing else is tried then), the active Python environment
# (PHALANX_PYTHON or python3), the private .venv beside this project, PHALANX_TORCH_FALLBACK.
#
# scripts/bootstrap.sh asks this very file, so that the two cannot disagree:
#   cmake -P cmake/PhalanxTorchSearch.cmake     prints "<version> <folder>", or fails and says where it looked

set(PHALANX_TORCH_OLDEST 2.11)
set(PHALANX_TORCH_FIRST_TOO_NEW 2.14)

set(_phalanx_torch_candidates)
if(PHALANX_TORCH_DIR)
  set(_phalanx_torch_candidates "${PHALANX_TORCH_DIR}")
elseif(NOT "$ENV{PHALANX_TORCH_DIR}" STREQUAL "")
  set(_phalanx_torch_candidates "$ENV{PHALANX_TORCH_DIR}")
else()
  set(_phalanx_python python3)
  if(NOT "$ENV{PHALANX_PYTHON}" STREQUAL "")
    set(_phalanx_python "$ENV{PHALANX_PYTHON}")
  endif()
  foreach(_python "${_phalanx_python}" "${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python")
    # find_spec does not import torch, which would take over a second.
    execute_process(
      COMMAND "${_python}" -c
              "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s and s.origin else '')"
      OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _status)
    if(_status EQUAL 0 AND _found)
      list(APPEND _phalanx_torch_candidates "${_found}")
    endif()
  endforeach()
  if(PHALANX_TORCH_FALLBACK)
    list(APPEND _phalanx_torch_candidates "${PHALANX_TORCH_FALLBACK}")
  endif()
endif()

set(PHALANX_TORCH_ROOT "")
set(PHALANX_TORCH_VERSION "")
set(PHALANX_TORCH_SEARCHED "")
foreach(_root ${_phalanx_torch_candidates})
  if(NOT EXISTS "${_root}/include/ATen/core/Tensor.h" OR NOT EXISTS "${_root}/lib/libtorch_cpu.so")
    string(APPEND PHALANX_TORCH_SEARCHED "  ${_root}: no include/ATen/core/Tensor.h and lib/libtorch_cpu.so\n")
    continue()
  endif()
  set(_lines)
  foreach(_header headeronly/version.h csrc/api/include/torch/version.h)
    if(NOT _lines AND EXISTS "${_root}/include/torch/${_header}")
      file(STRINGS "${_root}/include/torch/${_header}" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    endif()
  endforeach()
  string(REGEX REPLACE ".*VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*VERSION_PATCH ([0-9]+).*" "\\1.\\2.\\3"
         _version "${_lines}")
  if(_version VERSION_GREATER_EQUAL PHALANX_TORCH_OLDEST AND _version VERSION_LESS PHALANX_TORCH_FIRST_TOO_NEW)
    set(PHALANX_TORCH_ROOT "${_root}")
    set(PHALANX_TORCH_VERSION "${_version}")
    break()
  endif()
  string(APPEND PHALANX_TORCH_SEARCHED "  ${_root}: version '${_version}', needed is 2.11 to 2.13\n")
endforeach()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  if(NOT PHALANX_TORCH_ROOT)
    message(FATAL_ERROR "no libtorch 2.11 to 2.13 found; looked at:\n${PHALANX_TORCH_SEARCHED}")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${PHALANX_TORCH_VERSION} ${PHALANX_TORCH_ROOT}")
endif()
